"""The work of a rank before and after an operation, for the lower bound on all orders."""

from __future__ import annotations

from pipecompile.schedule.instance import BACKWARD, FORWARD, ScheduleInstance

__all__ = ["RankLoads", "TaskTimes"]

TaskTimes = list[list[list[int]]]
"""Times in ns by kind, stage and microbatch."""


class RankLoads:
    """The work that a rank must do before a forward or a backward, and after it.

    All its microbatches up to the operation's own need `least_before` each, and all from its own on
    need `least_after` each. A recompute must come before its backward but may come as early as one
    likes after its forward: it counts after a forward, and not after another backward.
    """

    def __init__(self, instance: ScheduleInstance) -> None:
        self.instance, reach = instance, instance.gradient_reach
        stages_by_rank, placement = instance.stages_by_rank, instance.problem.placement
        forward, backward, weight, recompute = instance.task_ns
        self.first = [stages_by_rank[rank][0] for rank in placement]
        self.least_before: dict[int, list[int]] = {FORWARD: [], BACKWARD: []}
        self.least_after: dict[int, list[int]] = {FORWARD: [], BACKWARD: []}
        for stage, rank in enumerate(placement):
            stages = stages_by_rank[rank]
            # Stages whose backward must come before that of this one, and the other way around.
            before = [s for s in stages if stage <= s <= reach[stage]]
            after = [s for s in stages if s <= stage <= reach[s]]
            # Its rank takes a microbatch through its earlier stages first.
            self.least_before[FORWARD].append(sum(forward[s] for s in stages if s <= stage))
            # All forwards up to where its gradient comes from, and the backwards on the way back.
            self.least_before[BACKWARD].append(
                sum(forward[s] for s in stages if s <= reach[stage])
                + sum(recompute[s] + backward[s] for s in before)
            )
            self.least_after[FORWARD].append(
                sum(forward[s] + recompute[s] for s in stages if s >= stage)
                + sum(backward[s] + weight[s] for s in stages if reach[s] >= stage)
            )
            self.least_after[BACKWARD].append(sum(backward[s] + weight[s] for s in after))

    def before(self, kind: int, stage: int, microbatch: int, heads: TaskTimes) -> int:
        """Return a head: when the rank's work for all microbatches up to this one can be done.

        It begins with the first forward of the rank. Zero for other kinds than F and B.
        """
        if kind not in self.least_before:
            return 0
        first_ns = heads[FORWARD][self.first[stage]][0]
        own_ns = self.instance.task_ns[kind][stage]
        return first_ns + (microbatch + 1) * self.least_before[kind][stage] - own_ns

    def after(self, kind: int, stage: int, later: int) -> int:
        """Return a tail: what the rank must do after this operation.

        That is its work for this microbatch and the `later` ones after it. Zero for other kinds
        than F and B.
        """
        if kind not in self.least_after:
            return 0
        return (later + 1) * self.least_after[kind][stage] - self.instance.task_ns[kind][stage]
