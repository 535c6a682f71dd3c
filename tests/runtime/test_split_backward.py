"""The two halves of a backward are the backward, bit for bit, whatever the graph."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from zoo import same

from pipecompile.api.compilation import pipecompile
from pipecompile.frontend.calls import hook_target
from pipecompile.graph.random_streams import StreamKey
from pipecompile.runtime.split_backward import input_backward, weight_backward
from pipecompile.runtime.stage import EagerStage

Outputs = tuple[Tensor, ...]


class Case(nn.Module):
    """Parameters for the functions below, each of (self, x, y), where x and y carry gradients."""

    def __init__(self, run: Callable[[Case, Tensor, Tensor], Outputs]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.norm, self.batch_norm = nn.LayerNorm(6), nn.BatchNorm1d(6)
        self.conv, self.image_norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.table = nn.Embedding(9, 6)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor, y: Tensor) -> Outputs:
        return self.run(self, x, y)


class Cube(torch.autograd.Function):
    """Makes all of its gradients at once, whatever is asked for."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        Cube.calls += 1
        x, weight = ctx.saved_tensors
        return gradients[0] * 3 * x**2 * weight, (gradients[0] * x**3).sum((0, 1))


def linear(case: Case, x: Tensor, y: Tensor) -> Outputs:
    return (case.second(case.first(x).relu()) + y,)


def reused(case: Case, x: Tensor, y: Tensor) -> Outputs:
    hidden = case.first(x).tanh()
    return case.first(case.second(case.first(hidden) + y)), case.third(hidden)


def reused_beside_a_constant(case: Case, x: Tensor, y: Tensor) -> Outputs:
    hidden = case.first(x).tanh() * case.second(y.detach())
    return case.first(hidden), hidden + y


def norms(case: Case, x: Tensor, y: Tensor) -> Outputs:
    return case.norm(case.first(x)) + case.batch_norm(y.flatten(0, 1)).view_as(y), case.norm(
        y
    ).sum()


def convolution(case: Case, x: Tensor, y: Tensor) -> Outputs:
    image = case.image_norm(case.conv(x[:, None])).relu()
    return functional.max_pool2d(image, 2), image.mean((2, 3)) + y.mean()


def attention(case: Case, x: Tensor, y: Tensor) -> Outputs:
    return case.layer(case.attention(x, y, y)[0] + x), case.attention(y, x, x)[0]


def embedding(case: Case, x: Tensor, y: Tensor) -> Outputs:
    embedded = case.table(torch.arange(9).repeat(4, 1)[:, :5])
    return functional.linear(embedded + x, case.table.weight), case.second(embedded) * y


def beside_the_path(case: Case, x: Tensor, y: Tensor) -> Outputs:
    """As in a decoder that begins in this stage: no input, or one that is read late."""
    beside = case.second(case.first(case.table.weight[:5]).relu())
    return case.third(x) + beside, beside * case.scale, x * case.first.bias, y + beside


def one_bias_for_all(case: Case, x: Tensor, y: Tensor) -> Outputs:
    bias = case.first(case.scale).tanh()
    return case.second(x + bias) + bias, case.third((y + bias).sin() * bias)


def views_and_writes(case: Case, x: Tensor, y: Tensor) -> Outputs:
    hidden = case.first(x)
    hidden[:, 1:].mul_(case.scale)
    hidden[..., 0].add_(case.shift[0]).relu_()
    left, right = hidden.chunk(2, -1)
    return torch.cat([right, left], -1).transpose(0, 1).relu_(), hidden.unfold(1, 2, 1), y[:, 0]


def functions(case: Case, x: Tensor, y: Tensor) -> Outputs:
    return Cube.apply(case.first(x), case.scale), case.second(Cube.apply(y, y.detach()))  # type: ignore[return-value]


def checkpointed(case: Case, x: Tensor, y: Tensor) -> Outputs:
    return checkpoint(
        lambda a, b: case.second(case.first(a).relu()) * b, x, y, use_reentrant=False
    ), y * case.scale


def recurrent(case: Case, x: Tensor, y: Tensor) -> Outputs:
    hidden, (state, _) = case.recurrent(x)
    return case.normed(hidden) + y, state


def unused(case: Case, x: Tensor, y: Tensor) -> Outputs:
    hidden = case.first(x)
    case.second(hidden)
    return hidden, hidden.argmax(-1), case.third(x).detach(), case.scale * 2


def handed_through(case: Case, x: Tensor, y: Tensor) -> Outputs:
    return x, y, case.shift, case.first(x) + y, x


def constant(case: Case, x: Tensor, y: Tensor) -> Outputs:
    return (case.first(x.detach()),)


