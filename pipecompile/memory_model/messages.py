"""What a rank holds of the messages of one stage, in a state of its microbatches.

Messages come from stages of other ranks and go there. What two stages of one rank hand to each
other is no message, but it is held alike (handover.py). rank.py adds up what this returns.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipecompile.ir.amount import Amount
from pipecompile.ir.footprint import Footprint, total_size
from pipecompile.memory_model.handover import handed_over, passed_gradients, passed_values
from pipecompile.memory_model.snapshots import StageState

__all__ = ["held_messages"]


def held_messages(stages: Mapping[int, Footprint], index: int, state: StageState) -> Amount:
    """Return what a stage has received and sent, and what the next one holds on the same rank."""
    stage = stages[index]
    held = (
        _values(stage, state)
        + _gradients(stage, state)
        + total_size(stage.sent_by_backward) * state.backward_sent
        + total_size(stage.sent_by_input_backward) * state.input_backward_sent
    )
    for handover, count in state.handovers.items():
        behind = stages[index + 1]
        goes_on = index + 2 in stages
        each = handed_over(stage, behind, handover, goes_on=goes_on)
        # What came from another rank, and passes through one of the two or both.
        if index - 1 not in stages:
            each += passed_values(stage, behind, handover, goes_on=goes_on)
        if index + 2 not in stages:
            each += passed_gradients(stage, behind, handover)
        held += each * count
    return held


def _values(stage: Footprint, state: StageState) -> Amount:
    """Return what is held of values that were received."""
    needed = (tensor for tensor in stage.received if tensor.is_needed_by_weight_backward)
    relayed = (tensor for tensor in stage.received if tensor.relayed_as)
    return (
        total_size(stage.received) * state.values_received
        + total_size(needed) * state.values_between
        + total_size(relayed) * state.values_relayed
    )


def _gradients(stage: Footprint, state: StageState) -> Amount:
    """Return what is held of gradients that were received, and of those that were read and that a
    weight backward still needs.
    """
    received, sent = stage.received_gradients, stage.sent_by_input_backward
    relayed = [tensor for tensor in received if tensor.relayed_as]
    needed = [tensor for tensor in received if tensor.is_needed_by_weight_backward]
    kept = total_size(storage for storage in sent if storage.is_needed_by_weight_backward)
    return (
        total_size(received) * state.gradients_received
        + total_size(tensor for tensor in needed if not tensor.relayed_as) * state.gradients_between
        + total_size(relayed) * state.gradients_relayed
        + total_size(tensor for tensor in needed if tensor.relayed_as) * state.between_returned
        + kept * state.between_returned
    )
