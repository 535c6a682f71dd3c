"""The recompute planner for a placement, with what it needs of the schedule. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Options
from pipecompile.memory_model.snapshots import Snapshot
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.schedule_view import ScheduleView
from pipecompile.schedule.named_orders import MAY_SPLIT, held_microbatches, weight_copies
from pipecompile.schedule.selection import in_flight_counts, representative_schedule, snapshots_of

__all__ = ["recompute_planner"]


def recompute_planner(
    graph: CostGraph, options: Options, placement: Sequence[int], *, settled: bool = False
) -> RecomputePlanner:
    """Return the planner of what the stages of `graph` recompute when they lie on these ranks."""
    return RecomputePlanner(
        graph, options, _schedule_view(options, tuple(placement)), settled=settled
    )


def _schedule_view(options: Options, placement: tuple[int, ...]) -> ScheduleView:
    name = representative_schedule(options, placement)

    def snapshots(stage: int, whole: bool, but_last: bool) -> tuple[Snapshot, ...]:
        # Found when a rank's memory is asked for;
        # `snapshots_of` remembers those of the last few orders.
        return snapshots_of(name, placement, options.microbatches, whole, but_last)[
            placement[stage]
        ]

    return ScheduleView(
        placement,
        in_flight_counts(options, placement),
        options.schedule in MAY_SPLIT,
        snapshots,
        held_microbatches(name, placement, options.microbatches),
        weight_copies(name, placement, options.microbatches),
    )