def hooked(case: Case, x: Tensor, y: Tensor) -> Outputs:
    hidden = case.first(x)
    hidden.register_hook(lambda gradient: gradient * 2)
    return case.second(hidden).relu(), case.first(hidden * y)


CASES = (
    linear,
    reused,
    reused_beside_a_constant,
    norms,
    convolution,
    attention,
    embedding,
    beside_the_path,
    one_bias_for_all,
    views_and_writes,
    functions,
    checkpointed,
    recurrent,
    unused,
    handed_through,
    constant,
    hooked,
)


def rows(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(4, 5, 6, generator=generator), torch.randn(4, 5, 6, generator=generator)


def seeds(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """A gradient for each output that is a number; none for the others."""
    torch.manual_seed(2)
    return [torch.randn_like(value) if value.is_floating_point() else None for value in outputs]


def trained(
    model: nn.Module, whole: bool, carries: tuple[bool, bool], last: bool
) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    """Return all gradients after three microbatches, two of whose weight backwards wait."""
    loss = (
        (lambda outputs, _: sum(v.square().sum() for v in outputs if v.is_floating_point()))
        if last
        else None
    )
    stage = EagerStage(model, gradient_inputs=carries, loss=loss)
    found, waiting = [], []
    for microbatch, inputs in enumerate(rows(3)):
        outputs, saved = stage.forward(inputs, StreamKey(0, 0, microbatch), None)
        if whole:
            found += stage.backward(saved, seeds(outputs), {})
            continue
        gradients, live = stage.backward_input(saved, seeds(outputs))
        found += gradients
        waiting.append(live)
        if microbatch:
            stage.backward_weight(waiting.pop(0), {})
    for live in waiting:
        stage.backward_weight(live, {})
        assert live == []
    return found, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("last", [False, True], ids=["inner", "last"])
@pytest.mark.parametrize("carries", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_the_halves_are_the_whole(run: Any, carries: tuple[bool, bool], last: bool) -> None:
    wanted, parameters = trained(Case(run), True, carries, last)
    got, halved = trained(Case(run), False, carries, last)
    assert same(got, wanted)
    assert {name for name in halved if not same(halved[name], parameters[name])} == set()


def watched(model: Case, events: list[str]) -> Case:
    """With hooks that change gradients, and count."""
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: (events.append(name), gradient * 3)[1])
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: events.append(f"{name} done")
        )
    return model


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_hooks_of_parameters_run_once_for_each_backward(run: Any) -> None:
    events: tuple[list[str], list[str]] = ([], [])
    _, wanted = trained(watched(Case(run), events[0]), True, (True, True), False)
    _, got = trained(watched(Case(run), events[1]), False, (True, True), False)
    assert same(got, wanted)
    assert sorted(events[0]) == sorted(events[1])


def test_a_function_runs_its_backward_once() -> None:
    Cube.calls = 0
    trained(Case(functions), False, (True, True), False)
    assert Cube.calls == 3 * 2


@pytest.mark.parametrize(
    "place",
    {
        "what a linear returns": lambda case, x: case.first(x),
        "what has no parameter": lambda case, x: case.first(x).tanh(),
        "a sum": lambda case, x: case.first(x) + case.second(x),
        "what depends on no input": lambda case, _: case.table.weight * 2,
        "an input": lambda _, x: x,
    }.values(),
)
def test_a_hook_on_a_tensor_runs_once_for_each_backward(place: Any) -> None:
    seen: list[float] = []

    def kept(gradient: Tensor) -> Tensor:
        seen.append(float(gradient.norm()))
        return gradient / len(seen)  # as a running statistic scales

    def run(case: Case, x: Tensor, y: Tensor) -> Outputs:
        hidden = place(case, x[0])  # a linear of a matrix is one node
        hook_target(kept)(hidden)
        return case.third(functional.relu(hidden)), y

    trained(Case(run), True, (True, True), False)
    wanted = seen.copy()
    seen.clear()
    trained(Case(run), False, (True, True), False)
    assert seen == wanted
    assert len(seen) == 3


def factored(layer: nn.Linear) -> None:
    """Let a layer sum the factors of K-FAC: the products of its inputs and of its gradients."""
    for name in ("inner", "outer"):
        layer.register_buffer(name, torch.zeros(6, 6, dtype=torch.float64))

    def forward_hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        value = inputs[0].detach()

        def hook(gradient: Tensor) -> None:
            module.get_buffer("inner").add_(value.t() @ value)
            module.get_buffer("outer").add_(gradient.t() @ gradient)

        output.register_hook(hook)

    layer.register_forward_hook(forward_hook)


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize(("schedule", "k"), [("1f1b", 2), ("zb-h1", 2), ("zb-v", 4)])
def test_a_hook_on_what_a_layer_returns_runs_once(schedule: Any, k: int, recompute: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[kind for _ in range(4) for kind in (nn.Linear(6, 6), nn.Tanh())])
    for layer in model.double()[::2]:
        factored(layer)
    whole, x = copy.deepcopy(model), torch.randn(8, 6, dtype=torch.float64)
    options: dict[str, Any] = {"k": k, "microbatches": 4, "costs": "flops", "recompute": recompute}
    pipeline = pipecompile(
        model, x, schedule=schedule, loss_fn=lambda output, _: output.square().mean(), **options
    )
    for _ in range(2):
        pipeline.step(x)
        for rows in x.chunk(4):
            whole(rows).square().mean().backward()
    for (name, own), wanted in zip(model.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=0, msg=name)


class Tagged(torch.Tensor):
    """A tensor with a class of its own, as libraries for images have it."""


@pytest.mark.parametrize("place", ["input", "parameter", "buffer"])
def test_gradients_of_tensors_of_another_class(place: str) -> None:
    """Torch finds the edge of such a leaf one node further."""

    def tagged(tensor: Tensor, name: str) -> Tensor:
        return tensor.as_subclass(Tagged) if name == place else tensor

    gradients = []
    for halves in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(tagged(torch.randn(4, 4), "parameter"))
        x = tagged(torch.randn(2, 4), "input").detach().requires_grad_()
        y = torch.tanh(x @ weight) * tagged(torch.ones(4) / 2, "buffer")
        if halves:
            (got,), parts = input_backward([y], [torch.ones(2, 4)], [x])
            weight_backward(parts, {})
        else:
            y.backward(torch.ones(2, 4))
            got = x.grad
        gradients.append([got, weight.grad])
    assert all(each is not None for each in gradients[1])
    assert same(gradients[0], gradients[1])


def test_group_norm_in_channels_last() -> None:
    """Torch's kernel on a CPU ends the process where the gradient of its input is not asked."""
    gradients = []
    for halves in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 1))
        layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
        y = layers(x)
        if halves:
            (got,), parts = input_backward([y], [torch.ones_like(y)], [x])
            weight_backward(parts, {})
        else:
            y.backward(torch.ones_like(y))
            got = x.grad
        gradients.append([got, *(parameter.grad for parameter in layers.parameters())])
    assert same(gradients[0], gradients[1])


