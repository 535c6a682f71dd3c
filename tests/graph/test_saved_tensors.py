"""What is kept in another form for the backward: the gradients are the same bit for bit, and memory is what is said."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from allocations import events
from hypothesis import given
from hypothesis import strategies as st
from stages import loss_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from zoo import same
from zoo.models import MODELS as ZOO

from pipecompile.api.target import Target
from pipecompile.codegen.stages import emit
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.graph.encodings import (
    encode_mask,
    encode_narrow,
    encode_sign,
    pack_bits,
    unpack_bits,
)
from pipecompile.graph.random_streams import StreamKey
from pipecompile.graph.saved_tensors import EncodedStorages, encode_saved_tensors
from pipecompile.ir.encodings import CHUNK_ELEMENTS, POLICIES, Memory, Policy
from pipecompile.memory_model.encoding_costs import (
    SavedStorage,
    SavingCost,
    cost_by_policy,
    costs_by_use,
)
from pipecompile.runtime.stage import EagerStage

EXACT = tuple(policy for policy in POLICIES if policy != "half")
MIXES = (*((policy,) for policy in EXACT), ("mask", "relu", "pool"), EXACT)


class Block(nn.Module):
    """As in a convolutional network's first layers."""

    def __init__(self, inputs: int, outputs: int, *, inplace: bool) -> None:
        super().__init__()
        self.convolution, self.norm = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
        )
        self.relu, self.pool = nn.ReLU(inplace=inplace), nn.MaxPool2d(3, 2, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return self.pool(self.relu(self.norm(self.convolution(image))))  # type: ignore[no-any-return]


class Pools(nn.Module):
    """Every kind of pooling, and ReLU on what others keep and what they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6 * 3 * 3, 5)

    def forward(self, image: Tensor) -> Tensor:
        image = self.first(image).relu()
        lined = functional.max_pool1d(image.flatten(2), 3).sum()
        image = functional.max_pool2d(image * image, 2, ceil_mode=True).relu_()
        deep = (
            functional.max_pool3d(image[:, None], 2).sum()
            + functional.avg_pool3d(image[:, None], 2).sum()
        )
        image = functional.avg_pool2d(
            image.to(memory_format=torch.channels_last), 3, stride=1, padding=1
        )
        adaptive = functional.adaptive_max_pool3d(image[:, None], (2, 3, 3)).sum()
        image = functional.adaptive_max_pool2d(image, 5)
        return (
            self.last(functional.adaptive_avg_pool2d(image, 3).flatten(1)) + lined * deep + adaptive
        )  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Views of one projection, dropout of scores, and the table of the embedding once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixed, self.norm = (
            nn.Embedding(24, 24),
            nn.Linear(24, 72),
            nn.LayerNorm(24),
        )
        self.head = nn.Linear(24, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, value: Tensor) -> Tensor:
        tokens = self.table(value.flatten(1).abs().mul(7).long() % 24)[:, :12]
        query, key, given = self.mixed(tokens).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, given, dropout_p=0.2)
        tokens = tokens + functional.dropout(mixed.transpose(1, 2).flatten(2), 0.1)
        return self.head(self.norm(tokens)) * tokens.transpose(1, 2).mean() + value.mean()  # type: ignore[no-any-return]


class Writes(nn.Module):
    """In place, on views, before and after they are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        value[..., 4:].mul_(self.first.bias[4:])
        value[..., :4].relu_()
        return self.second(
            functional.dropout(value.transpose(-1, -2), 0.4).transpose(-1, -2)
        ).relu_()


class Checkpointed(nn.Module):
    """With a region that is computed again, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        value = functional.dropout(self.before(value).relu(), 0.3)
        value = checkpoint(
            lambda x: functional.dropout(self.inside(x).relu(), 0.3), value, use_reentrant=False
        )
        return self.after(value).relu()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(
        Block(3, 8, inplace=True), Block(8, 8, inplace=False), nn.Dropout2d(0.2)
    ),
    "channels last": lambda: Block(3, 8, inplace=False).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "pools": Pools,
    "attention": Attention,
    "writes": Writes,
    "checkpointed": Checkpointed,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def images(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, 3, 16, 8, generator=generator) for _ in range(count))


def state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def kept_by(model: nn.Module, *policies: Any, storages: EncodedStorages | None = None) -> nn.Module:
    """The same model; its forward keeps by `policies`."""
    forward, storages = model.forward, storages or EncodedStorages()

    def kept(*values: Any) -> Any:
        with encode_saved_tensors(
            *policies, storages=storages, exempt=[*state(model), *values]
        ) as ends:
            return ends(forward(*values))

    model.forward = kept  # type: ignore[method-assign]
    return model


def trained(
    model: nn.Module, inputs: Sequence[Sequence[Tensor]], *, halves: bool = False
) -> list[Any]:
    """The gradients of `inputs`, each of a microbatch, and parameters; all microbatches are in flight at once."""
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


@pytest.mark.parametrize("policies", MIXES, ids="+".join)
@pytest.mark.parametrize("name", MODELS)
def test_the_backward_is_the_same(name: str, policies: Sequence[str]) -> None:
    inputs = [(image,) for image in images(3)]
    storages = EncodedStorages()
    got = trained(kept_by(made(name), *policies, storages=storages), inputs)
    assert same(got, trained(made(name), inputs))
    if "offload" in policies:
        assert (
            0 < storages.traffic.back_bytes <= storages.traffic.out_bytes
        )  # not all that is saved is read


@pytest.mark.parametrize("name", MODELS)
def test_so_are_its_halves(name: str) -> None:
    inputs = [(image,) for image in images(2)]
    got = trained(kept_by(made(name), *EXACT), inputs, halves=True)
    assert same(got, trained(made(name), inputs, halves=True))


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_an_emitted_stage_runs_with_it(name: str) -> None:
    target = Target.of(ZOO[name](), name)
    model, call = target.model.train(), target.call
    captured = capture(model, call)
    storages = EncodedStorages()

    def gradients(*policies: str) -> list[Tensor | None]:
        model.zero_grad()
        module = captured.instantiate(call)
        (stage,) = emit(module, {node.name: 0 for node in module.graph.nodes})
        if policies:
            kept_by(stage.module, *policies, storages=storages)
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
            [gradient.flatten() for gradient in trained(kept_by(made("attention"), *names), inputs)]
        )
        for names in ((), ("half",))
    )
    assert 0 < (got - plain).norm() < 2**-8 * plain.norm()


@pytest.mark.parametrize(
    "value", [1 / 3, -1e30, 1e-44, torch.finfo(torch.float32).min, float("inf")]
)
def test_half_rounds_each_element(value: float) -> None:
    (got,) = through("half", torch.tensor([value]))
    assert got.item() == torch.tensor(value).bfloat16().item()  # of the lowest number −∞
    (exact,) = through("half", torch.tensor([value], dtype=torch.float64))
    assert exact.item() == value


class Keep(torch.autograd.Function):
    """Saves whatever it is given."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Tensor) -> Tensor:
        ctx.save_for_backward(*values)
        return anchor * 1


def through(
    policy: Any, *values: Tensor, storages: EncodedStorages | None = None
) -> tuple[Tensor, ...]:
    """`values` as a backward finds them."""
    with encode_saved_tensors(policy, storages=storages or EncodedStorages(), exempt=()):
        kept = Keep.apply(torch.ones(1, requires_grad=True), *values)
    return kept.grad_fn.saved_tensors  # type: ignore[no-any-return]


DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view of any bits, or of zeros and one constant: with an offset, permuted, with gaps, expanded, or empty."""
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


def bits(value: Tensor) -> Tensor:
    return torch.empty(value.numel(), dtype=value.dtype).copy_(value.flatten()).view(torch.uint8)


@given(value=views(), policy=st.sampled_from(["mask", "offload", "relu", "pool"]))
def test_what_is_kept_comes_back(value: Tensor, policy: str) -> None:
    (got,) = through(policy, value)
    assert (got.dtype, got.shape, got.stride()) == (value.dtype, value.shape, value.stride())
    assert got.storage_offset() == value.storage_offset()
    if value.dtype == torch.bool:
        assert torch.equal(got, value)  # whatever byte stands for true
    else:
        assert torch.equal(bits(got), bits(value))


@given(flags=st.lists(st.booleans(), max_size=70))
def test_eight_booleans_are_a_byte(flags: list[bool]) -> None:
    packed = pack_bits(torch.tensor(flags, dtype=torch.bool))
    assert packed.numel() == -(-len(flags) // 8)
    assert unpack_bits(packed, len(flags)).tolist() == flags


NUMBERS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, float("inf"), -float("inf"), float("nan"), 3.5]
)


@given(
    values=st.lists(NUMBERS, min_size=1, max_size=20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_relu_needs_the_sign_alone(values: list[float], dtype: torch.dtype) -> None:
    gradients = []
    for policies in ((), ("relu",)):
        value = torch.tensor(values, dtype=dtype, requires_grad=True)
        with encode_saved_tensors(*policies, storages=EncodedStorages(), exempt=()):
            result = (value * 1).relu()
        result.backward(torch.arange(1, 1 + len(values), dtype=dtype))
        gradients.append(value.grad)
    assert same(*gradients)


@pytest.fixture
def _filled() -> Iterator[None]:
    """New memory is not a number, so that a gradient shows whether it was read."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_filled")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(5, 7), (16, 15), (20, 300)])  # of indices in 1, 1 and 2 bytes
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d((3, 2), (2, 3), padding=1, ceil_mode=True),
        nn.MaxPool2d(2, dilation=2, stride=1),
        nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
        nn.AdaptiveMaxPool2d((3, 4)),
        nn.AdaptiveAvgPool2d((3, 4)),
        nn.MaxPool1d(2),
        nn.MaxPool3d((1, 2, 2)),
        nn.AdaptiveMaxPool3d((1, 2, 3)),
        nn.AvgPool3d((1, 2, 2)),
    ],
    ids=str,
)
def test_pooling_reads_of_its_input_the_layout_alone(
    pool: nn.Module, size: tuple[int, int], layout: Any
) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, *size).to(memory_format=layout).round()  # with ties
    image = image[0] if isinstance(pool, nn.MaxPool1d) else image
    gradients = []
    for policies in ((), ("pool",)):
        value = image.clone().requires_grad_()
        scaled = value * 2
        with encode_saved_tensors(*policies, storages=EncodedStorages(), exempt=()) as ends:
            result = ends(pool(scaled[:, None])[:, 0] if "3d" in str(pool) else pool(scaled))
        result.square().sum().backward()
        gradients.append(value.grad)
    assert same(*gradients)


