"""One call in a forward: its arguments, its side effects, and how a graph makes the same call."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.frontend.nested_values import tensors_in
from pipecompile.frontend.recording import SYMBOLS, Recording
from pipecompile.graph.side_effects import SideEffectTracker

__all__ = ["RecordedCall", "apply_target", "call_target", "has_recorded_values", "hook_target"]

METHOD_TYPES = (types.MethodDescriptorType, types.WrapperDescriptorType)
# Methods of tensors may be Python functions; their qualified names begin with these.
METHOD_OWNERS = ("Tensor.", "TensorBase.", "_TensorBase.")


class RecordedCall:
    """A call that is about to run.

    `state` are tensors, besides the arguments, that the call may write to. After `run`, `is_random`
    tells whether it drew random numbers.
    """

    def __init__(
        self,
        recording: Recording,
        tracker: SideEffectTracker,
        args: Any,
        kwargs: Any,
        state: Sequence[Tensor] = (),
    ) -> None:
        self._recording = recording
        self._tracker = tracker
        self._args, self._kwargs = tuple(args), dict(kwargs)
        arguments = tensors_in((self._args, self._kwargs))
        # By id: a tensor may be there several times, and tensors have no useful equality.
        touched = {id(tensor): tensor for tensor in (*arguments, *state)}
        self._versions = [(tensor, tensor._version) for tensor in touched.values()]
        self.is_random = self._updates_statistics = False

    def run(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, and note its side effects."""
        self._tracker.reset()
        result = function()
        self.is_random = self._tracker.is_random
        self._updates_statistics = bool(self._tracker.running_statistics)
        return result

    @property
    def mutates(self) -> bool:
        """Whether an argument or a buffer was written to in place."""
        is_written = any(tensor._version != version for tensor, version in self._versions)
        return self._updates_statistics or is_written

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with nodes in the place of tensors.

        An in-place call returns its argument, so this is to be called before the result is bound.
        """
        return self._recording.argument(self._args), self._recording.argument(self._kwargs)


def call_target(function: Any, name: str) -> tuple[str, Any]:
    """Return the kind of node and the target that call `function`."""
    owner_and_name = getattr(function, "__qualname__", "")
    is_method = isinstance(function, METHOD_TYPES) or owner_and_name.startswith(METHOD_OWNERS)
    return ("call_method", name) if is_method else ("call_function", function)


# The names of the two functions below are part of a graph's fingerprint, and so is this module's.


def hook_target(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], None]:
    """Return a function that registers `hook` on a tensor, for a graph to call.

    A graph cannot hold `hook` as an argument. Where there are no gradients it registers nothing.
    """

    def register_hook(tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(hook)

    name = getattr(hook, "__qualname__", type(hook).__name__)
    register_hook.__qualname__ = f"{hook.__module__}.{name}.register_hook"
    return register_hook


def apply_target(function: Any) -> Callable[..., Any]:
    """Return a function that calls `function.apply`, for a graph to call.

    `apply` is looked up when the graph runs: while a forward is recorded it is redirected.
    """

    def apply(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    apply.__qualname__ = f"{function.__module__}.{function.__qualname__}.apply"
    return apply


def has_recorded_values(function: Any) -> bool:
    """Return whether a function holds, at any depth, a tensor or a size of the recording.

    Enclosed variables, defaults, bound arguments and attributes of objects are searched; modules
    are not.
    """
    seen: set[int] = set()
    stack = [function]
    while stack:
        value = stack.pop()
        if isinstance(value, SYMBOLS):
            return True
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(value)):
            return True
        # A module's own tensors are fakes only while the forward is recorded.
        is_searched = not isinstance(value, (nn.Module, Tensor, type, types.ModuleType))
        if is_searched and id(value) not in seen:
            seen.add(id(value))
            stack.extend(_enclosed_values(value))
    return False


def _enclosed_values(value: Any) -> Iterator[Any]:
    """Yield the values that `value` holds one level down."""
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or ())
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, (tuple, list)):
        yield from value
    else:
        yield from getattr(value, "__dict__", {}).values()
