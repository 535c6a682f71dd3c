"""What two stages hold of what they hand to each other, if one follows the other on a rank. Part of memory.py's model.

Nothing is sent or received between them: each is given the other's own storages. Such a storage lives as long as any
holder does:

    a value of the stage before       that stage, until its forward or first half is no more (its `kept`, which counts
                                      it), or while its second half needs it
                                      the stage behind, while its second half needs it
                                      a message of the stage behind, until the step ends
    a gradient of the stage behind    that stage, while its second half needs it
                                      the stage before, until its backward is done, or while its second half needs it
                                      a message of the stage before, until the step ends

What only passes through both lies in buffers of the rank, which count anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product, starmap
from typing import get_args

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import Footprint, MessageStorage, size_of
from pipecompile.memory_model.snapshots import Phase, HandoverPhase

__all__ = ["handed_over", "most_handed_over"]


def handed_over(before: Footprint, behind: Footprint, turn: HandoverPhase) -> Amount:
    """What a microbatch holds of it, besides what the stage `before` has kept for its own backward."""
    return _values(before, behind, turn) + _gradients(before, behind, turn)


def most_handed_over(before: Footprint, behind: Footprint) -> Amount:
    """The most that a microbatch holds of it, however far it is; by what is bounded."""
    phases: tuple[Phase, ...] = get_args(Phase)
    every = starmap(HandoverPhase, product(phases, phases, (False, True)))
    return max(
        (handed_over(before, behind, turn) for turn in every), key=lambda amount: amount.bound
    )


def _values(before: Footprint, behind: Footprint, turn: HandoverPhase) -> Amount:
    if turn.before == "forward":
        return ZERO
    wanted = {
        *behind.relayed_inputs,
        *(behind.inputs_for_weight_backward if turn.behind == "half" else ()),
    }
    own = turn.before == "half" and not turn.again
    return size_of(
        parcel
        for parcel in before.sent_outputs
        if _holds(parcel, wanted) and not (own and parcel.is_needed_by_weight_backward)
    )


def _gradients(before: Footprint, behind: Footprint, turn: HandoverPhase) -> Amount:
    made = {
        "forward": (),
        "half": behind.sent_by_input_backward,
        "halves": behind.sent_by_input_backward,
        "whole": behind.sent_by_backward,
    }[turn.behind]
    wanted = {
        "forward": {name for parcel in made for name in parcel.names},
        "half": {*before.relayed_gradients, *before.gradients_for_weight_backward},
        "halves": {*before.relayed_gradients},
        "whole": {*before.relayed_gradients},
    }[turn.before]
    return size_of(
        parcel
        for parcel in made
        if _holds(parcel, wanted) or (turn.behind == "half" and parcel.is_needed_by_weight_backward)
    )


def _holds(parcel: MessageStorage, names: Collection[str]) -> bool:
    return any(name in names for name in parcel.names)