def within(
    policies: Sequence[str], step: Callable[[Tensor], Tensor], *, exempt: Sequence[Tensor] = ()
) -> Tensor:
    """The result of a `step` on (4, 64) positive numbers, whose backward is due."""
    value = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with encode_saved_tensors(*policies, storages=EncodedStorages(), exempt=exempt):
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


@pytest.mark.parametrize("policies", [(), *MIXES, ("half",)], ids="+".join)
@pytest.mark.parametrize(
    "write", [write_to_an_argument, write_to_a_result, write_to_an_image, write_to_a_mask]
)
def test_writing_to_what_is_saved_raises_as_without_a_policy(
    write: Callable[[Tensor], Tensor], policies: Sequence[str]
) -> None:
    result = within(policies, write)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        result.sum().backward()


@pytest.mark.parametrize("policies", [(), *MIXES], ids="+".join)
def test_so_does_writing_to_what_is_exempt(policies: Sequence[str]) -> None:
    weight = torch.ones(64, requires_grad=True)
    result = within(policies, lambda value: value * weight, exempt=[weight])
    with torch.no_grad():
        weight.view(8, 8)[0].add_(1)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        result.sum().backward()


def test_what_was_written_to_is_encoded_again() -> None:
    value, storages = torch.rand(8), EncodedStorages()
    graphs: list[Any] = []
    for _ in range(2):
        with encode_saved_tensors("offload", storages=storages, exempt=()):
            graphs.append(Keep.apply(torch.ones(1, requires_grad=True), value.add_(1)))
    assert same(graphs[1].grad_fn.saved_tensors, (value,))
    assert storages.traffic.out_bytes == 2 * value.nbytes


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_more_than_its_elements_stays(policy: str) -> None:
    number = torch.randn(8, dtype=torch.complex64)
    sparse = torch.eye(3).to_sparse()
    conjugate, negative, other = through(policy, number.conj(), number.conj().imag, sparse)
    assert torch.equal(conjugate.resolve_conj(), number.conj().resolve_conj())
    assert torch.equal(negative.resolve_neg(), number.conj().imag.resolve_neg())
    assert torch.equal(other.to_dense(), sparse.to_dense())


