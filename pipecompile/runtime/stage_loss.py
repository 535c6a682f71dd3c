"""The loss behind the last stage, run once for each microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipecompile.errors import InputError
from pipecompile.graph.autograd_nodes import autograd_nodes_since
from pipecompile.graph.loss_module import in_eval_mode, versioned_buffers

__all__ = ["Loss", "StageLoss"]

Loss = Callable[[Sequence[Tensor], Any], Any]
"""From the output tensors and the target of a microbatch to a scalar, or to (scalar, anything)."""


@dataclass
class StageLoss:
    """The loss function, and the module that it calls if that is a part of the stage.

    Only that module's parameters may be trained by it, besides the outputs.
    """

    function: Loss
    module: nn.Module | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """The module, if there is one."""
        return [] if self.module is None else [self.module]

    def __call__(self, outputs: Sequence[Tensor], target: Any) -> tuple[Tensor, Any]:
        """Return the loss of a microbatch, and what came with it, without history.

        InputError if it is no scalar, carries no gradient, or trains something else.
        """
        # Before the call, which may make new ones, that nobody would sum.
        allowed = {*outputs, *(() if self.module is None else self.module.parameters())}
        before = torch._C._autograd._get_sequence_nr()
        if self.module is None:
            loss, extras = _loss_and_extras(self.function(outputs, target))
        else:
            with versioned_buffers(self.module):
                loss, extras = _loss_and_extras(self.function(outputs, target))
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise InputError(
                "the loss carries no gradient: no trainable parameter leads to it, or loss_fn "
                "lost it (detach, argmax, item); train something that leads to the loss"
            )
        # Each time: a penalty may begin, and a layer be unfrozen, in the middle of a training.
        _refuse_trained_by_loss(loss, before, allowed)
        return loss, extras

    def evaluate(self, outputs: Sequence[Tensor], target: Any) -> tuple[Tensor, Any]:
        """Return the same in eval mode; gradients are switched off around it."""
        with nullcontext() if self.module is None else in_eval_mode(self.module):
            return _loss_and_extras(self.function(outputs, target))


def _loss_and_extras(returned: Any) -> tuple[Tensor, Any]:
    """Return the loss and what came with it, without history; InputError without a scalar."""
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, extras = returned
        return _checked_scalar(loss), tree_map_only(Tensor, Tensor.detach, extras)
    return _checked_scalar(returned), None


def _refuse_trained_by_loss(loss: Tensor, number: int, allowed: set[Tensor]) -> None:
    """Raise InputError if a loss that was computed since autograd's sequence number `number` trains
    anything that is not `allowed`: it is on no stage, and nobody would sum or save it.
    """
    roots = [] if loss.grad_fn is None else [loss.grad_fn]
    for node in autograd_nodes_since(number, roots):
        variable = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if variable is not None and variable not in allowed:
            raise InputError(
                f"loss_fn trains a tensor of shape {tuple(variable.shape)} that is no output of "
                "the model: a layer that it encloses, or a penalty on parameters. No stage has it; "
                "compute that in the model's forward and return it, freeze it, or give as loss_fn "
                "an nn.Module that has it as its parameter"
            )


def _checked_scalar(loss: Any) -> Tensor:
    """Return `loss`, or raise InputError if it is not a scalar tensor."""
    if isinstance(loss, Tensor) and not loss.dim() and not loss.is_complex():
        return loss
    returned = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor) and not loss.dim():
        returned = f"a tensor of type {loss.dtype}"
    elif isinstance(loss, Tensor):
        returned = f"a tensor of shape {tuple(loss.shape)}"
    raise InputError(
        f"the loss function returned {returned}, but it must be a real scalar tensor, such as its "
        "mean, or a tuple of that and of what else you want"
    )
