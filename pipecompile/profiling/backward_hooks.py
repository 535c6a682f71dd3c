"""Backward hooks in a step on fake tensors, which have no values for a hook to read."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.autograd import function

from pipecompile import errors

__all__ = ["backward_advice", "stop_at_reads"]

# Frames of files in these folders are not those of a hook.
HIDDEN = tuple(f"{Path(file or '').parent}/" for file in (torch.__file__, errors.__file__))


def stop_at_reads(module: nn.Module) -> None:
    """Let the backward hooks of `module` and of the modules in it end where they read a value."""
    for part in module.modules():
        for table in (part._backward_hooks, part._backward_pre_hooks):
            table.update({key: _stopping_at_reads(hook) for key, hook in table.items()})


def _stopping_at_reads(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook, updated=())
    def stopping(module: nn.Module, gradients: Any, *others: Any) -> Any:
        try:
            return hook(module, gradients, *others)
        except Exception:
            # `item`, `print` and `numpy` each raise something else. A step of the model has shown
            # that the hook works on values. It may return other gradients, such as clipped ones,
            # so memory is counted for these.
            return tuple(None if each is None else each.clone() for each in gradients)

    return stopping


def backward_advice(error: Exception) -> str:
    """Return, as the end of a sentence, what to do about an error of a backward; "" if it was not
    raised in code of the user.
    """
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    if any(code.co_filename == function.__file__ for code in frames):
        return "; a custom autograd.Function must not read values in its backward"
    # The first is the hook itself; others are what it calls.
    hooks = (code.co_qualname for code in frames if not code.co_filename.startswith(HIDDEN))
    if hook := next(hooks, ""):
        return (
            f"; the hook {hook} must not read values in it: let it keep the tensor (detach), and "
            "read it after the step"
        )
    return ""
