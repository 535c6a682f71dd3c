"""One call in a forward: its arguments, what it does besides returning, and how a graph calls it again."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.frontend.tape import SYMBOLS, Tape, tensors_in
from pipecompile.graph.side_effects import Watch

__all__ = ["Call", "applying", "encloses_recorded", "hooking", "target_of"]

METHOD_TYPES = (types.MethodDescriptorType, types.WrapperDescriptorType)
METHOD_OWNERS = ("Tensor.", "TensorBase.", "_TensorBase.")


class Call:
    """A call that is about to run; `state` are the tensors, besides its arguments, that it may write to."""

    def __init__(
        self, tape: Tape, watch: Watch, args: Any, kwargs: Any, state: Sequence[Tensor] = ()
    ) -> None:
        self._tape = tape
        self._watch = watch
        self._args, self._kwargs = tuple(args), dict(kwargs)
        touched = {
            id(tensor): tensor for tensor in (*tensors_in((self._args, self._kwargs)), *state)
        }
        self._versions = [(tensor, tensor._version) for tensor in touched.values()]
        self.random = self._averages = False

    def run(self, function: Callable[[], Any]) -> Any:
        """Runs it and notices whether random numbers are drawn."""
        self._watch.reset()
        out = function()
        self.random, self._averages = self._watch.random, bool(self._watch.averages)
        return out

    @property
    def mutates(self) -> bool:
        """Whether an argument or a buffer was written to in place."""
        return self._averages or any(
            tensor._version != version for tensor, version in self._versions
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as nodes. In-place calls return their argument: ask before the result is bound."""
        return self._tape.argument(self._args), self._tape.argument(self._kwargs)


def target_of(function: Any, name: str) -> tuple[str, Any]:
    """The kind of node and the target that call `function` again."""
    method = isinstance(function, METHOD_TYPES) or getattr(function, "__qualname__", "").startswith(
        METHOD_OWNERS
    )
    return ("call_method", name) if method else ("call_function", function)


def hooking(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], None]:
    """`register_hook` as a graph can call it: it cannot spell `hook`, and may run where there are no gradients."""

    def register_hook(tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(hook)

    register_hook.__qualname__ = (
        f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__name__)}.register_hook"
    )
    return register_hook


def encloses_recorded(function: Any) -> bool:
    """Whether a function holds, however deep, a tensor or a size that belongs to the recording alone.

    Looked at are enclosed variables, defaults, bound arguments and attributes of objects; modules are not.
    """
    seen: set[int] = set()
    left = [function]
    while left:
        value = left.pop()
        if isinstance(value, SYMBOLS) or any(
            isinstance(tensor, FakeTensor) for tensor in tensors_in(value)
        ):
            return True
        if id(value) not in seen and not isinstance(
            value, (nn.Module, Tensor, type, types.ModuleType)
        ):
            seen.add(id(value))
            left.extend(_enclosed(value))
    return False


def _enclosed(value: Any) -> Iterator[Any]:
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


def applying(function: Any) -> Callable[..., Any]:
    """`function.apply` as a graph can call it: found when it runs, since while we record it is ours."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    apply.__qualname__ = f"{function.__module__}.{function.__qualname__}.apply"
    return apply