def test_views_of_one_storage_move_once_whoever_saves_them() -> None:
    storages, mixed = EncodedStorages(), torch.rand(6, 8)
    graphs = []
    for values in ((mixed, mixed.t()), (mixed[1:, ::2], mixed.view(torch.int32))):
        with encode_saved_tensors("offload", storages=storages, exempt=()):
            graphs.append(Keep.apply(torch.ones(1, requires_grad=True), *values))
    assert storages.traffic.out_bytes == mixed.nbytes
    found = [value for graph in graphs for value in graph.grad_fn.saved_tensors]
    assert same(found, [mixed, mixed.t(), mixed[1:, ::2], mixed.view(torch.int32)])
    assert len({value.untyped_storage().data_ptr() for value in found}) == 1
    assert storages.traffic.back_bytes == mixed.nbytes


@pytest.mark.parametrize("end", ["backward", "abandoned", "failed"])
@pytest.mark.parametrize("policies", MIXES, ids="+".join)
def test_nothing_is_kept_afterwards(policies: Sequence[str], end: str) -> None:
    gc.collect()
    gc.disable()  # cycles would not be seen to stay
    try:
        storage = remember(policies, end)
        assert storage.expired()
    finally:
        gc.enable()


def remember(policies: Sequence[str], end: str) -> StorageWeakRef:
    """Of a tensor that the backward saves."""
    value = torch.rand(4, 64, requires_grad=True) * 1
    storage = StorageWeakRef(value.untyped_storage())
    with (
        suppress(ZeroDivisionError),
        encode_saved_tensors(*policies, storages=EncodedStorages(), exempt=[value]),
    ):
        result = functional.max_pool1d(functional.dropout(value.sin(), 0.5).relu(), 2).sigmoid()
        if end == "failed":
            1 / 0  # noqa: B018
    if end == "backward":
        result.sum().backward()
    return storage


