"""What a rank holds of the messages of one stage, in a state of its microbatches.

Messages come from stages of other ranks and go there. What two stages of one rank hand to each
other is no message, but it is held alike (handover.py). rank.py adds up what this returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipecompile.ir.amount import Amount
from pipecompile.ir.footprint import Footprint, ReceivedTensor, total_size
from pipecompile.memory_model.handover import (
    handed_over,
    is_held,
    passed_gradients,
    passed_values,
)
from pipecompile.memory_model.snapshots import StageState

__all__ = ["held_messages"]


def held_messages(stages: Mapping[int, Footprint], index: int, state: StageState) -> Amount:
    """Return what a stage has received and sent, and what the next one holds on the same rank."""
    stage = stages[index]
    held = (
        _received(stage.received, state.values_received, state.values_between, state.values_relayed)
        + _received(
            stage.received_gradients,
            state.gradients_received,
            state.gradients_between,
            state.gradients_relayed,
        )
        + stage.outputs * state.outputs_sent
        + total_size(stage.sent_by_backward) * state.backward_sent
        + total_size(stage.sent_by_input_backward) * state.input_backward_sent
    )
    for handover, count in state.handovers.items():
        behind = stages[index + 1]
        each = handed_over(stage, behind, handover)
        # What came from another rank, and passes through one of the two or both.
        if index - 1 not in stages:
            each += passed_values(stage, behind, handover)
        if index + 2 not in stages:
            each += passed_gradients(stage, behind, handover)
        held += each * count
    return held


def _received(tensors: Sequence[ReceivedTensor], whole: int, between: int, relayed: int) -> Amount:
    """Return what is held of received values, or gradients, of so many microbatches.

    `whole` messages are held as they came; of `between` ones what a weight backward needs is left,
    and of `relayed` ones what was sent on.
    """
    return (
        total_size(tensors) * whole
        + total_size(tensor for tensor in tensors if is_held(tensor, is_between=True)) * between
        + total_size(tensor for tensor in tensors if is_held(tensor, is_between=False)) * relayed
    )
