"""Which losses are held by the last stage, and which cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipecompile.errors import InputError
from pipecompile.graph.loss_module import LOSS
from pipecompile.graph.model_state import named_state

__all__ = ["loss_to_hold"]


def loss_to_hold(model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None) -> nn.Module | None:
    """Return a loss that is a module with parameters or buffers of its own; None for another one.

    InputError if it is scripted, if it shares some with the model, so that they would belong to
    several stages, if the model has the name that the loss is to have, or if it has no shapes yet.
    """
    if not isinstance(loss_fn, nn.Module):
        return None
    own = dict(named_state(loss_fn))
    if own and any(isinstance(each, torch.jit.ScriptModule) for each in loss_fn.modules()):
        raise InputError(
            "loss_fn is a scripted module with parameters or buffers; give the Python module that "
            "it was made from"
        )
    names = {id(tensor): name for name, tensor in named_state(model)}
    shared = [name for name, tensor in own.items() if id(tensor) in names]
    if len(shared) == len(own) and not any(own[name].requires_grad for name in shared):
        return None  # it has nothing, or constants of the model
    if shared:
        raise InputError(
            f"loss_fn has {shared[0]!r}, which is {names[id(own[shared[0]])]!r} of the model: one "
            "tensor cannot be trained by the model's stage and by the loss. Compute with it in the "
            "model's forward and return that, or give the loss a tensor of its own"
        )
    if any(map(is_lazy, own.values())):
        raise InputError("loss_fn has parameters without a shape (lazy ones); call it once before")
    if hasattr(model, LOSS):
        raise InputError(
            f"loss_fn is a module whose parameters and buffers are to be named {LOSS}.…, but the "
            f"model has {LOSS!r} already; give that another name"
        )
    return loss_fn