class Count(TorchDispatchMode):
    """Counts matrix products."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_no_product_is_made_twice() -> None:
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    x = torch.randn(4, 6, requires_grad=True)
    with Count() as early:
        found, parts = input_backward([y := layers(x)], [torch.ones_like(y)], [x])
    with Count() as late:
        weight_backward(parts, {})
    assert (early.products, late.products) == (5 + 5, 5)  # the forward's five among them
    assert found[0] is not None


@contextmanager
def boxes() -> Iterator[weakref.WeakSet[Any]]:
    """What autograd keeps, as long as it is kept; cycles would not be seen to go."""
    kept: weakref.WeakSet[Any] = weakref.WeakSet()

    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value.detach()  # itself, it would hold the node that keeps it
            kept.add(self)

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.value):
            yield kept
    finally:
        gc.enable()


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_nothing_is_kept_after_the_weight_backward(run: Any) -> None:
    stage = EagerStage(Case(run), gradient_inputs=(True, True))
    with boxes() as kept:
        outputs, saved = stage.forward(next(rows(1)), StreamKey(0, 0, 0))
        found, live = stage.backward_input(saved, seeds(outputs))
        del saved
        inputs = [weakref.ref(value) for value in found if value is not None]
        del found
        stage.backward_weight(live, {})
        if (
            run is checkpointed
        ):  # which ends its own forward by an exception, and that holds its frames in a cycle
            gc.collect()
        assert len(kept) == 0
        assert [ref for ref in inputs if ref() is not None and run is not handed_through] == []


def test_what_lies_above_the_uppermost_parameter_goes_with_the_input_backward() -> None:
    model = nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Sigmoid(), nn.LogSoftmax(-1)
    )
    stage = EagerStage(
        model, gradient_inputs=(True,), loss=lambda value, _: value[0].square().sum()
    )
    with boxes() as kept:
        model.forward, run = lambda x: (run(x),), model.forward  # type: ignore[method-assign]
        _, saved = stage.forward([torch.randn(4, 6)], StreamKey(0, 0, 0))
        before = len(kept)
        _, live = stage.backward_input(saved, ())
        del saved
        assert len(kept) <= before - 3  # of the square, the logarithm and the sigmoid
        stage.backward_weight(live, {})
        assert len(kept) == 0
