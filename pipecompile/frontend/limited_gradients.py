"""Do gradients grow with the loss? Where a hook or a Function limits them, they do not.

The backward of a microbatch begins with its own mean, and the sum over M of them is divided by M at
the end, as in torch's own pipelines. Gradients within are then M times those of the whole batch:

    the batch             clip(g₀ / 2) + clip(g₁ / 2)
    two microbatches     (clip(g₀)     + clip(g₁)) / 2
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipecompile.frontend.callable_state import callable_restored, can_be_restored
from pipecompile.frontend.deterministic_kernels import deterministic_kernels
from pipecompile.frontend.kept_state import holders_of_user, places_of_kept_state
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.frontend.training_step import (
    gradients_put_aside,
    restored_state,
    seed_everything,
)
from pipecompile.graph.pytrees import tensor_leaves

__all__ = ["limited_gradients_of"]

TOLERANCE = 0.01  # of the largest gradient of a parameter; half precision rounds


def limited_gradients_of(
    target: Target, module: fx.GraphModule, call: Arguments, microbatches: int
) -> str | None:
    """Return what to say if gradients of the microbatch `call` do not grow with its loss, and
    losses are divided by what a whole batch has; `module` is its graph.

    It is asked where code of the user runs in backwards. Nothing is said where model or loss fail.
    """
    places = list(dict.fromkeys(places_of_kept_state(module)))
    is_divided = target.loss_reduction != "sum" and microbatches > 1
    if not places or not is_divided or not can_be_restored(target.loss_fn):
        return None
    name = None
    with suppress(Exception):  # a step says what is wrong
        gradients = partial(_gradients, target, call, target.cut_targets(microbatches)[0])
        name = _first_limited(gradients, 1 / microbatches)
    if name is None:
        return None
    return (
        f"the gradient of {name} does not grow with the loss: code that runs in backwards limits "
        f"it, or does something else of the kind, at {', '.join(places[:3])}. A microbatch goes "
        "back from its own loss, and sums are divided in the end, so that this code is given "
        f"{microbatches} times what it has in a step of the whole batch; with loss_reduction='sum' "
        f"and a loss_fn that is divided by {microbatches} it has the same, except on parameters, "
        "whose gradients are whole after `step` only: limit them there"
    )


def _first_limited(gradients: Callable[[float], dict[str, Tensor]], share: float) -> str | None:
    """Return the first parameter whose gradient for a share of the loss is not that share of it."""
    whole, part = gradients(1), gradients(share)
    for name in filter(part.__contains__, whole):
        wanted = whole[name] * share
        largest = max(float(each.abs().max()) for each in (wanted, part[name]))
        # What draws or counts by itself differs for the same loss too.
        if float((part[name] - wanted).abs().max()) > TOLERANCE * largest:
            again = gradients(1)
            return name if torch.equal(again[name], whole[name]) else None
    return None


@torch.enable_grad()
def _gradients(target: Target, call: Arguments, wanted: Any, share: float) -> dict[str, Tensor]:
    """Return the gradients of parameters for a share of the loss, by name."""
    model, loss = target.model_with_loss, target.loss_module or nn.Identity()
    with (
        gradients_put_aside(model),
        restored_state(target.model),
        restored_state(loss),
        callable_restored(target.loss_fn, *holders_of_user(target.model)),
        deterministic_kernels(),
    ):
        seed_everything()
        returned = target.tried_loss(target.model(*call.args, **call.kwargs), wanted)
        (tensor_leaves(returned)[0] * share).backward()
        named = target.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}
