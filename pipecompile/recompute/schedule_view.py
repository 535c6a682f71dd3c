"""What a choice of recompute must know of the schedule, whose order may not be known yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipecompile.memory_model.snapshots import Moment

__all__ = ["ScheduleView"]


@dataclass(frozen=True)
class ScheduleView:
    """The schedule as seen by the stages of a cut.

    `placement` is the rank of each stage, `in_flight` how many microbatches each holds at most. Where a backward
    `may_split`, stages have no regions. `snapshots(stage, whole, but_last)` returns the snapshots of the rank of a
    stage; `whole` says that its stages are recomputed as a whole, `but_last` that the step's last microbatch is not.
    """

    placement: tuple[int, ...]
    in_flight: tuple[int, ...]
    may_split: bool
    snapshots: Callable[[int, bool, bool], tuple[Moment, ...]] = field(compare=False, repr=False)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return max(self.placement) + 1
