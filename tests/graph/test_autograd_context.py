"""Autograd contexts: a cut inside a `with` block changes neither values nor gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile.api.compilation import pipecompile
from pipecompile.codegen.stages import StageModule, emit
from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.graph.autograd_context import (
    EnteredContext,
    current_context,
    entered_contexts_left,
)

X = torch.randn(4, 8)


class NoGrad(nn.Module):
    """A part without gradients, and in it a part with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        with torch.no_grad():
            scale = self.second(hidden).sigmoid()
            scale = scale.exp() + 1
            with torch.enable_grad():
                inner = self.third(hidden).sin()
        return (hidden * scale + inner).cos()


class Autocast(nn.Module):
    """A part in bfloat16, and in it a part in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.second(hidden)
            hidden = hidden.relu() @ hidden.relu().T
            with torch.autocast("cpu", enabled=False):
                hidden = self.third(hidden.float() @ x)
            hidden = torch.relu(hidden) @ hidden.T
        return hidden.float().cos()


def stages_of(model: nn.Module, cuts: Sequence[int]) -> tuple[StageModule, ...]:
    call = arguments_of(model, X)
    module = capture(model, call).instantiate(call)
    nodes = [node for node in module.graph.nodes if node.op != "get_attr"]
    return emit(
        module, {node.name: sum(index >= cut for cut in cuts) for index, node in enumerate(nodes)}
    )


def nodes_of(model: nn.Module) -> int:
    call = arguments_of(model, X)
    return sum(node.op not in ("get_attr", "output") for node in capture(model, call).graph.nodes)


def chained(stages: Sequence[StageModule]) -> Tensor:
    values: Sequence[Tensor] = [X]
    for stage in stages:
        values = stage.module(*values)
    return values[0]


def gradients(model: nn.Module, output: Tensor) -> list[Tensor | None]:
    return list(
        torch.autograd.grad(
            output.float().square().sum(), list(model.parameters()), allow_unused=True
        )
    )


def same(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(left, right, strict=True)
    )


@pytest.fixture(params=[NoGrad, Autocast])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    instance: nn.Module = request.param()
    return instance


@pytest.mark.one_case_in(2)
def test_a_cut_at_any_place_gives_the_same_values_and_gradients(model: nn.Module) -> None:
    expected = model(X)
    wanted = gradients(model, expected)
    for cut in range(2, nodes_of(model)):
        got = chained(stages_of(model, [cut]))
        assert torch.equal(got, expected), cut
        assert got.dtype == expected.dtype
        assert same(gradients(model, got), wanted), cut


def test_cuts_everywhere_at_once(model: nn.Module) -> None:
    expected = model(X)
    got = chained(stages_of(model, range(2, nodes_of(model))))
    assert torch.equal(got, expected)
    assert same(gradients(model, got), gradients(model, expected))


def test_the_context_outside_is_restored(model: nn.Module) -> None:
    before = current_context()
    for stage in stages_of(model, [4, 6]):
        assert stage.module is not None
    chained(stages_of(model, [4, 6]))
    assert current_context() == before


def test_nodes_without_gradients_stay_without_them() -> None:
    model = NoGrad()
    chained(stages_of(model, [4])).sum().backward()
    assert model.second.weight.grad is None
    assert model.third.weight.grad is not None


def test_a_context_never_turns_gradients_on() -> None:
    with torch.no_grad():
        context = EnteredContext(True, ())
        assert not torch.is_grad_enabled()
        context.leave()
        assert not chained(stages_of(NoGrad(), [4])).requires_grad


def test_a_context_is_entered_once_for_a_run_of_nodes() -> None:
    (whole,) = stages_of(NoGrad(), [])
    entered = [node.args[0] for node in whole.module.graph.nodes if node.target is EnteredContext]
    assert entered == [False]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_graph_that_fails_has_entered_is_left(depth: int) -> None:
    before = current_context()
    kept = EnteredContext(True, ())
    with suppress(ZeroDivisionError), entered_contexts_left():
        for _ in range(depth):
            EnteredContext(False, (("cpu", True, torch.bfloat16),))
        raise ZeroDivisionError
    assert current_context() == before
    kept.leave()


class Looked(nn.Module):
    """Looks rows up within a context."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.table, self.inner, self.last = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.context = context

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of shape (N,) to a tensor of shape (N, 8)."""
        with self.context():
            hidden = self.inner(self.table(rows))
        return self.last(hidden.float())


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize(
    "context", [torch.no_grad, partial(torch.autocast, "cpu", torch.bfloat16)], ids=["grad", "cast"]
)
def test_a_step_that_fails_within_a_context_leaves_it(context: Any, recompute: Any) -> None:
    """The user goes on with the next batch, and with code of their own."""
    rows = torch.arange(8)
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "recompute": recompute}
    pipeline = pipecompile(Looked(context), rows, loss_fn=lambda output, _: output.sum(), **options)
    before = current_context()
    with pytest.raises(InputError, match="index out of range"):
        pipeline.step(rows + 20)
    assert current_context() == before
    pipeline.step(rows)


def test_a_compile_that_is_refused_within_a_context_leaves_it() -> None:
    class Timed(Looked):
        def forward(self, rows: Tensor) -> Tensor:
            with self.context():
                hidden = self.inner(self.table(rows) * time.perf_counter())
            return self.last(hidden.float())

    before = current_context()
    with pytest.raises(CaptureError, match="first seen in inner"):
        pipecompile(Timed(torch.no_grad), torch.arange(8), k=2, microbatches=2, costs="flops")
    assert current_context() == before
