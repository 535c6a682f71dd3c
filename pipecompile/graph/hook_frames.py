"""Frames of hooks: whether the code of a forward hook runs now, and which."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

from torch import nn

__all__ = ["HookCodes", "forward_hooks", "hook_codes_of", "hook_name", "running_hook"]

HookCodes = Mapping[CodeType, str]
"""By the code of a hook: its name."""


def forward_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks that run when this module is called, in no particular order."""
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def hook_codes_of(module: nn.Module) -> HookCodes:
    """Return the code of all forward hooks of a module and of the modules in it."""
    hooks = (hook for part in module.modules() for hook in forward_hooks(part))
    return {code: hook_name(hook) for hook in hooks if (code := _code_of(hook)) is not None}


def hook_name(hook: Any) -> str:
    """Return what people call a hook: its qualified name, or that of its class."""
    hook = hook.func if isinstance(hook, partial) else hook
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def running_hook(codes: HookCodes) -> str:
    """Return the name of the innermost of these hooks that runs now; "" without one."""
    frame = sys._getframe(1) if codes else None
    while frame is not None:
        if frame.f_code in codes:
            return codes[frame.f_code]
        frame = frame.f_back
    return ""


def _code_of(hook: Any) -> CodeType | None:
    """Return the code that runs when a hook is called; None for one without code of Python."""
    hook = inspect.unwrap(hook.func if isinstance(hook, partial) else hook)
    own = hook if hasattr(hook, "__code__") else type(hook).__call__
    return getattr(own, "__code__", None)
