"""List scheduling: time runs forward, and each rank that is free takes what a policy likes best.

A rank never starts what could leave it stuck. Its oldest unfinished microbatch must always be able to finish: with
what is held, less what weight gradients at hand would free, there must be room for all that this microbatch still
needs. (The banker's algorithm, Dijkstra, EWD 108; microbatches are served in one order on all ranks, so the oldest of
all can always go on, and the step ends.) A recompute is followed by its backward, so what it takes is never in the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from pipecompile.schedule.instance import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    WEIGHT,
    Rows,
    ScheduleInstance,
)

__all__ = [
    "Priorities",
    "build_order",
    "refill_weight_gradients",
    "single_microbatch_peak",
    "serial_order",
]

SHARES = (
    2  # of a rank's slack, divided evenly over the microbatches to come, that one wait may take
)


@dataclass(frozen=True, slots=True)
class Priorities:
    """What a free rank prefers.

    `depth[s]` is how many microbatches stage s may have between forward and backward. Among forwards and backwards
    that could start: backwards first, or forwards, or in turns. Among stages: deep ones first or the others. With
    nothing to start, a weight gradient runs unless something is known to arrive before `patience` of it is over.
    A courteous rank rather waits than delays its first backward by a forward: the ranks before wait for it too.
    A thrifty rank waits only as its slack allows: the busiest hardly, the others so that they do not hold it up.
    """

    depth: tuple[int, ...]
    prefer: str = "backward"
    deep_forward_first: bool = True
    deep_backward_first: bool = False
    patience: float = 0.0
    yields_to_backward: bool = False
    waits_within_slack: bool = False


def build_order(instance: ScheduleInstance, priorities: Priorities, goal_ns: int) -> Rows | None:
    """The order that `policy` makes; None if the caps may not let even one microbatch through in any order.

    What a rank has to spare is counted up to `goal_ns`, when the step should end.
    """
    caps, builder = instance.problem.caps, _Builder(instance, priorities, goal_ns)
    if caps is not None and any(
        need > cap for need, cap in zip(builder.reserves, caps, strict=True)
    ):
        return None
    assert builder.run(), "the oldest microbatch can always go on"
    return builder.rows


def refill_weight_gradients(instance: ScheduleInstance, rows: Rows) -> Rows:
    """The same forwards and backwards, with weight gradients where ranks would wait, or memory asks for them."""
    builder = _Refill(instance, rows)
    assert builder.run(), "an order that fits can be followed"
    return builder.rows


class _Builder:
    """A step in the making: per kind and stage how many are done, per rank the bytes held and when it is free."""

    def __init__(
        self, instance: ScheduleInstance, priorities: Priorities, goal_ns: int = 0
    ) -> None:
        problem = instance.problem
        self.instance, self.priorities, self.goal_ns = instance, priorities, goal_ns
        self.microbatches, self.caps = problem.microbatches, problem.caps
        self.task_ns, self.task_bytes, self.split = (
            instance.task_ns,
            instance.task_bytes,
            instance.split,
        )
        self.users = _users(instance)
        self.missing = [
            [[len(w)] * self.microbatches for w in lanes] for lanes in instance.task_inputs[:2]
        ]
        self.arrivals = [
            [[0] * self.microbatches for _ in lanes] for lanes in instance.task_inputs[:2]
        ]
        self.done = [[0] * problem.stages for _ in range(4)]
        self.held, self.free = [0] * problem.ranks, [0] * problem.ranks
        self.todo_ns = [_work(instance, stages) for stages in instance.stages_by_rank]
        self.forwarded = [False] * problem.ranks
        self.due: list[int | None] = [
            None
        ] * problem.ranks  # the stage whose backward follows its recompute
        self.reserves = [single_microbatch_peak(instance, rank) for rank in range(problem.ranks)]
        self.forwards = [
            sorted(stages, reverse=priorities.deep_forward_first)
            for stages in instance.stages_by_rank
        ]
        self.backwards = [
            sorted(stages, reverse=priorities.deep_backward_first)
            for stages in instance.stages_by_rank
        ]
        self.rows: Rows = [[] for _ in range(problem.ranks)]
        self.queue = [(0, rank) for rank in range(problem.ranks)]

    def run(self) -> bool:
        """Whether all could be done."""
        while self.queue:
            now, rank = heappop(self.queue)
            if self.free[rank] <= now:
                choice = self.choose(rank, now)
                if choice is not None:
                    self._perform(*choice, rank, now)
        kinds = self.instance.kinds
        return all(
            self.done[kind][s] == self.microbatches for s, own in enumerate(kinds) for kind in own
        )

    def _perform(self, kind: int, stage: int, rank: int, now: int) -> None:
        microbatch = self.done[kind][stage]
        self.done[kind][stage] += 1
        end = self.free[rank] = now + self.task_ns[kind][stage]
        self.todo_ns[rank] -= self.task_ns[kind][stage]
        self.held[rank] += self.task_bytes[kind][stage]
        self.rows[rank].append(self.instance.operation(kind, stage, microbatch))
        heappush(self.queue, (end, rank))
        self.due[rank] = stage if kind == RECOMPUTE else None
        if kind > BACKWARD:
            return
        self.forwarded[rank] = kind == FORWARD
        for user_kind, user, hop, user_rank in self.users[kind][stage]:
            missing, arrivals = self.missing[user_kind][user], self.arrivals[user_kind][user]
            missing[microbatch] -= 1
            arrivals[microbatch] = max(arrivals[microbatch], end + hop)
            if not missing[microbatch]:
                heappush(self.queue, (arrivals[microbatch], user_rank))

    def choose(self, rank: int, now: int) -> tuple[int, int] | None:
        """The kind and the stage of what `rank` starts now, None if it waits."""
        due = self.due[rank]
        if due is not None:
            return BACKWARD, due
        backward, coming = self._backward(rank, now)
        forward, next_forward, blocked = self._forward(rank, now)
        if backward is not None and (forward is None or self._prefers_backward(rank)):
            return self._with_recompute(rank, backward, now)
        if forward is not None:
            return None if self._yields(rank, forward, now, coming) else (FORWARD, forward)
        return self._weight(rank, now, _sooner(coming, next_forward), blocked)

    def _backward(self, rank: int, now: int) -> tuple[int | None, int | None]:
        """A stage whose backward could start; if there is none, when the next is known to be."""
        forwarded, done, coming = self.done[FORWARD], self.done[BACKWARD], None
        for stage in self.backwards[rank]:
            microbatch = done[stage]
            if microbatch < forwarded[stage] and not self.missing[BACKWARD][stage][microbatch]:
                arrival = self.arrivals[BACKWARD][stage][microbatch]
                if arrival <= now:
                    return stage, None
                coming = _sooner(coming, arrival)
        return None, coming

    def _forward(self, rank: int, now: int) -> tuple[int | None, int | None, bool]:
        """A stage whose forward could start; or when one will be there; and whether memory alone forbids one."""
        done, depth, coming, blocked = self.done[FORWARD], self.priorities.depth, None, False
        for stage in self.forwards[rank]:
            microbatch = done[stage]
            if (
                microbatch == self.microbatches
                or microbatch - self.done[BACKWARD][stage] >= depth[stage]
            ):
                continue
            if self.missing[FORWARD][stage][microbatch]:
                continue
            arrival = self.arrivals[FORWARD][stage][microbatch]
            if arrival > now:
                coming = _sooner(coming, arrival)
            elif self._safe(rank, stage):
                return stage, None, False
            else:
                blocked = True
        return None, coming, blocked

    def _prefers_backward(self, rank: int) -> bool:
        prefer = self.priorities.prefer
        return prefer == "backward" or (prefer == "turns" and self.forwarded[rank])

    def _with_recompute(self, rank: int, stage: int, now: int) -> tuple[int, int] | None:
        """The backward, its recompute, or the weight gradients that make room for that."""
        if not self.instance.problem.recompute[stage]:
            return BACKWARD, stage
        room = (
            self.caps is None
            or self.held[rank] + self.task_bytes[RECOMPUTE][stage] <= self.caps[rank]
        )
        return (RECOMPUTE, stage) if room else self._weight(rank, now, None, True)

    def _yields(self, rank: int, stage: int, now: int, coming: int | None) -> bool:
        """Whether this forward would delay the first backward of its rank, which is known to come."""
        if (
            not self.priorities.yields_to_backward
            or coming is None
            or self.done[BACKWARD][self.instance.stages_by_rank[rank][-1]]
        ):
            return False
        return coming - now < self.task_ns[FORWARD][stage]

    def _weight(
        self, rank: int, now: int, coming: int | None, blocked: bool
    ) -> tuple[int, int] | None:
        """The weight gradients of the stage that has most of them pending, if there is time for them."""
        done, pending = self.done, []
        for stage in self.instance.stages_by_rank[rank]:
            if self.split[stage] and done[WEIGHT][stage] < done[BACKWARD][stage]:
                pending.append((done[BACKWARD][stage] - done[WEIGHT][stage], -stage))
        if not pending:
            return None
        stage = -max(pending)[1]
        if blocked or coming is None or not self._waits(rank, stage, now, coming):
            return WEIGHT, stage
        return None

    def _waits(self, rank: int, stage: int, now: int, coming: int) -> bool:
        """Whether a weight gradient would delay what is coming, and the rank may idle until then."""
        if coming - now >= self.priorities.patience * self.task_ns[WEIGHT][stage]:
            return False
        if not self.priorities.waits_within_slack:
            return True
        waits = self.microbatches - min(
            self.done[BACKWARD][s] for s in self.instance.stages_by_rank[rank]
        )
        return (coming - now) * waits <= SHARES * (self.goal_ns - now - self.todo_ns[rank])

    def _safe(self, rank: int, stage: int) -> bool:
        """Whether there is room for one more forward of `stage`, and for the oldest microbatch besides."""
        if self.caps is None:
            return True
        kept, stages = self.task_bytes[FORWARD], self.instance.stages_by_rank[rank]
        held, cap = self.held[rank] + kept[stage], self.caps[rank]
        if held > cap:
            return False
        forwarded, done = self.done[FORWARD], self.done[BACKWARD]
        oldest = min(done[s] for s in stages)
        own = sum(kept[s] for s in stages if forwarded[s] > oldest == done[s])
        if forwarded[stage] == oldest:
            own += kept[stage]
        return held - self._reclaimable(stages) - own + self.reserves[rank] <= cap

    def _reclaimable(self, stages: tuple[int, ...]) -> int:
        backward, weight, freed = self.done[BACKWARD], self.done[WEIGHT], self.task_bytes[WEIGHT]
        return sum((weight[s] - backward[s]) * freed[s] for s in stages if self.split[s])


class _Refill(_Builder):
    """Follows an order, but for its weight gradients."""

    def __init__(self, instance: ScheduleInstance, rows: Rows) -> None:
        super().__init__(
            instance, Priorities((instance.problem.microbatches,) * instance.problem.stages)
        )
        self.script = [[o for o in row if instance.decode(o)[0] != WEIGHT] for row in rows]
        self.heads = [0] * len(rows)

    def choose(self, rank: int, now: int) -> tuple[int, int] | None:
        if self.heads[rank] == len(self.script[rank]):
            return self._weight(rank, now, None, False)
        kind, stage, microbatch = self.instance.decode(self.script[rank][self.heads[rank]])
        arrival = self._arrival(kind, stage, microbatch)
        room = (
            self.caps is None or self.held[rank] + self.task_bytes[kind][stage] <= self.caps[rank]
        )
        if arrival is not None and arrival <= now and room:
            self.heads[rank] += 1
            return kind, stage
        return self._weight(rank, now, arrival, not room)

    def _arrival(self, kind: int, stage: int, microbatch: int) -> int | None:
        if kind > BACKWARD:
            return 0
        return (
            None
            if self.missing[kind][stage][microbatch]
            else self.arrivals[kind][stage][microbatch]
        )


def _work(instance: ScheduleInstance, stages: tuple[int, ...]) -> int:
    """How long these stages compute in a step."""
    return instance.problem.microbatches * sum(
        lane[stage] for lane in instance.task_ns for stage in stages
    )


def single_microbatch_peak(instance: ScheduleInstance, rank: int) -> int:
    """The most that one microbatch alone comes to hold on a rank, in whatever order it is done, in bytes.

    As a stage recomputes, all others of the rank may be held but those whose backwards come before.
    """
    kept, again, gradient_reach = (
        instance.task_bytes[FORWARD],
        instance.task_bytes[RECOMPUTE],
        instance.gradient_reach,
    )
    held = instance.stages_by_rank[rank]
    return max(
        (again[s] + sum(kept[t] for t in held if not s < t <= gradient_reach[s]) for s in held),
        default=0,
    )


def serial_order(instance: ScheduleInstance) -> Rows | None:
    """One microbatch after the other, in the order that holds least; None if no order at all fits."""
    steps = _alone(instance)
    if steps is None:
        return None
    rows: Rows = [[] for _ in instance.stages_by_rank]
    for microbatch in range(instance.problem.microbatches):
        for kind, stage in steps:
            rows[instance.problem.placement[stage]].append(
                instance.operation(kind, stage, microbatch)
            )
    return rows


def _alone(instance: ScheduleInstance) -> list[tuple[int, int]] | None:
    """Kinds and stages of one microbatch: every backward as soon as there is room for its recompute.

    With that and its weight gradients it leaves less than it found, so no order can need it to be later.
    """
    problem, held, steps = instance.problem, [0] * instance.problem.ranks, list[tuple[int, int]]()
    stages, forward, todo = problem.stages, 0, set(range(problem.stages))

    def fits(kind: int, stage: int) -> bool:
        rank = problem.placement[stage]
        return (
            problem.caps is None
            or held[rank] + instance.task_bytes[kind][stage] <= problem.caps[rank]
        )

    def ready(stage: int) -> bool:
        waits = instance.task_inputs[BACKWARD][stage]
        return (
            stage in todo
            and not any(source in todo for _, source, _ in waits)
            and fits(RECOMPUTE, stage)
        )

    while todo:
        stage = next(filter(ready, reversed(range(forward))), None)
        if stage is None and (forward == stages or not fits(FORWARD, forward)):
            return None
        if stage is None:
            stage, kinds, forward = forward, instance.kinds[forward][:1], forward + 1
        else:
            todo.remove(stage)
            kinds = instance.kinds[stage][1:]
        held[problem.placement[stage]] += sum(instance.task_bytes[kind][stage] for kind in kinds)
        steps += [(kind, stage) for kind in kinds]
    return steps


def _sooner(first: int | None, second: int | None) -> int | None:
    """The earlier of two times that may not be known."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


Users = list[list[list[tuple[int, int, int, int]]]]


def _users(instance: ScheduleInstance) -> Users:
    """Per kind (forward, backward) and stage who waits for it: kind, stage, time of the message, rank."""
    problem = instance.problem
    users: Users = [[[] for _ in range(problem.stages)] for _ in range(2)]
    for kind, lanes in enumerate(instance.task_inputs[:2]):
        for stage, waits in enumerate(lanes):
            for source_kind, source, hop in waits:
                users[source_kind][source].append((kind, stage, hop, problem.placement[stage]))
    return users
