"""A loss that is a function or an object, and what hooks keep, are as they were after a compile,
which calls them.
"""

from __future__ import annotations

from collections import ChainMap, Counter, UserDict, UserList, deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

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


def of_new_global() -> tuple[Loss, Told]:
    globals().pop("LATEST", None)

    def loss(output: Tensor, target: Any) -> Tensor:
        global LATEST
        LATEST = mean_square(output, target)  # type: ignore[name-defined]
        return LATEST  # type: ignore[name-defined,no-any-return]

    return loss, lambda: "LATEST" in globals()


SETTINGS = ModuleType("settings")


def of_python_module() -> tuple[Loss, Told]:
    vars(SETTINGS)["calls"] = 0

    def loss(output: Tensor, target: Any) -> Tensor:
        SETTINGS.calls += 1
        return mean_square(output, target)

    return loss, lambda: SETTINGS.calls


class CountingInBase(CountingInClass):
    """Only the class below it is the loss's own."""


def of_base_class() -> tuple[Loss, Told]:
    return CountingInBase(), of_class()[1]


class CountingByMembers:
    """Counts where no plain method of it does."""

    @staticmethod
    def log() -> None:
        GIVEN.append(0)

    @classmethod
    def count(cls) -> None:
        COUNTS["class"] += 1

    @property
    def scale(self) -> float:
        COUNTS["property"] += 1
        return 1.0

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        self.log()
        self.count()
        return mean_square(output, target) * self.scale


COUNTS = Counter[str]()


def of_members() -> tuple[Loss, Told]:
    return CountingByMembers(), lambda: (list(GIVEN), dict(COUNTS))


def of_new_class_attribute() -> tuple[Loss, Told]:
    class Late:
        def __call__(self, output: Tensor, target: Any) -> Tensor:
            Late.calls = 1  # type: ignore[attr-defined]
            return mean_square(output, target)

    return Late(), lambda: hasattr(Late, "calls")


def of_unset_slot() -> tuple[Loss, Told]:
    class Slotted:
        __slots__ = ("calls",)

        def __call__(self, output: Tensor, target: Any) -> Tensor:
            self.calls = 1
            return mean_square(output, target)

    loss = Slotted()
    return loss, lambda: hasattr(loss, "calls")


def of_array() -> tuple[Loss, Told]:
    calls = np.zeros(2)

    def loss(output: Tensor, target: Any) -> Tensor:
        calls[0] += 1
        return mean_square(output, target)

    return loss, calls.tolist


class Ring(list[float]):
    """A list that takes its items one by one, and counts them."""

    total = 0

    def append(self, value: float) -> None:
        super().append(value)
        self.total += 1

    def extend(self, _: Any) -> None:
        raise TypeError("use append")

    def clear(self) -> None:
        raise TypeError("it is never empty")


def of_list_below() -> tuple[Loss, Told]:
    ring = Ring([1.0])

    def loss(output: Tensor, target: Any) -> Tensor:
        ring.append(1.0)
        return mean_square(output, target)

    return loss, lambda: (list(ring), ring.total)


def of_collections() -> tuple[Loss, Told]:
    table, ring = UserDict(calls=0), UserList([1.0])
    chain, variable = ChainMap({"calls": 0}), ContextVar[int]("calls")
    variable.set(0)

    def loss(output: Tensor, target: Any) -> Tensor:
        for each in (table, chain):
            each["calls"] += 1
        ring.append(1.0)
        variable.set(variable.get() + 1)
        return mean_square(output, target)

    return loss, lambda: (dict(table), list(ring), dict(chain), variable.get())


class Task(nn.Module):
    """A module that is not the model, with another one below it, which both count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))
        self.seen, self.counting = list[int](), Counting()
        self.mean = torch.ones(())

    def forward(self, output: Tensor, target: Any) -> Tensor:
        self.seen.append(1)
        self.inner[0].calls = 1  # type: ignore[assignment]
        self.inner.eval()
        self.mean = self.mean * 0.9
        return self.counting(self.inner(output), target) * self.mean

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return self(output, target)  # type: ignore[no-any-return]

    def told(self) -> object:
        inner = self.inner.training, hasattr(self.inner[0], "calls")
        return list(self.seen), self.counting.told(), float(self.mean), inner


def of_module() -> tuple[Loss, Told]:
    task = Task()
    return task, task.told


def of_method_of_module() -> tuple[Loss, Told]:
    task = Task()
    return task.loss, task.told


def of_enclosed_task() -> tuple[Loss, Told]:
    task = Task()
    return lambda output, target: task(output, target), task.told


@cache
def projection(width: int) -> Tensor:
    COUNTS["made"] += 1
    return torch.randn(width, 4)


def of_cache() -> tuple[Loss, Told]:
    projection.cache_clear()

    def loss(output: Tensor, target: Any) -> Tensor:
        return mean_square(output @ projection(8), target @ projection(8))

    return loss, lambda: (projection.cache_info().currsize, COUNTS["made"])


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
    of_new_global,
    of_python_module,
    of_base_class,
    of_members,
    of_new_class_attribute,
    of_unset_slot,
    of_array,
    of_list_below,
    of_collections,
    of_module,
    of_method_of_module,
    of_enclosed_task,
    of_cache,
]


@pytest.mark.parametrize(
    ("kind", "costs"),
    [
        *product(
            (*KINDS[:6], of_base_class, of_members, of_new_global, of_module, of_cache),
            ("flops", "measured"),
        ),
        (of_method_of_module, "flops"),  # where it is measured, its own layer is trained
    ],
)
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


def test_a_compile_leaves_what_a_hook_of_all_modules_counts() -> None:
    calls = Counter[str]()
    handle = register_module_forward_hook(lambda *_: calls.update(("forward",)))
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    finally:
        handle.remove()
    assert not calls
