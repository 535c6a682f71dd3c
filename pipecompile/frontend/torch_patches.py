"""What holds around a forward while it is recorded: torch's hooks into it, flags, and generators that are watched."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.errors import CaptureError

Assigned = Callable[[nn.Module, str, Any], None]
FUNCTIONS = vars(torch.autograd.function)  # where the code of `Function.apply` finds its names

__all__ = [
    "applied_by",
    "cleared_by_autocast",
    "exporting",
    "inference_as_no_grad",
    "instead",
    "known_saving",
    "quiet",
    "seeded_by_torch",
]


@contextlib.contextmanager
def instead(
    call_module: Callable[..., Any], call_function: Callable[..., Any], assigned: Assigned
) -> Iterator[None]:
    """Calls of modules and of `autograd.Function.apply` go to these, each with the original as first argument.

    `assigned` is told of each attribute before it is set on a module.
    """
    call, assign = nn.Module.__call__, nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        assigned(module, name, value)
        assign(module, name, value)

    nn.Module.__call__ = lambda module, *a, **k: call_module(call, module, a, k)  # type: ignore[method-assign]
    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
    try:
        with applied_by(call_function):
            yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]


class _Redirected:
    """Holds the code that stands in for that of `Function.apply`; naming `__class__`, both enclose one variable."""

    def apply(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __class__  # type: ignore[name-defined]  # noqa: B018
        return _applied_instead(cls, args, kwargs)  # type: ignore[name-defined]  # noqa: F821


@contextlib.contextmanager
def applied_by(call_function: Callable[..., Any]) -> Iterator[None]:
    """Calls of `autograd.Function.apply` go to `call_function`, with the original as first argument.

    Its code is exchanged, not the attribute: models keep `apply` under names of their own.
    """
    function = torch.autograd.Function.__dict__["apply"].__func__
    code = function.__code__
    original = types.FunctionType(
        code, function.__globals__, "apply", function.__defaults__, function.__closure__
    )
    FUNCTIONS["_applied_instead"] = lambda cls, args, kwargs: call_function(
        original, cls, args, kwargs
    )
    function.__code__ = _Redirected.apply.__code__
    try:
        yield
    finally:
        function.__code__ = code
        del FUNCTIONS["_applied_instead"]


@contextlib.contextmanager
def known_saving() -> Iterator[None]:
    """CaptureError where the block changes what autograd saves; torch's own ways keep the values as they are."""
    enter = saved_tensors_hooks.__enter__

    def checked(hooks: saved_tensors_hooks) -> None:
        if not type(hooks).__module__.startswith("torch.") or type(hooks) is saved_tensors_hooks:
            raise CaptureError(
                "the forward enters saved_tensors_hooks of its own, which no stage would; save_on_cpu and checkpoints "
                "are known, others may change gradients: leave them to the training loop"
            )
        enter(hooks)

    saved_tensors_hooks.__enter__ = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


@contextlib.contextmanager
def exporting(on: bool) -> Iterator[None]:
    """Models ask these flags whether they are being captured, and then avoid shortcuts that depend on data."""
    import torch.compiler as compiler

    flags = compiler._is_exporting_flag, compiler._is_compiling_flag
    compiler._is_exporting_flag, compiler._is_compiling_flag = flags[0] or on, flags[1] or on
    try:
        yield
    finally:
        compiler._is_exporting_flag, compiler._is_compiling_flag = flags


@contextlib.contextmanager
def cleared_by_autocast(cleared: Callable[[], None]) -> Iterator[None]:
    """`cleared` is called whenever autocast forgets what it cast, as at the end of an outermost region."""
    clear = torch.clear_autocast_cache

    def clear_cache() -> None:
        clear()
        cleared()

    torch.clear_autocast_cache = clear_cache
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear


class _NoGrad:
    """Stands in for the guard of `torch.inference_mode`: the same values, on tensors that count their versions."""

    def __init__(self, mode: bool) -> None:
        self._grad = torch.set_grad_enabled(not mode)
        self._grad.__exit__(None, None, None)

    def __enter__(self) -> None:
        self._grad.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._grad.__exit__(None, None, None)


@contextlib.contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Regions of `torch.inference_mode` in the block are regions without gradients."""
    guard = torch._C._InferenceMode
    torch._C._InferenceMode = _NoGrad  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch._C._InferenceMode = guard  # type: ignore[misc]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Torch would print stack traces and graphs above our one line, and warn of each answer."""
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


@contextlib.contextmanager
def seeded_by_torch() -> Iterator[None]:
    """Random states are afterwards as before; CaptureError if the block draws from another generator than torch's."""
    state, draws, arrays = torch.get_rng_state(), random.getstate(), _numpy_state()
    try:
        yield
    finally:
        seeded = not torch.equal(torch.get_rng_state(), state)
        torch.set_rng_state(state)
        unmoved = {"Python's": random.getstate() == draws, "numpy's": _same(arrays)}
        random.setstate(draws)
        _restore_numpy(arrays)
    if seeded:
        raise CaptureError(
            "the forward seeds torch's generator, or draws from it unseen, but every random node of a pipeline is "
            "seeded for itself; seed outside the model"
        )
    drawn = [name for name, same in unmoved.items() if not same]
    if drawn:
        raise CaptureError(
            f"the forward draws from {drawn[0]} random module, and one draw would be taken for all steps; "
            "draw with torch, or switch it off (layer drop, for example)"
        )


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _same(state: Any) -> bool:
    now = _numpy_state()
    if state is None or now is None:
        return True
    return bool(now[0] == state[0] and (now[1] == state[1]).all() and now[2:] == state[2:])


def _restore_numpy(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)
