"""The options of a plan for one target: those that were requested, with what only the target can
say.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipecompile.api.choices import requested_options
from pipecompile.api.costs import cost_model, kinds_of
from pipecompile.errors import InputError, unknown
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Options
from pipecompile.memory_model.optimizer import OPTIMIZERS

__all__ = ["completed", "options_for"]


def options_for(target: Target, **choices: Any) -> Options:
    """Return the options of a plan of `target`, checked: InputError names what was given and what
    there is.

    `choices` are those of `requested_options`.
    """
    return completed(target, requested_options(**choices))


def completed(target: Target, requested: Options) -> Options:
    """Return `requested` options with the target's optimizer, which inference does not have."""
    # What the user names wins over what the target brings: a plan for Adam of a model that trains
    # with SGD is a question that one may ask.
    optimizer = requested.optimizer or target.optimizer
    if requested.is_inference:
        optimizer = None
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise InputError(f"the target's optimizer: {unknown('optimizer', optimizer, OPTIMIZERS)}")
    if optimizer is None and requested.optimizer_on_host:
        raise InputError(
            f"optimizer_on_host is of an optimizer; name one of {', '.join(OPTIMIZERS)}"
        )
    if optimizer is None and requested.master_weights:
        raise InputError(
            f"master weights are kept for an optimizer; name one of {', '.join(OPTIMIZERS)}"
        )
    _check_microbatches(target, requested.microbatches)
    for kind in kinds_of(requested.costs):
        cost_model(kind, target.costs)  # refuses what there is not
    return msgspec.structs.replace(requested, optimizer=optimizer)


def _check_microbatches(target: Target, microbatches: int) -> None:
    """Raise InputError unless the minibatch can be cut into `microbatches` parts of one size."""
    batch = target.samples
    # Stages, messages and memory are planned for one size of microbatch.
    if batch % microbatches:
        fitting = [str(number) for number in range(1, batch + 1) if batch % number == 0]
        raise InputError(
            f"a batch of {batch} cannot be cut into {microbatches} microbatches of one size; "
            f"choose microbatches from {', '.join(fitting)}, leave it out, or choose another batch"
        )
