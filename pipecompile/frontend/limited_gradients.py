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
    gradients_of,
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
        f"the gradient of {name} does not grow with the loss, as where a hook or a Function clips "
        f"it; such code is at {', '.join(places[:3])}. A microbatch goes back from its own loss, "
        f"and sums are divided in the end, so that this code is given {microbatches} times what it "
        "has in a step of the whole batch. To give it the same, give loss_reduction='sum' and "
        f"divide loss_fn by {microbatches}; limit gradients of parameters after `step`"
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
    loss, named = target.loss_module or nn.Identity(), dict(target.model.named_parameters())
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    with (
        restored_state(target.model),
        restored_state(loss),
        callable_restored(target.loss_fn, *holders_of_user(target.model)),
        deterministic_kernels(),
    ):
        seed_everything()
        returned = target.tried_loss(target.model(*call.args, **call.kwargs), wanted)
        found = gradients_of(tensor_leaves(returned)[0] * share, list(trained.values()))
        return {name: each for name, each in zip(trained, found, strict=True) if each is not None}
