"""What two neighbouring stages on one rank hold of the storages that they hand to each other.

Between them nothing is sent: each gets the other's own storages. Such a storage lives as long as
any of its holders needs it:

    an output of the stage before      the stage before, until its backward (or its input backward)
                                       is done (its `activations` count it then), or until its
                                       weight backward is done if that needs it
                                       the stage behind, until its weight backward is done
                                       a message that the stage behind relays, until the step ends
    a gradient of the stage behind     the stage behind, until its weight backward is done
                                       the stage before, until its backward is done, or until its
                                       weight backward is done if that needs it
                                       a message that the stage before relays, until the step ends

Tensors that only pass through both stages were received from other ranks. They are sent on, and
count until the step ends (snapshots.py). rank.py adds up what this returns.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import get_args

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import Footprint, MessageStorage, ReceivedTensor, total_size
from pipecompile.memory_model.snapshots import HandoverState, LastAction

__all__ = ["handed_over", "most_handed_over"]


def handed_over(before: Footprint, behind: Footprint, state: HandoverState) -> Amount:
    """Return what a microbatch in this state holds of handed storages.

    What the stage `before` keeps for its own backward is not counted again.
    """
    return _outputs(before, behind, state) + _gradients(before, behind, state)


def most_handed_over(before: Footprint, behind: Footprint) -> Amount:
    """Return the most, by bound, that a microbatch holds of handed storages in any state."""
    actions: tuple[LastAction, ...] = get_args(LastAction)
    amounts = [
        handed_over(before, behind, HandoverState(first, second, is_recomputed=is_recomputed))
        for first, second, is_recomputed in product(actions, actions, (False, True))
    ]
    return max(amounts, key=lambda amount: amount.bound)


def _outputs(before: Footprint, behind: Footprint, state: HandoverState) -> Amount:
    """Return what is held of the outputs of the stage before."""
    if state.before == "forward":
        return ZERO  # they are part of its activations
    is_between = state.behind == "input backward"
    needed = {tensor.name for tensor in behind.received if _is_held(tensor, is_between=is_between)}
    # Its own weight backward counts what it needs itself, unless recomputed outputs went before.
    keeps_own = state.before == "input backward" and not state.is_recomputed
    return total_size(
        storage
        for storage in before.sent_outputs
        if _holds_any(storage, needed) and not (keeps_own and storage.is_needed_by_weight_backward)
    )


def _gradients(before: Footprint, behind: Footprint, state: HandoverState) -> Amount:
    """Return what is held of the input gradients of the stage behind."""
    match state.behind:
        case "forward":
            return ZERO
        case "backward":
            storages = behind.sent_by_backward
        case "input backward" | "weight backward":
            storages = behind.sent_by_input_backward
    if state.before == "forward":
        needed = {name for storage in storages for name in storage.names}
    else:
        is_between = state.before == "input backward"
        gradients = before.received_gradients
        needed = {tensor.name for tensor in gradients if _is_held(tensor, is_between=is_between)}
    # The stage behind may itself hold what it returned, for its weight backward.
    holds_own = state.behind == "input backward"
    return total_size(
        storage
        for storage in storages
        if _holds_any(storage, needed) or (holds_own and storage.is_needed_by_weight_backward)
    )


def _is_held(tensor: ReceivedTensor, *, is_between: bool) -> bool:
    """Whether a stage still holds what it got once its backward, or the first half, is done."""
    return tensor.is_relayed or (is_between and tensor.is_needed_by_weight_backward)


def _holds_any(storage: MessageStorage, names: Collection[str]) -> bool:
    return any(name in names for name in storage.names)
