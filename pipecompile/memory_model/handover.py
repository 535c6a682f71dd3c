"""What two neighbouring stages on one rank hold of the storages that they hand to each other.

Between them nothing is sent: each gets the other's own storages. Such a storage lives as long as
any of its holders needs it:

    an output of the stage before      the stage before, until its backward (or its input backward)
                                       is done (its `activations` count it then), or until its
                                       weight backward is done if that needs it
                                       the stage behind, until its weight backward is done
                                       a third stage of the rank that it is relayed to, until the
                                       step ends
    a gradient of the stage behind     the stage behind, until its weight backward is done
                                       the stage before, until its backward is done, or until its
                                       weight backward is done if that needs it
                                       a message that the stage before relays, until it was read and
                                       the weight backward is done

A tensor that was received from another rank, and that one stage relays to the other, lives alike:
`passed_values` and `passed_gradients` count it from the backward of the stage that received it on.
messages.py adds up what this returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import get_args

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import Footprint, MessageStorage, ReceivedTensor, total_size
from pipecompile.memory_model.snapshots import HandoverState, LastAction

__all__ = ["handed_over", "most_handed_over", "passed_gradients", "passed_values"]


def handed_over(
    before: Footprint, behind: Footprint, state: HandoverState, *, goes_on: bool
) -> Amount:
    """Return what a microbatch in this state holds of handed storages.

    What the stage `before` keeps for its own backward is not counted again. `goes_on` says that the
    stage behind hands what it relays to a third one of the rank.
    """
    return _outputs(before, behind, state, goes_on) + _gradients(before, behind, state)


def most_handed_over(before: Footprint, behind: Footprint, *, goes_on: bool) -> Amount:
    """Return the most, by bound, that a microbatch holds of handed storages in any state."""
    actions: tuple[LastAction, ...] = get_args(LastAction)
    states = [HandoverState(*each) for each in product(actions, actions, (False, True))]
    amounts = [handed_over(before, behind, state, goes_on=goes_on) for state in states]
    return max(amounts, key=lambda amount: amount.bound)


def _outputs(before: Footprint, behind: Footprint, state: HandoverState, goes_on: bool) -> Amount:
    """Return what is held of the outputs of the stage before."""
    if state.before == "forward":
        return ZERO  # they are part of its activations
    needed = _held_values(behind, state.behind, goes_on)
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
        case "backward" | "returned":
            storages = behind.sent_by_backward
        case "input backward" | "weight backward":
            storages = behind.sent_by_input_backward
    needed = _held_gradients(before, state.before)
    if state.before == "forward":
        needed = {name for storage in storages for name in storage.names}
    # The stage behind may itself hold what it returned, for its weight backward.
    holds_own = state.behind == "input backward"
    return total_size(
        storage
        for storage in storages
        if _holds_any(storage, needed) or (holds_own and storage.is_needed_by_weight_backward)
    )


def passed_values(
    before: Footprint, behind: Footprint, state: HandoverState, *, goes_on: bool
) -> Amount:
    """Return what is held of values that the stage before has received from another rank."""
    if state.before == "forward":
        return ZERO  # all that it has received counts until its backward
    needed = _held_values(behind, state.behind, goes_on)
    return _passed(before.received, needed, is_between=state.before == "input backward")


def passed_gradients(before: Footprint, behind: Footprint, state: HandoverState) -> Amount:
    """Return what is held of gradients that the stage behind has received from another rank."""
    if state.behind == "forward":
        return ZERO
    needed = _held_gradients(before, state.before)
    if state.before == "forward":
        needed = {name for tensor in behind.received_gradients for name in tensor.relayed_as}
    is_between = state.behind == "input backward"
    return _passed(behind.received_gradients, needed, is_between=is_between)


def _passed(
    tensors: Iterable[ReceivedTensor], needed: Collection[str], *, is_between: bool
) -> Amount:
    """Return the size of those that the receiving stage holds, or hands on to one that needs them.

    `is_between` says that the receiving stage is between the halves of its backward.
    """
    return total_size(
        tensor
        for tensor in tensors
        if (is_between and tensor.is_needed_by_weight_backward)
        or any(name in needed for name in tensor.relayed_as)
    )


def _held_values(stage: Footprint, last: LastAction, goes_on: bool) -> Collection[str]:
    """Return which values a stage holds once its action `last`, a backward, is done."""
    is_between = last == "input backward"
    relays = last == "forward" or goes_on
    return _held_names(stage.received, relays=relays, is_between=is_between)


def _held_gradients(stage: Footprint, last: LastAction) -> Collection[str]:
    """Return which gradients a stage holds once its action `last`, a backward, is done."""
    is_between = last == "input backward"
    return _held_names(stage.received_gradients, relays=last != "returned", is_between=is_between)


def _held_names(
    tensors: Iterable[ReceivedTensor], *, relays: bool, is_between: bool
) -> Collection[str]:
    """Return what is needed by a weight backward `is_between`, or by a message that `relays` it."""
    return {
        tensor.name
        for tensor in tensors
        if (relays and tensor.relayed_as) or (is_between and tensor.is_needed_by_weight_backward)
    }


def _holds_any(storage: MessageStorage, names: Collection[str]) -> bool:
    return any(name in names for name in storage.names)
