"""What a rank holds of the messages of one stage, in a state of its microbatches.

Messages come from stages of other ranks and go there. What two stages of one rank hand to each
other is no message, but it is held alike (handover.py). holdings.py adds up what this returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import Footprint, ReceivedTensor, total_size
from pipecompile.memory_model.handover import (
    handed_over,
    is_held,
    passed_gradients,
    passed_values,
)
from pipecompile.memory_model.snapshots import HandoverState, StageState

__all__ = ["StageMessages"]


@dataclass(frozen=True)
class StageMessages:
    """The messages of stage `index` of a rank with `stages`: their sizes are added up once, for all
    states of its microbatches.
    """

    stages: Mapping[int, Footprint]
    index: int
    known: dict[HandoverState, Amount] = field(default_factory=dict, repr=False, compare=False)

    def held(self, state: StageState) -> Amount:
        """Return what the stage has received and sent, and what the next one holds on the same
        rank.
        """
        values = state.values_received, state.values_between, state.values_relayed
        gradients = state.gradients_received, state.gradients_between, state.gradients_relayed
        sent = state.outputs_sent, state.backward_sent, state.input_backward_sent
        counts = (*values, *gradients, *sent, *state.handovers.values())
        sizes = (*self._sizes, *map(self._handed_over, state.handovers))
        # Of most states most counts are 0.
        held = (size * count for size, count in zip(sizes, counts, strict=True) if count)
        return sum(held, ZERO)

    @cached_property
    def _sizes(self) -> tuple[Amount, ...]:
        """What a microbatch holds in each state of its messages."""
        stage = self.stages[self.index]
        return (
            *_received(stage.received),
            *_received(stage.received_gradients),
            stage.outputs,
            total_size(stage.sent_by_backward),
            total_size(stage.sent_by_input_backward),
        )

    def _handed_over(self, handover: HandoverState) -> Amount:
        """Return what a microbatch in this state holds of what is handed to the next stage."""
        if handover not in self.known:
            stage, behind = self.stages[self.index], self.stages[self.index + 1]
            each = handed_over(stage, behind, handover)
            # What came from another rank, and passes through one of the two or both.
            if self.index - 1 not in self.stages:
                each += passed_values(stage, behind, handover)
            if self.index + 2 not in self.stages:
                each += passed_gradients(stage, behind, handover)
            self.known[handover] = each
        return self.known[handover]


def _received(tensors: Sequence[ReceivedTensor]) -> tuple[Amount, Amount, Amount]:
    """Return what is held of received values, or gradients, of one microbatch.

    The message as it came; what a weight backward needs of it, between both halves; and what is
    left once it was sent on.
    """
    return (
        total_size(tensors),
        total_size(tensor for tensor in tensors if is_held(tensor, is_between=True)),
        total_size(tensor for tensor in tensors if is_held(tensor, is_between=False)),
    )
