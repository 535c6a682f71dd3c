"""One call in a forward: its arguments, its side effects, and how a graph makes the same call."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from pipecompile.errors import CaptureError
from pipecompile.frontend.nested_values import tensors_in
from pipecompile.frontend.packages import is_foreign
from pipecompile.frontend.recording import SYMBOLS, Recording, SymbolicNumber
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.graph.gradient_hooks import note_hook
from pipecompile.graph.model_state import named_state
from pipecompile.graph.side_effects import SideEffectTracker

__all__ = [
    "RecordedCall",
    "apply_target",
    "call_target",
    "has_recorded_values",
    "hook_target",
    "runs_code_of_user",
    "with_objects",
]

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
        # Each write in place raises the version, also one through a view, which shares the
        # counter.
        self._versions = [(tensor, tensor._version) for tensor in touched.values()]
        self.is_random = self._updates_statistics = False

    def run(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, and note its side effects.

        CaptureError if it writes to a tensor that is neither the model's nor of this forward.
        """
        self._tracker.reset()
        try:
            result = function()
        finally:
            # Also if that has failed, as a write of fakes to a real tensor may.
            if self._tracker.writes_outside:
                raise CaptureError(
                    f"{self._recording.where()}: the forward writes in place to a tensor that it "
                    "does not use as a parameter or buffer of the model, so that no stage sees the "
                    "write; make it a buffer with register_buffer, and use it by that name"
                )
        self.is_random = self._tracker.is_random
        self._updates_statistics = bool(self._tracker.running_statistics)
        return result

    @property
    def mutates(self) -> bool:
        """Whether an argument or a buffer was written to in place."""
        return self._updates_statistics or bool(self.written)

    @property
    def touched(self) -> list[Tensor]:
        """The arguments and the state that the call may read or write."""
        return [tensor for tensor, _ in self._versions]

    @property
    def written(self) -> list[Tensor]:
        """Those of them that were written to in place."""
        return [tensor for tensor, version in self._versions if tensor._version != version]

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
            note_hook(tensor)

    # The digest of a graph knows a function by this name, so it says which hook it is.
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


def runs_code_of_user(target: Any) -> bool:
    """Return whether a target of a node was made by `hook_target` or `apply_target` of something
    that is not torch's.
    """
    # With an object among its arguments, such as a function, another one makes the call.
    name = str(getattr(getattr(target, "calls", target), "__qualname__", ""))
    return name.endswith((".apply", ".register_hook")) and not is_foreign(name)


@dataclass(frozen=True)
class _Operand:
    """The place of a node's argument in the arguments of the call that it stands for."""

    index: int


# What fx prints so that Python reads the same value. An object of a subclass is another value.
LITERALS = (
    int, float, bool, str, bytes, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def with_objects(
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: Callable[[], str],
) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """Return the kind of node, target and arguments of a call that fx can print as code.

    A graph becomes code. So arguments that are no literals, such as functions, and keywords that
    are no names go into a new target, which makes the same call:

        apply(sin, x, scale=2.0)     becomes     call(x),  call = lambda y: apply(sin, y, scale=2.0)

    UnsupportedError, which begins with what `where` returns, if an object holds tensors or modules,
    or is passed to a module.
    """
    is_named = all(key.isidentifier() and not iskeyword(key) for key in kwargs)
    if is_named and _is_literal((args, kwargs)):
        return op, target, args, kwargs
    if op == "call_module":
        raise UnsupportedError(
            f"{where()}: the module is one node, and is passed an object that is neither a tensor "
            "nor a constant; pass these, or make the module around it one node (leaf)"
        )
    function = _method(target) if op == "call_method" else target
    operands: list[Any] = []

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, (fx.Node, SymbolicNumber)):
            operands.append(leaf)
            return _Operand(len(operands) - 1)
        if has_recorded_values(leaf) or _has_state(leaf):
            raise UnsupportedError(
                f"{where()}: a {type(leaf).__name__} that holds tensors or modules is passed to a "
                "call, which becomes one node that would not see their gradients; pass tensors as "
                "arguments"
            )
        return leaf

    # What stays in the template is in the function: `apply(sin, x)` has the template (sin,
    # operand 0).
    template = map_aggregate((args, kwargs), placed)

    def call(*values: Any) -> Any:
        def filled(leaf: Any) -> Any:
            return values[leaf.index] if isinstance(leaf, _Operand) else leaf

        all_args, all_kwargs = map_aggregate(template, filled)
        return function(*all_args, **all_kwargs)

    # Digests know a function by its name, and this one stands for its arguments too.
    arguments = map_aggregate(template, _named)
    call.__qualname__ = f"{function.__module__}.{function.__qualname__}{arguments}"
    call.calls = function  # type: ignore[attr-defined]
    return "call_function", call, tuple(operands), {}


def _method(name: str) -> Callable[..., Any]:
    def method(value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, name)(*args, **kwargs)

    method.__qualname__ = name
    return method


def _is_literal(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_literal, value))
    if isinstance(value, slice):
        return _is_literal((value.start, value.stop, value.step))
    if isinstance(value, dict):
        # In a dict fx prints named tuples as they print themselves.
        has_tuples = any(hasattr(item, "_fields") for item in value.values())
        return not has_tuples and _is_literal((*value.keys(), *value.values()))
    return type(value) in LITERALS or isinstance(value, (fx.Node, SymbolicNumber))


def _named(leaf: Any) -> Any:
    """Return a leaf as it is the same in every process: what prints its address by its name."""
    if type(leaf) in LITERALS or isinstance(leaf, _Operand):
        return leaf
    if " at 0x" not in repr(leaf) and not hasattr(leaf, "__qualname__"):
        return repr(leaf)
    kind = leaf if hasattr(leaf, "__qualname__") else type(leaf)
    return f"{kind.__module__}.{kind.__qualname__}"


def has_recorded_values(function: Any) -> bool:
    """Return whether a function holds, at any depth, a tensor or a size of the recording."""
    return any(isinstance(value, (*SYMBOLS, FakeTensor)) for value in _reachable(function))


def _has_state(value: Any) -> bool:
    """Return whether an object holds, at any depth, a tensor or a module with tensors."""
    return any(
        isinstance(each, Tensor)
        or (isinstance(each, nn.Module) and any(True for _ in named_state(each)))
        for each in _reachable(value)
    )


def _reachable(value: Any) -> Iterator[Any]:
    """Yield `value` and what it holds at any depth.

    Enclosed variables, defaults, bound arguments and attributes of objects are searched; modules
    and tensors are not: a module's own tensors are fakes only while the forward is recorded.
    """
    seen: set[int] = set()
    stack = [value]
    while stack:
        each = stack.pop()
        yield each
        is_searched = not isinstance(each, (nn.Module, Tensor, type, types.ModuleType))
        if is_searched and id(each) not in seen:
            seen.add(id(each))
            stack.extend(_enclosed_values(each))


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
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield from getattr(value, "__dict__", {}).values()
