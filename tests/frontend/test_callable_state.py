"""A loss that is a function or an object, and what hooks keep, are as they were after a compile,
which calls them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import pipecompile
from pipecompile.frontend.callable_state import callable_restored

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Loss = Callable[[Tensor, Any], Tensor]
Told = Callable[[], object]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Counting:
    """Counts its calls, and lists what it gave."""

    def __init__(self) -> None:
        self.calls, self.given, self.mean = 0, deque[float](), torch.ones(())

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        loss: Tensor = mean_square(output, target)
        self.calls += 1
        self.given.append(float(loss.detach()))
        self.mean.mul_(0.9).add_(loss.detach() * 0.1)
        return loss / self.mean

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return self(output, target)

    def told(self) -> object:
        return self.calls, list(self.given), float(self.mean)


def of_object() -> tuple[Loss, Told]:
    loss = Counting()
    return loss, loss.told


def of_method() -> tuple[Loss, Told]:
    owner = Counting()
    return owner.loss, owner.told


def of_partial() -> tuple[Loss, Told]:
    owner = Counting()
    return partial(lambda state, output, target: state(output, target), owner), owner.told


def of_closure() -> tuple[Loss, Told]:
    calls, seen = 0, dict[int, float]()

    def loss(output: Tensor, target: Any) -> Tensor:
        nonlocal calls
        calls += 1
        seen[calls] = float(output.detach().sum())
        return mean_square(output, target)

    return loss, lambda: (calls, dict(seen))


def of_function_attribute() -> tuple[Loss, Told]:
    def loss(output: Tensor, target: Any) -> Tensor:
        loss.calls += 1  # type: ignore[attr-defined]
        return mean_square(output, target)

    loss.calls = 0  # type: ignore[attr-defined]
    return loss, lambda: loss.calls  # type: ignore[attr-defined]


def of_default() -> tuple[Loss, Told]:
    def loss(output: Tensor, target: Any, seen: list[float] = []) -> Tensor:  # noqa: B006
        seen.append(float(output.detach().sum()))
        return mean_square(output, target)

    return loss, lambda: list(loss.__defaults__[0])  # type: ignore[index]


def of_enclosed_module() -> tuple[Loss, Told]:
    norm = nn.BatchNorm1d(8)

    def loss(output: Tensor, target: Any) -> Tensor:
        return mean_square(norm(output), target)

    return loss, lambda: [buffer.tolist() for buffer in norm.buffers()]


CALLS = 0
GIVEN: list[float] = []


def of_globals() -> tuple[Loss, Told]:
    def loss(output: Tensor, target: Any) -> Tensor:
        global CALLS
        CALLS += 1
        GIVEN.append(float(output.detach().sum()))
        return mean_square(output, target)

    return loss, lambda: (CALLS, list(GIVEN))


class CountingInClass:
    calls = 0

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        CountingInClass.calls += 1
        GIVEN.append(float(output.detach().sum()))
        return mean_square(output, target)


def of_class() -> tuple[Loss, Told]:
    return CountingInClass(), lambda: (CountingInClass.calls, list(GIVEN))


KINDS = [
    of_globals,
    of_class,
    of_object,
    of_method,
    of_partial,
    of_closure,
    of_function_attribute,
    of_default,
    of_enclosed_module,
]


@pytest.mark.parametrize("costs", ["flops", "measured"])
@pytest.mark.parametrize("kind", KINDS[:6])
def test_a_compile_leaves_the_state_of_a_loss(
    kind: Callable[[], tuple[Loss, Told]], costs: str
) -> None:
    loss, told = kind()
    before = told()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipecompile(model, X, k=2, microbatches=2, loss_fn=loss, costs=costs, sample_target=X)
    assert told() == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_call_changes_is_put_back(kind: Callable[[], tuple[Loss, Told]]) -> None:
    loss, told = kind()
    before = told()
    with callable_restored(loss):
        loss(X, X)
        assert told() != before
    assert told() == before


class Watched(nn.Module):
    """Hooks of its layer, and a hook that its forward registers, keep what only they use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0
        self.seen: list[int] = []
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        hidden.register_hook(self.watch)
        return hidden

    def watch(self, *_: Any) -> None:
        self.mean.mul_(0.5)
        self.calls += 1
        self.seen.append(self.calls)

    def told(self) -> object:
        return float(self.mean), self.calls, list(self.seen)


def of_tensor(_: Watched) -> None:
    pass


def of_backward(model: Watched) -> None:
    model.layer.register_full_backward_hook(lambda *_: model.watch())


def of_parameter(model: Watched) -> None:
    model.layer.weight.register_hook(lambda _: model.watch())


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("hook", [of_tensor, of_backward, of_parameter])
def test_a_compile_leaves_what_hooks_write_to(
    hook: Callable[[Watched], None], self_check: bool
) -> None:
    """No graph has a buffer that only hooks use."""
    watched = Watched()
    hook(watched)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), watched)
    pipecompile(model, X, k=2, loss_fn=mean_square, costs="flops", self_check=self_check)
    assert watched.told() == (1, 0, [])


def test_a_hook_begins_to_count_at_the_first_step() -> None:
    """A compile called it 27 times, most of them before the self-check, which saw no change."""
    calls = 0

    def doubled_later(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output * (2 if calls > 2 else 1)

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].register_forward_hook(doubled_later)
    pipe = pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    assert calls == 0
    losses = [pipe.step(X, X) for _ in range(2)]
    calls = 0
    for loss in losses:
        expected = [mean_square(model(x), x) for x in X.chunk(2)]
        assert torch.equal(loss, torch.stack(expected).mean())
