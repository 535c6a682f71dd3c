"""Backward hooks of several microbatches in lockstep: each hook for all of them before the next.

    a loop         h₂ for 0, h₁ for 0, h₂ for 1, h₁ for 1
    a pipeline     h₂ for 0, h₂ for 1, h₁ for 0, h₁ for 1

In a pipeline h₁ may be in an earlier stage than h₂. What h₂ leaves for it in a dict or on a module
is then that of microbatch 1. Autograd runs one backward whole, so the hooks are called once more by
themselves, in the order of a pipeline, with the gradients that a backward has given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from pipecompile.graph.gradient_hooks import has_joint_hook
from pipecompile.graph.pytrees import map_tensors, tensor_leaves
from pipecompile.graph.restored_state import is_same_tensor

__all__ = ["RecordedHooks", "recorded_hooks", "replay_differs"]


@dataclass(frozen=True)
class HookCall:
    """One call of the hook `number`, in the order in which hooks were found and registered."""

    number: int
    arguments: tuple[Any, ...]
    result: Any


@dataclass(frozen=True)
class RecordedHooks:
    """The backward hooks of a block, and their calls."""

    hooks: list[Callable[..., Any]] = field(default_factory=list)
    calls: list[HookCall] = field(default_factory=list)

    def recorded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that does the same, and whose calls are recorded."""
        self.hooks.append(hook)
        return partial(self._call, len(self.hooks) - 1)

    def _call(self, number: int, *arguments: Any) -> Any:
        # Copies, since a later hook may write to a gradient.
        given = map_tensors(_copy, arguments)
        result = self.hooks[number](*arguments)
        self.calls.append(HookCall(number, given, map_tensors(_copy, result)))
        return result


@contextmanager
def recorded_hooks(model: nn.Module) -> Iterator[RecordedHooks]:
    """Record the backward hooks of the modules and parameters of `model`, and those that are
    registered on tensors in the block.
    """
    recorded = RecordedHooks()
    modules = [
        table
        for part in model.modules()
        for table in (part._backward_pre_hooks, part._backward_hooks)
    ]
    # A joint hook waits for several gradients, and is none of these: a step refuses it.
    parameters = [
        p._backward_hooks for p in model.parameters() if p._backward_hooks and not has_joint_hook(p)
    ]
    tables = [(table, dict(table)) for table in (*modules, *parameters)]
    register: Callable[..., Any] = Tensor.register_hook

    def register_recorded(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        return register(tensor, recorded.recorded(hook))

    try:
        for table, hooks in tables:
            table.update({key: recorded.recorded(hook) for key, hook in hooks.items()})
        with patch.object(Tensor, "register_hook", register_recorded):
            yield recorded
    finally:
        for table, hooks in tables:
            table.update(hooks)


def replay_differs(calls: Sequence[HookCall], hooks: Sequence[Callable[..., Any]]) -> bool:
    """Return whether one of `hooks` returns something else than in `calls`, or fails, if it runs
    for two backwards before the next one runs. The first half of `calls` is of the first backward.
    """
    half = len(calls) // 2
    in_lockstep = chain.from_iterable(zip(calls[:half], calls[half:], strict=False))
    try:
        return not all(map(partial(_returns_the_same, hooks), in_lockstep))
    except Exception:
        # The user's code may miss what it has kept.
        return True


def _returns_the_same(hooks: Sequence[Callable[..., Any]], call: HookCall) -> bool:
    result = hooks[call.number](*map_tensors(_copy, call.arguments))
    before, now = tensor_leaves(call.result), tensor_leaves(result)
    return len(before) == len(now) and all(map(is_same_tensor, before, now))


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone()
