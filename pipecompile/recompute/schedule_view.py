"""What a choice of recompute must know of the schedule, whose order may not be known yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipecompile.ir.footprint import SINGLE, WeightCopies
from pipecompile.memory_model.snapshots import Snapshot

__all__ = ["ScheduleView"]


@dataclass(frozen=True)
class ScheduleView:
    """The schedule as the stages of a cut see it.

    `placement` is the rank of each stage, `in_flight` the most microbatches that each stage holds.
    If backwards `may_split`, stages have no regions. `snapshots(stage, is_whole, spares_last)`
    returns the snapshots of the stage's rank: `is_whole` says that its stages are recomputed as a
    whole, `spares_last` that the step's last microbatch is not. Ranks have the inputs of
    `held_microbatches`, and each stage has `weight_copies`, one copy each if there are none.
    """

    placement: tuple[int, ...]
    in_flight: tuple[int, ...]
    may_split: bool
    snapshots: Callable[[int, bool, bool], tuple[Snapshot, ...]] = field(compare=False, repr=False)
    held_microbatches: int = 1
    weight_copies: tuple[WeightCopies, ...] = ()

    def copies(self, stage: int) -> WeightCopies:
        """Return how many copies of its weights a stage has."""
        return self.weight_copies[stage] if self.weight_copies else SINGLE

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.placement) + 1
