"""Encoded saved tensors: gradients are the same bit for bit, and no memory is kept too long."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_tensor_models import (
    EXACT,
    MIXES,
    SAVING_MODELS,
    SaveArguments,
    bytes_of,
    saved_and_restored,
    saving_model,
    seeded_model,
)
from stages import loss_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from zoo import same
from zoo.models import MODELS as ZOO

from pipecompile.codegen.stages import emit
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.target import Target
from pipecompile.graph.random_streams import StreamKey
from pipecompile.graph.saved_tensors import EncodedStorages, encode_saved_tensors
from pipecompile.ir.encodings import ENCODINGS
from pipecompile.runtime.stage import EagerStage


def images(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, 3, 16, 8, generator=generator) for _ in range(count))


def trained(
    model: nn.Module, inputs: Sequence[Sequence[Tensor]], *, halves: bool = False
) -> list[Any]:
    """Return gradients of inputs and parameters; all microbatches are in flight at once."""
    carries = tuple(value.is_floating_point() for value in inputs[0])
    stage = EagerStage(
        model, gradient_inputs=carries, loss=lambda outputs, _: outputs[0].square().mean()
    )
    forward = model.forward
    model.forward = lambda *args: (forward(*args),)  # type: ignore[method-assign]
    saved, found = [], []
    for microbatch, values in enumerate(inputs):
        torch.manual_seed(microbatch)
        saved.append(stage.forward(values, StreamKey(0, 0, microbatch))[1])
    for one in saved:
        if halves:
            gradients, live = stage.backward_input(one, ())
            stage.backward_weight(live, {})
        else:
            gradients = stage.backward(one, (), {})
        found += gradients
    return [*found, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("encodings", MIXES, ids="+".join)
@pytest.mark.parametrize("name", SAVING_MODELS)
def test_the_backward_is_the_same(name: str, encodings: Sequence[str]) -> None:
    inputs = [(image,) for image in images(3)]
    storages = EncodedStorages()
    got = trained(saving_model(seeded_model(name), *encodings, storages=storages), inputs)
    assert same(got, trained(seeded_model(name), inputs))
    if "offload" in encodings:
        assert (
            0 < storages.traffic.back_bytes <= storages.traffic.out_bytes
        )  # not all that is saved is read


@pytest.mark.parametrize("name", SAVING_MODELS)
def test_the_halves_of_a_split_backward_are_the_same(name: str) -> None:
    inputs = [(image,) for image in images(2)]
    got = trained(saving_model(seeded_model(name), *EXACT), inputs, halves=True)
    assert same(got, trained(seeded_model(name), inputs, halves=True))


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_an_emitted_stage_has_the_same_gradients(name: str) -> None:
    target = Target.of(ZOO[name](), name)
    model, call = target.model.train(), target.call
    captured = capture(model, call)
    storages = EncodedStorages()

    def gradients(*encodings: str) -> list[Tensor | None]:
        model.zero_grad()
        module = captured.instantiate(call)
        (stage,) = emit(module, {node.name: 0 for node in module.graph.nodes})
        if encodings:
            saving_model(stage.module, *encodings, storages=storages)
        run = EagerStage(
            stage.module, gradient_inputs=stage.gradient_inputs, random=stage.random, loss=loss_of
        )
        values = captured.inputs.flatten(call)
        for one in [run.forward(values, StreamKey(0, 0, microbatch))[1] for microbatch in range(2)]:
            run.backward(one, (), {})
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients()
    assert same(gradients("mask", "relu", "pool", "offload"), plain)
    assert 0 < storages.traffic.back_bytes <= storages.traffic.out_bytes


def test_half_is_not_exact_and_within_its_bound() -> None:
    inputs = [(image,) for image in images(1)]
    plain, got = (
        torch.cat(
            [
                gradient.flatten()
                for gradient in trained(saving_model(seeded_model("attention"), *names), inputs)
            ]
        )
        for names in ((), ("half",))
    )
    assert 0 < (got - plain).norm() < 2**-8 * plain.norm()


DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view with any strides and offset, of any bits or of zeros and one constant."""
    dtype, count = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 60))
    content = st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize)
    found = draw(content), bytes(dtype.itemsize) if draw(st.booleans()) else draw(content)
    elements = b"".join(draw(st.sampled_from(found)) for _ in range(count))
    storage = torch.frombuffer(bytearray(elements or b"\0"), dtype=torch.uint8).clone()[
        : len(elements)
    ]
    flat = storage.view(dtype) if count else torch.empty(0, dtype=dtype)
    offset = draw(st.integers(0, count))
    size, stride = [], []
    room = count - offset - 1
    for _ in range(draw(st.integers(0, 3))):
        stride.append(draw(st.integers(0, 4)))
        size.append(draw(st.integers(0, 1 + (max(room, 0) // stride[-1] if stride[-1] else 3))))
        room -= max(size[-1] - 1, 0) * stride[-1]
    if room < 0:
        size, stride = [0, *size], [1, *stride]
    return flat.as_strided(size, stride, min(offset, flat.numel()))


@given(value=views(), encoding=st.sampled_from(["mask", "offload", "relu", "pool"]))
def test_any_view_is_restored(value: Tensor, encoding: str) -> None:
    (got,) = saved_and_restored(encoding, value)
    assert (got.dtype, got.shape, got.stride()) == (value.dtype, value.shape, value.stride())
    assert got.storage_offset() == value.storage_offset()
    if value.dtype == torch.bool:
        assert torch.equal(got, value)  # whatever byte stands for true
    else:
        assert torch.equal(bytes_of(got), bytes_of(value))


def result_of(
    encodings: Sequence[str], step: Callable[[Tensor], Tensor], *, exempt: Sequence[Tensor] = ()
) -> Tensor:
    """Return the result of a `step` on (4, 64) positive numbers, before its backward."""
    value = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with encode_saved_tensors(*encodings, storages=EncodedStorages(), exempt=exempt):
        return step(value * 1)


def write_to_an_argument(value: Tensor) -> Tensor:
    result = value.sin()
    value.view(-1)[3:5].add_(1)
    return result


def write_to_a_result(value: Tensor) -> Tensor:
    active = value.sub(0.5).relu()
    result = active + 1
    active[:, 0].mul_(2)
    return result


def write_to_an_image(value: Tensor) -> Tensor:
    image = value * 2
    result = functional.max_pool1d(image, 2)
    image.t().add_(1)
    return result


def write_to_a_mask(value: Tensor) -> Tensor:
    noise = (value > 0.5).float()
    result = value * noise
    noise.zero_()
    return result


@pytest.mark.parametrize("encodings", [(), *MIXES, ("half",)], ids="+".join)
@pytest.mark.parametrize(
    "write", [write_to_an_argument, write_to_a_result, write_to_an_image, write_to_a_mask]
)
def test_writing_to_what_is_saved_raises_as_without_encodings(
    write: Callable[[Tensor], Tensor], encodings: Sequence[str]
) -> None:
    result = result_of(encodings, write)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        result.sum().backward()


@pytest.mark.parametrize("encodings", [(), *MIXES], ids="+".join)
def test_writing_to_an_exempt_tensor_raises_too(encodings: Sequence[str]) -> None:
    weight = torch.ones(64, requires_grad=True)
    result = result_of(encodings, lambda value: value * weight, exempt=[weight])
    with torch.no_grad():
        weight.view(8, 8)[0].add_(1)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        result.sum().backward()


def test_a_storage_that_was_written_to_is_encoded_anew() -> None:
    value, storages = torch.rand(8), EncodedStorages()
    graphs: list[Any] = []
    for _ in range(2):
        with encode_saved_tensors("offload", storages=storages, exempt=()):
            graphs.append(SaveArguments.apply(torch.ones(1, requires_grad=True), value.add_(1)))
    assert same(graphs[1].grad_fn.saved_tensors, (value,))
    assert storages.traffic.out_bytes == 2 * value.nbytes


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_tensor_that_is_more_than_its_elements_is_kept(encoding: str) -> None:
    number = torch.randn(8, dtype=torch.complex64)
    sparse = torch.eye(3).to_sparse()
    conjugate, negative, other = saved_and_restored(
        encoding, number.conj(), number.conj().imag, sparse
    )
    assert torch.equal(conjugate.resolve_conj(), number.conj().resolve_conj())
    assert torch.equal(negative.resolve_neg(), number.conj().imag.resolve_neg())
    assert torch.equal(other.to_dense(), sparse.to_dense())


def test_views_of_one_storage_are_moved_once() -> None:
    storages, mixed = EncodedStorages(), torch.rand(6, 8)
    graphs = []
    for values in ((mixed, mixed.t()), (mixed[1:, ::2], mixed.view(torch.int32))):
        with encode_saved_tensors("offload", storages=storages, exempt=()):
            graphs.append(SaveArguments.apply(torch.ones(1, requires_grad=True), *values))
    assert storages.traffic.out_bytes == mixed.nbytes
    found = [value for graph in graphs for value in graph.grad_fn.saved_tensors]
    assert same(found, [mixed, mixed.t(), mixed[1:, ::2], mixed.view(torch.int32)])
    assert len({value.untyped_storage().data_ptr() for value in found}) == 1
    assert storages.traffic.back_bytes == mixed.nbytes


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("end", ["backward", "abandoned", "failed"])
@pytest.mark.parametrize("encodings", MIXES, ids="+".join)
def test_storages_are_freed_at_the_end(encodings: Sequence[str], end: str) -> None:
    gc.collect()
    gc.disable()  # cycles would not be seen to stay
    try:
        storage = saved_storage(encodings, end)
        assert storage.expired()
    finally:
        gc.enable()


def saved_storage(encodings: Sequence[str], end: str) -> StorageWeakRef:
    """Return the storage of a tensor that autograd saved, after the run."""
    value = torch.rand(4, 64, requires_grad=True) * 1
    storage = StorageWeakRef(value.untyped_storage())
    with (
        suppress(ZeroDivisionError),
        encode_saved_tensors(*encodings, storages=EncodedStorages(), exempt=[value]),
    ):
        result = functional.max_pool1d(functional.dropout(value.sin(), 0.5).relu(), 2).sigmoid()
        if end == "failed":
            1 / 0  # noqa: B018
    if end == "backward":
        result.sum().backward()
    return storage


def relu_in_a_function(value: Tensor) -> Tensor:
    """A node that is no ReLU saves ReLU's result and reads its values."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            with torch.enable_grad():
                result = value.relu()
            ctx.save_for_backward(result)
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0]

    return Scaled.apply(value - 0.5)  # type: ignore[no-any-return, no-untyped-call]


def penalised(value: Tensor) -> Tensor:
    """A backward inside the block, and a second derivative through it."""
    image = functional.max_pool2d(value[:, None].unflatten(-1, (8, 8)).relu(), 2)
    (gradient,) = torch.autograd.grad(image.square().sum(), value, create_graph=True)
    (other,) = torch.autograd.grad(value.sub(0.5).relu().square().sum(), value)
    return gradient.square().sum() + image.sum() + (value * other).sum()


def nested(value: Tensor) -> Tensor:
    with encode_saved_tensors("pool", "relu", storages=EncodedStorages(), exempt=()):
        value = functional.max_pool1d(value.relu(), 2)
    with encode_saved_tensors("half", storages=EncodedStorages(), exempt=()):
        pass
    return functional.dropout(functional.max_pool1d(value.sub(0.5).relu(), 2), 0.5)


def recomputed(value: Tensor) -> Tensor:
    def region(value: Tensor) -> Tensor:
        with encode_saved_tensors(
            "pool", "relu", "mask", "offload", storages=EncodedStorages(), exempt=()
        ):
            value = functional.dropout(
                functional.max_pool1d((value.sigmoid() - 0.6).relu(), 2), 0.5
            )
        return value.sigmoid()

    return checkpoint(region, value.sin(), use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("encodings", MIXES, ids="+".join)
@pytest.mark.parametrize("step", [relu_in_a_function, penalised, nested, recomputed])
def test_other_hooks_and_nested_blocks(
    step: Callable[[Tensor], Tensor], encodings: Sequence[str]
) -> None:
    """Other users of hooks: custom functions, backwards in a forward, blocks within blocks."""
    gradients = []
    for chosen in ((), encodings):
        torch.manual_seed(0)
        leaf = torch.rand(4, 64, requires_grad=True)
        with encode_saved_tensors(*chosen, storages=EncodedStorages(), exempt=()):
            result = step(leaf * 1)
        gradients.append(torch.autograd.grad(result.square().sum(), leaf))
    assert same(*gradients)
    assert gradients[0][0].any()


def test_a_second_derivative_is_the_same() -> None:
    gradients = []
    for encodings in ((), EXACT):
        torch.manual_seed(0)
        leaf = torch.rand(4, 64, requires_grad=True)
        with encode_saved_tensors(*encodings, storages=EncodedStorages(), exempt=()):
            result = functional.max_pool1d(
                functional.dropout((leaf * 2 - 1).relu(), 0.2).sin().square(), 2
            )
        (once,) = torch.autograd.grad(result.sum(), leaf, create_graph=True)
        gradients.append(torch.autograd.grad(once.square().sum(), leaf))
    assert same(*gradients)


def test_a_failure_leaves_no_hooks() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        encode_saved_tensors(*EXACT, storages=EncodedStorages(), exempt=()),
    ):
        1 / 0  # noqa: B018
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_unknown_encoding_is_refused() -> None:
    keeper: Any = encode_saved_tensors
    with pytest.raises(InputError, match="unknown encoding 'zip'; choose from mask, relu"):
        keeper("zip", storages=EncodedStorages(), exempt=()).__enter__()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("encodings", MIXES, ids="+".join)
@pytest.mark.parametrize("name", SAVING_MODELS)
def test_the_backward_is_the_same_on_a_gpu(name: str, encodings: Sequence[str]) -> None:
    inputs = [(image.cuda(),) for image in images(3)]
    got, plain = (
        trained(saving_model(seeded_model(name).cuda(), *chosen), inputs)
        for chosen in (encodings, ())
    )
    torch.testing.assert_close(got, plain)  # some backwards sum in any order there


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloading_frees_the_gpu() -> None:
    storages, values = EncodedStorages(), [torch.rand(2**20, device="cuda") for _ in range(8)]
    sums = [float(value.sum()) for value in values]
    with encode_saved_tensors("offload", storages=storages, exempt=()):
        graph = SaveArguments.apply(torch.ones(1, requires_grad=True), *values)
    before = torch.cuda.memory_allocated()
    values.clear()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks which copies are done
    assert torch.cuda.memory_allocated() <= before - 8 * 2**22 + 512
    assert [float(value.sum()) for value in graph.grad_fn.saved_tensors] == sums
    assert storages.traffic.back_bytes == storages.traffic.out_bytes == 8 * 2**22
