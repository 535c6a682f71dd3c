"""Patches of torch that hold around a forward while it is captured.

They redirect calls, set torch's export flags, keep torch silent, and refuse what a graph cannot
express. Every patch is a context manager that puts torch's own function back after its block.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.errors import CaptureError
from pipecompile.frontend.source import current_line, is_user_file

NoteAssignment = Callable[[nn.Module, str, Any], None]
HISTORY = ("is_leaf", "grad_fn")
FUNCTIONS = vars(torch.autograd.function)  # the globals of the code of `Function.apply`

__all__ = [
    "notify_autocast_clears",
    "redirect_autograd_functions",
    "redirect_calls",
    "refuse_own_saving_hooks",
    "refuse_questions_of_history",
    "run_inference_as_no_grad",
    "set_export_flags",
    "silence_torch",
]


class _HistoryQuestion:
    """An attribute of tensors that torch's own modes find as they find torch's: by name."""

    def __init__(self, name: str, given: Mapping[int, str]) -> None:
        self.__name__ = name
        self._original, self._given = getattr(torch._C.TensorBase, name), given

    def __get__(self, tensor: Tensor | None, kind: type | None = None) -> Any:
        if tensor is None:
            return self
        if id(tensor) in self._given and is_user_file(sys._getframe(1).f_code.co_filename):
            raise CaptureError(
                f"{self._given[id(tensor)]} ({current_line()}): the module is one node and asks "
                f"how its argument was computed ({self.__name__}), which is not known where a "
                "stage begins with it; ask for requires_grad instead, or ask outside of that module"
            )
        return self._original.__get__(tensor)


@contextlib.contextmanager
def refuse_questions_of_history(given: Mapping[int, str]) -> Iterator[None]:
    """Refuse code of the user that asks in the block how a tensor was computed that is `given`, by
    id, to the module of that path: at the beginning of a stage a tensor has no history.
    """
    # Once for a whole forward: Python stops caching lookups in a class that changes often.
    for name in HISTORY:
        setattr(Tensor, name, _HistoryQuestion(name, given))
    try:
        yield
    finally:
        for name in HISTORY:
            delattr(Tensor, name)


@contextlib.contextmanager
def redirect_calls(
    call_module: Callable[..., Any],
    call_function: Callable[..., Any],
    note_assignment: NoteAssignment,
) -> Iterator[None]:
    """Redirect calls of modules and of `autograd.Function.apply` in the block.

    `call_module` and `call_function` get the original as their first argument. `note_assignment` is
    called before an attribute is set on a module.
    """
    # Of the class, where Python looks special methods up: on an instance they would not be found.
    call, assign = nn.Module.__call__, nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        note_assignment(module, name, value)
        assign(module, name, value)

    nn.Module.__call__ = lambda module, *a, **k: call_module(call, module, a, k)  # type: ignore[method-assign]
    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
    try:
        with redirect_autograd_functions(call_function), _only_real_conversions():
            yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]


@contextlib.contextmanager
def _only_real_conversions() -> Iterator[None]:
    """Let a module be where it converts nothing: the router of Switch Transformers calls
    `.to(dtype)` in each forward, which would ask for gradients and set parameters anew.
    """
    convert: Any = nn.Module._apply

    def convert_if_other(module: nn.Module, function: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # this question is no part of the forward
            state = chain(module.parameters(), module.buffers())
            is_as_wanted = all(function(tensor) is tensor for tensor in state)
        return module if is_as_wanted else convert(module, function, *args, **kwargs)

    nn.Module._apply = convert_if_other  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


@contextlib.contextmanager
def redirect_autograd_functions(call_function: Callable[..., Any]) -> Iterator[None]:
    """Redirect calls of `autograd.Function.apply`; the original is the first argument."""
    # If nobody did this, the recorder would see the calls inside the function's forward, and the
    # graph would differentiate these: other gradients than those of its own backward, without an
    # error.
    apply = torch.autograd.Function.__dict__["apply"]
    redirected = _redirected_code if isinstance(apply, classmethod) else _redirected_attribute
    with redirected(apply, call_function):
        yield


class _ApplyReplacement:
    """Holds the code that replaces the code of `Function.apply`.

    Code can only be replaced by code with as many enclosed variables. The original encloses one,
    the `__class__` of `super()`, so this one names it too.
    """

    def apply(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __class__  # type: ignore[name-defined]  # noqa: B018
        return _redirected_apply(cls, args, kwargs)  # type: ignore[name-defined]  # noqa: F821


@contextlib.contextmanager
def _redirected_code(apply: Any, call_function: Callable[..., Any]) -> Iterator[None]:
    """Redirect `apply` where it is a function of Python, as before torch 2.15.

    Its code is replaced, not the attribute: models keep `apply` under names of their own.
    """
    function = apply.__func__
    code = function.__code__
    original = types.FunctionType(
        code, function.__globals__, "apply", function.__defaults__, function.__closure__
    )
    FUNCTIONS["_redirected_apply"] = lambda cls, args, kwargs: call_function(
        original, cls, args, kwargs
    )
    function.__code__ = _ApplyReplacement.apply.__code__
    try:
        yield
    finally:
        function.__code__ = code
        del FUNCTIONS["_redirected_apply"]


@contextlib.contextmanager
def _redirected_attribute(apply: Any, call_function: Callable[..., Any]) -> Iterator[None]:
    """Redirect `apply` where it is a method of C, as from torch 2.15 on.

    An `apply` that was bound before cannot be redirected. It is noticed, and CaptureError is
    raised, when it looks up `forward` of its class.
    """
    kind, depth = type(torch.autograd.Function), [0]

    def original(function: Any, *args: Any, **kwargs: Any) -> Any:
        # Within `original` torch itself looks `forward` up.
        depth[0] += 1
        try:
            return apply.__get__(None, function)(*args, **kwargs)
        finally:
            depth[0] -= 1

    def redirected(function: Any, *args: Any, **kwargs: Any) -> Any:
        return call_function(original, function, args, kwargs)

    def look_up(function: Any, name: str) -> Any:
        if name == "forward" and not depth[0]:
            raise CaptureError(
                f"the forward calls {function.__qualname__}.apply under another name, which torch "
                "2.15 and newer do not show; call it as an attribute of the class"
            )
        return type.__getattribute__(function, name)

    torch.autograd.Function.apply = classmethod(redirected)  # type: ignore[assignment]
    kind.__getattribute__ = look_up  # type: ignore[method-assign]
    try:
        yield
    finally:
        del kind.__getattribute__
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


@contextlib.contextmanager
def refuse_own_saving_hooks() -> Iterator[None]:
    """Raise CaptureError if the block changes what autograd saves.

    Torch's own ways to do so, as `save_on_cpu`, are allowed: they keep the values.
    """
    enter = saved_tensors_hooks.__enter__

    def checked_enter(hooks: saved_tensors_hooks) -> None:
        # Subclasses in torch, such as save_on_cpu, keep what is saved. The class itself is of
        # torch too, but then the two hooks are the user's.
        is_torchs = type(hooks).__module__.startswith("torch.")
        if not is_torchs or type(hooks) is saved_tensors_hooks:
            raise CaptureError(
                "the forward enters saved_tensors_hooks of its own, which no stage would enter; "
                "save_on_cpu and checkpoints are known, others may change gradients: leave them "
                "to the training loop"
            )
        enter(hooks)

    saved_tensors_hooks.__enter__ = checked_enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


@contextlib.contextmanager
def set_export_flags(on: bool) -> Iterator[None]:
    """Set, if `on`, the flags by which models learn that they are captured.

    Models then avoid shortcuts that depend on data.
    """
    import torch.compiler as compiler

    # Libraries ask for either of the two.
    flags = compiler._is_exporting_flag, compiler._is_compiling_flag
    compiler._is_exporting_flag, compiler._is_compiling_flag = flags[0] or on, flags[1] or on
    try:
        yield
    finally:
        compiler._is_exporting_flag, compiler._is_compiling_flag = flags


@contextlib.contextmanager
def notify_autocast_clears(note_clear: Callable[[], None]) -> Iterator[None]:
    """Call `note_clear` whenever autocast drops its casts: at the end of an outermost region."""
    # torch.autocast calls it as it leaves an outermost region, and looks it up in torch each
    # time.
    clear = torch.clear_autocast_cache

    def clear_cache() -> None:
        clear()
        note_clear()

    torch.clear_autocast_cache = clear_cache
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear


class _InferenceAsNoGrad:
    """Replaces the guard of `torch.inference_mode`: the same values, on tensors with versions."""

    def __init__(self, mode: bool) -> None:
        self._grad = torch.set_grad_enabled(not mode)
        # `set_grad_enabled` takes effect at once; the guard must do so when it is entered.
        self._grad.__exit__(None, None, None)

    def __enter__(self) -> None:
        self._grad.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._grad.__exit__(None, None, None)


@contextlib.contextmanager
def run_inference_as_no_grad() -> Iterator[None]:
    """Run regions of `torch.inference_mode` in the block as regions without gradients."""
    # Tensors of inference mode have no version counter, by which the recorder sees writes, and
    # cannot be saved for a backward.
    guard = torch._C._InferenceMode
    torch._C._InferenceMode = _InferenceAsNoGrad  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch._C._InferenceMode = guard  # type: ignore[misc]


@contextlib.contextmanager
def silence_torch() -> Iterator[None]:
    """Keep torch from printing stack traces, graphs and warnings above our one-line message."""
    loggers = [
        logging.getLogger(f"torch.{name}")
        for name in ("_subclasses.fake_tensor", "fx.experimental")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