def test_a_mask_is_zero_or_one_constant() -> None:
    for values in ([0.0, 1.25], [0.0], [-2.0, 0.0], [7.5], [float("nan"), 0.0]):
        elements = torch.tensor(values * 50)
        encoded = encode_mask(elements)
        assert encoded is not None
        assert same(bits(encoded.restore()), bits(elements))
    for values in ([0.0, 1.0, 2.0], [0.0, -0.0, 1.0], [1.0, 2.0], [-0.0, 1.0]):
        assert encode_mask(torch.tensor(values * 50)) is None
    late = torch.zeros(1000)
    late[900:902] = torch.tensor([1.0, 2.0])
    assert encode_mask(late) is None


def test_chunks_are_of_one_mask() -> None:
    chunk = CHUNK_ELEMENTS["cpu"]
    wide = torch.zeros(2 * chunk + 13)
    wide[chunk + 5 :: 3] = 2.5
    encoded = encode_mask(wide)
    assert encoded is not None and torch.equal(encoded.restore(), wide)
    assert torch.equal(encode_sign(wide).restore(), (wide > 0).float())
    wide[5] = 1.5
    assert encode_mask(wide) is None


def test_indices_take_the_smallest_integers() -> None:
    for bound, width in ((256, 1), (257, 2), (2**15, 2), (2**15 + 1, 4), (2**31, 4)):
        indices = torch.tensor([0, bound - 1])
        found: Any = encode_narrow(indices, bound=bound)
        assert found.elements.dtype.itemsize == width
        assert torch.equal(found.restore(), indices)
    assert encode_narrow(torch.tensor([0, 2**31]), bound=2**31 + 1) is None


