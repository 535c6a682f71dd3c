"""What a rank holds of the messages of one stage, in a state of its microbatches.

Messages come from stages of other ranks and go there. What two stages of one rank hand to each
other is no message, but it is held alike (handover.py). holdings.py adds up what this returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import Footprint, total_size
from pipecompile.memory_model.handover import handed_over, passed_gradients, passed_values
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
        # Of most states most counts are 0.
        each = ((size, getattr(state, name)) for name, size in self._sizes.items())
        held = sum((size * count for size, count in each if count), ZERO)
        for handover, count in state.handovers.items():
            held += self._handed_over(handover) * count
        return held

    @cached_property
    def _sizes(self) -> dict[str, Amount]:
        """What a microbatch holds by field of a `StageState`."""
        stage = self.stages[self.index]
        return {
            "backward_sent": total_size(stage.sent_by_backward),
            "input_backward_sent": total_size(stage.sent_by_input_backward),
            **_values(stage),
            **_gradients(stage),
        }

    def _handed_over(self, handover: HandoverState) -> Amount:
        """Return what a microbatch in this state holds of what is handed to the next stage."""
        if handover not in self.known:
            stage, behind = self.stages[self.index], self.stages[self.index + 1]
            goes_on = self.index + 2 in self.stages
            each = handed_over(stage, behind, handover, goes_on=goes_on)
            # What came from another rank, and passes through one of the two or both.
            if self.index - 1 not in self.stages:
                each += passed_values(stage, behind, handover, goes_on=goes_on)
            if not goes_on:
                each += passed_gradients(stage, behind, handover)
            self.known[handover] = each
        return self.known[handover]


def _values(stage: Footprint) -> dict[str, Amount]:
    """Return what is held of values that were received."""
    received = stage.received
    return {
        "values_received": total_size(received),
        "values_between": total_size(t for t in received if t.is_needed_by_weight_backward),
        "values_relayed": total_size(t for t in received if t.relayed_as),
    }


def _gradients(stage: Footprint) -> dict[str, Amount]:
    """Return what is held of gradients that were received, and of those that were read and that a
    weight backward still needs.
    """
    received, sent = stage.received_gradients, stage.sent_by_input_backward
    relayed = [tensor for tensor in received if tensor.relayed_as]
    needed = [tensor for tensor in received if tensor.is_needed_by_weight_backward]
    kept = [storage for storage in sent if storage.is_needed_by_weight_backward]
    return {
        "gradients_received": total_size(received),
        "gradients_between": total_size(tensor for tensor in needed if not tensor.relayed_as),
        "gradients_relayed": total_size(relayed),
        "between_returned": total_size(kept)
        + total_size(tensor for tensor in needed if tensor.relayed_as),
    }