IMAGE, PLANE = 2 * 8 * 32 * 32 * 4, 32 * 32  # bytes of an image in the middle, elements of a plane
WIDE = 16 * 256 * 4
KEPT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[SavedStorage, ...]]] = {
    "block": (
        lambda: Block(3, 8, inplace=False),
        (2, 3, 32, 32),
        (
            SavedStorage(IMAGE, "float32"),  # of the convolution, by batch normalisation
            *[SavedStorage(8 * 4, "float32")] * 2,
            SavedStorage(IMAGE, "float32", ("relu", "pool input")),
            SavedStorage(IMAGE // 2, "int64", ("pool indices",), bound=PLANE),
        ),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        ),
        (2, 3, 32, 32),
        (
            SavedStorage(IMAGE, "float32", ("relu", "other")),
            SavedStorage(IMAGE, "float32", ("relu",)),
        ),
    ),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 4)),
        (16, 64),
        (
            SavedStorage(WIDE, "float32"),
            SavedStorage(WIDE, "float32", is_mask=True),
            SavedStorage(WIDE, "float32"),
        ),
    ),
    "masked": (
        lambda: nn.Sequential(
            nn.Linear(64, 256),
            nn.Flatten(0),
            Masked(),
            nn.Unflatten(0, (16, 256)),
            nn.Linear(256, 4),
        ),
        (16, 64),
        (SavedStorage(WIDE // 4, "bool"), SavedStorage(WIDE, "float32")),
    ),
}
TRIALS = 3  # on a busy machine the profiler loses events


class Masked(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.masked_fill(value > 0.1, 0.5)


def test_what_is_kept_is_what_the_costs_say() -> None:
    mixes = [(), *MIXES, ("half",), ("mask", "half"), ("offload", "pool"), ("relu", "pool", "half")]
    cases = {f"{name} {'+'.join(mix)}": (name, mix) for name in KEPT for mix in mixes}
    said = {label: expected(mix, KEPT[name][2]) for label, (name, mix) in cases.items()}
    for _ in range(TRIALS):
        with events() as found:
            for label, (name, mix) in cases.items():
                hold(label, name, mix)
        wrong = {
            label: (said[label], sum(found[label]))
            for label in cases
            if said[label] != sum(found[label])
        }
        if not wrong:
            break
    assert not wrong


def saving_cost(policies: Sequence[Policy], storage: SavedStorage, memory: Memory) -> SavingCost:
    """What `storage` takes in all."""
    by_use = costs_by_use(policies, storage, memory)
    if by_use is None:
        found = cost_by_policy(policies, storage, memory)
        return SavingCost(storage.bytes) if found is None else found[1]
    names = ("kept_bytes", "host_bytes", "packing_bytes", "unpacking_bytes")
    return SavingCost(*(sum(getattr(cost, name) for cost in by_use) for name in names))


def expected(policies: Sequence[Policy], storages: Sequence[SavedStorage]) -> int:
    """Bytes on a CPU, where the host's memory is the device's."""
    costs = [saving_cost(policies, storage, "cpu") for storage in storages]
    return sum(cost.kept_bytes + cost.host_bytes for cost in costs)


def hold(label: str, name: str, policies: Sequence[str]) -> None:
    """Runs the forward of a model and lets its result go, but not the graph."""
    make, size, _ = KEPT[name]
    torch.manual_seed(0)
    model, value = make(), torch.randn(size)
    with record_function(label):
        with encode_saved_tensors(
            *policies, storages=EncodedStorages(), exempt=[value, *state(model)]
        ) as ends:
            result = ends(model(value))
        node = result.grad_fn
        del result
    del node


def test_costs_count_bytes() -> None:
    """By hand, for 80 elements."""
    wide, bits = SavedStorage(320, "float32"), 10
    relu = SavedStorage(320, "float32", ("relu", "pool input"))
    assert (
        saving_cost((), wide, "cuda")
        == saving_cost(("mask", "relu"), wide, "cuda")
        == SavingCost(320)
    )
    assert saving_cost(("half",), wide, "cuda") == SavingCost(160, 0, 480, 480)
    assert saving_cost(("offload", "half"), wide, "cuda") == SavingCost(0, 320, 320, 320)
    assert saving_cost(("relu", "offload"), relu, "cuda") == saving_cost(("offload",), wide, "cuda")
    assert saving_cost(("relu", "pool"), relu, "cuda").kept_bytes == bits
    assert saving_cost(("mask",), SavedStorage(80, "bool"), "cuda").kept_bytes == bits
    mask_of_floats = SavedStorage(320, "float32", is_mask=True)
    assert saving_cost(("mask",), mask_of_floats, "cpu").kept_bytes == bits
    assert saving_cost(("mask",), mask_of_floats, "cuda") == SavingCost(
        320
    )  # on a GPU it would have to wait
    for bound, width in ((2**8, 1), (2**15, 2), (2**15 + 1, 4), (2**31, 4), (2**31 + 1, 8)):
        indices = SavedStorage(640, "int64", ("pool indices",), bound=bound)
        assert saving_cost(("pool",), indices, "cuda").kept_bytes == 80 * width


def relu_in_a_function(value: Tensor) -> Tensor:
    """Another node saves ReLU's result right after it was made, for its values."""

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
    """A backward inside the block, and one through it."""
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


def computed_again(value: Tensor) -> Tensor:
    def region(value: Tensor) -> Tensor:
        with encode_saved_tensors(
            "pool", "relu", "mask", "offload", storages=EncodedStorages(), exempt=()
        ):
            value = functional.dropout(
                functional.max_pool1d((value.sigmoid() - 0.6).relu(), 2), 0.5
            )
        return value.sigmoid()

    return checkpoint(region, value.sin(), use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("policies", MIXES, ids="+".join)
@pytest.mark.parametrize("step", [relu_in_a_function, penalised, nested, computed_again])
def test_it_meets_others(step: Callable[[Tensor], Tensor], policies: Sequence[str]) -> None:
    """Custom functions, backwards within the forward, hooks within hooks."""
    gradients = []
    for chosen in ((), policies):
        torch.manual_seed(0)
        leaf = torch.rand(4, 64, requires_grad=True)
        with encode_saved_tensors(*chosen, storages=EncodedStorages(), exempt=()):
            result = step(leaf * 1)
        gradients.append(torch.autograd.grad(result.square().sum(), leaf))
    assert same(*gradients)
    assert gradients[0][0].any()


def test_a_second_derivative_is_the_same() -> None:
    gradients = []
    for policies in ((), EXACT):
        torch.manual_seed(0)
        leaf = torch.rand(4, 64, requires_grad=True)
        with encode_saved_tensors(*policies, storages=EncodedStorages(), exempt=()):
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


def test_an_unknown_policy_is_refused() -> None:
    keeper: Any = encode_saved_tensors
    with pytest.raises(
        InputError, match="unknown policy 'zip'; choose from mask, relu"
    ):
        keeper("zip", storages=EncodedStorages(), exempt=()).__enter__()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policies", MIXES, ids="+".join)
@pytest.mark.parametrize("name", MODELS)
def test_the_backward_is_the_same_on_a_gpu(name: str, policies: Sequence[str]) -> None:
    inputs = [(image.cuda(),) for image in images(3)]
    got, plain = (trained(kept_by(made(name).cuda(), *chosen), inputs) for chosen in (policies, ()))
    torch.testing.assert_close(got, plain)  # some backwards sum in any order there


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloading_frees_the_gpu() -> None:
    storages, values = EncodedStorages(), [torch.rand(2**20, device="cuda") for _ in range(8)]
    sums = [float(value.sum()) for value in values]
    with encode_saved_tensors("offload", storages=storages, exempt=()):
        graph = Keep.apply(torch.ones(1, requires_grad=True), *values)
    before = torch.cuda.memory_allocated()
    values.clear()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks which copies are done
    assert torch.cuda.memory_allocated() <= before - 8 * 2**22 + 512
    assert [float(value.sum()) for value in graph.grad_fn.saved_tensors] == sums
    assert storages.traffic.back_bytes == storages.traffic.out_bytes == 8 * 2**22
