"""List scheduling: time runs forward, and each free rank takes the operation that it prefers.

A rank never starts an operation that could make it deadlock for lack of memory. Its oldest
unfinished microbatch must always be able to finish: within the cap, beside what the rank holds less
what its pending weight backwards would free, there must be room for all that this microbatch still
needs. (This is the banker's algorithm, Dijkstra, EWD 108. All ranks serve the microbatches in one
order, so the oldest of all can always go on, and the step ends.) A backward directly follows its
recompute, so that what the recompute takes is never in the way.

For example a rank with a cap of 10 holds 3 activations of 2 bytes, and a microbatch alone needs at
most 4. It may start one more forward if the oldest microbatch has begun there: of the 8 bytes then
held, 2 are its own, and 8 − 2 + 4 = 10.
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
from pipecompile.schedule.serial_order import single_microbatch_peak

__all__ = ["Priorities", "build_order", "refill_weight_backwards"]

# A rank's slack is divided evenly over the microbatches to come; a wait may take so many shares.
SHARES = 2


@dataclass(frozen=True, slots=True)
class Priorities:
    """What a free rank prefers.

    `depth[s]` is how many microbatches stage s may have between forward and backward. `prefer` says
    what goes first of a forward and a backward that can both start: "forward", "backward", or
    "turns". `deep_forward_first` and `deep_backward_first` say that among stages the deepest one
    goes first. If neither a forward nor a backward can start, a weight backward does, unless an
    input is known to arrive before `patience` of its time is over. With `yields_to_backward` a rank
    waits rather than delay its first backward by a forward, since the ranks before it wait for that
    backward too. With `waits_within_slack` a rank waits only as its slack allows: hardly if it is
    the busiest one, and else so that it does not hold the others up.
    """

    depth: tuple[int, ...]
    prefer: str = "backward"
    deep_forward_first: bool = True
    deep_backward_first: bool = False
    patience: float = 0.0
    yields_to_backward: bool = False
    waits_within_slack: bool = False


def build_order(instance: ScheduleInstance, priorities: Priorities, goal_ns: int) -> Rows | None:
    """Return the order that follows from `priorities`; None if the caps may allow no order.

    `goal_ns` is when the step should end; a rank's slack is counted up to there.
    """
    caps, builder = instance.problem.caps, _OrderBuilder(instance, priorities, goal_ns)
    if caps is not None and any(
        peak > cap for peak, cap in zip(builder.single_peaks, caps, strict=True)
    ):
        return None
    is_complete = builder.run()
    assert is_complete, "the oldest microbatch can always go on"
    return builder.rows


def refill_weight_backwards(instance: ScheduleInstance, rows: Rows) -> Rows:
    """Return the same forwards and backwards, with weight backwards placed anew.

    They run where their rank would wait, and where memory requires it.
    """
    builder = _WeightRefiller(instance, rows)
    is_complete = builder.run()
    assert is_complete, "an order that fits can be followed"
    return builder.rows


class _OrderBuilder:
    """A simulation that decides what each rank does next.

    `done[kind][stage]` counts operations, which take the microbatches in ascending order. `held`
    and `free` are each rank's bytes, and when it is free. For forwards and backwards,
    `missing[kind][stage][microbatch]` counts inputs that are not computed yet, and `arrivals` is
    when those that are will have arrived. The queue holds moments at which a rank may start an
    operation.
    """

    def __init__(
        self, instance: ScheduleInstance, priorities: Priorities, goal_ns: int = 0
    ) -> None:
        problem = instance.problem
        self.instance, self.priorities, self.goal_ns = instance, priorities, goal_ns
        self.microbatches, self.caps = problem.microbatches, problem.caps
        self.task_ns, self.task_bytes = instance.task_ns, instance.task_bytes
        self.split = instance.split
        self.users = _users(instance)
        inputs = instance.task_inputs[: BACKWARD + 1]
        self.missing = [[[len(row)] * self.microbatches for row in rows] for rows in inputs]
        self.arrivals = [[[0] * self.microbatches for _ in rows] for rows in inputs]
        self.done = [[0] * problem.stages for _ in range(4)]
        self.held, self.free = [0] * problem.ranks, [0] * problem.ranks
        self.todo_ns = [_busy_ns(instance, stages) for stages in instance.stages_by_rank]
        self.was_forward = [False] * problem.ranks
        # For each rank the stage whose recompute it has just done, so that its backward is next.
        self.recomputed: list[int | None] = [None] * problem.ranks
        self.single_peaks = [single_microbatch_peak(instance, r) for r in range(problem.ranks)]
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
        """Return whether all operations could be done."""
        while self.queue:
            now, rank = heappop(self.queue)
            # Moments may be out of date: the rank has started something since.
            # They are never taken out of the queue: to find them would cost more than to skip them.
            if self.free[rank] <= now:
                choice = self.choose(rank, now)
                if choice is not None:
                    self._perform(*choice, rank, now)
        return all(
            self.done[kind][stage] == self.microbatches
            for stage, kinds in enumerate(self.instance.kinds)
            for kind in kinds
        )

    def _perform(self, kind: int, stage: int, rank: int, now: int) -> None:
        """Do the next microbatch of a task at time `now`, and note who may go on when."""
        microbatch = self.done[kind][stage]
        self.done[kind][stage] += 1
        end = self.free[rank] = now + self.task_ns[kind][stage]
        self.todo_ns[rank] -= self.task_ns[kind][stage]
        self.held[rank] += self.task_bytes[kind][stage]
        self.rows[rank].append(self.instance.operation(kind, stage, microbatch))
        # The rank chooses next when it is free, and users when their last input arrives.
        heappush(self.queue, (end, rank))
        self.recomputed[rank] = stage if kind == RECOMPUTE else None
        if kind > BACKWARD:
            return  # only the rank itself waits for a weight backward or a recompute
        self.was_forward[rank] = kind == FORWARD
        for user_kind, user, transfer_ns, user_rank in self.users[kind][stage]:
            missing, arrivals = self.missing[user_kind][user], self.arrivals[user_kind][user]
            missing[microbatch] -= 1
            arrivals[microbatch] = max(arrivals[microbatch], end + transfer_ns)
            if not missing[microbatch]:
                heappush(self.queue, (arrivals[microbatch], user_rank))

    def choose(self, rank: int, now: int) -> tuple[int, int] | None:
        """Return kind and stage of the operation that a rank starts now; None if it waits."""
        recomputed = self.recomputed[rank]
        if recomputed is not None:
            return BACKWARD, recomputed
        backward, next_backward = self._backward(rank, now)
        forward, next_forward, is_blocked = self._forward(rank, now)
        # Where both could start, the priorities decide.
        if backward is not None and (forward is None or self._prefers_backward(rank)):
            return self._with_recompute(rank, backward, now)
        if forward is None:
            return self._weight(rank, now, _earlier(next_backward, next_forward), is_blocked)
        if self._yields(rank, forward, now, next_backward):
            return None
        return FORWARD, forward

    def _backward(self, rank: int, now: int) -> tuple[int | None, int | None]:
        """Return a stage whose backward can start; if there is none, when one is known to."""
        forwards, done, next_ns = self.done[FORWARD], self.done[BACKWARD], None
        for stage in self.backwards[rank]:
            microbatch = done[stage]
            if microbatch < forwards[stage] and not self.missing[BACKWARD][stage][microbatch]:
                arrival = self.arrivals[BACKWARD][stage][microbatch]
                if arrival <= now:
                    return stage, None
                next_ns = _earlier(next_ns, arrival)
        return None, next_ns

    def _forward(self, rank: int, now: int) -> tuple[int | None, int | None, bool]:
        """Return a stage whose forward can start.

        If there is none, also when one is known to, and whether only memory forbids one now.
        """
        done, next_ns, is_blocked = self.done[FORWARD], None, False
        for stage in self.forwards[rank]:
            microbatch = done[stage]
            in_flight = microbatch - self.done[BACKWARD][stage]
            # The stage is done, or as far ahead as it may be.
            if microbatch == self.microbatches or in_flight >= self.priorities.depth[stage]:
                continue
            if self.missing[FORWARD][stage][microbatch]:
                continue
            arrival = self.arrivals[FORWARD][stage][microbatch]
            if arrival > now:
                next_ns = _earlier(next_ns, arrival)
            elif self._is_safe(rank, stage):
                return stage, None, False
            else:
                is_blocked = True
        return None, next_ns, is_blocked

    def _prefers_backward(self, rank: int) -> bool:
        prefer = self.priorities.prefer
        return prefer == "backward" or (prefer == "turns" and self.was_forward[rank])

    def _with_recompute(self, rank: int, stage: int, now: int) -> tuple[int, int] | None:
        """Return the backward, its recompute, or a weight backward that makes room for that."""
        if not self.instance.problem.recompute[stage]:
            return BACKWARD, stage
        if self._has_room(rank, self.task_bytes[RECOMPUTE][stage]):
            return RECOMPUTE, stage
        return self._weight(rank, now, None, True)

    def _has_room(self, rank: int, size: int) -> bool:
        return self.caps is None or self.held[rank] + size <= self.caps[rank]

    def _yields(self, rank: int, stage: int, now: int, next_backward: int | None) -> bool:
        """Return whether this forward would delay the rank's first backward, which is known."""
        if not self.priorities.yields_to_backward or next_backward is None:
            return False
        # Only the first backward counts: later ones have others to fill the pipeline.
        if self.done[BACKWARD][self.instance.stages_by_rank[rank][-1]]:
            return False
        # A forward of 4 ns at time 10 with a gradient due at 12: the
        # rank idles for 2 ns, and the ranks before it get their first
        # gradient 2 ns earlier, with which their own backwards begin.
        return next_backward - now < self.task_ns[FORWARD][stage]

    def _weight(
        self, rank: int, now: int, next_ns: int | None, is_blocked: bool
    ) -> tuple[int, int] | None:
        """Return the weight backward of the stage with the most pending, if there is time for it.

        `next_ns` is when an input is known to arrive; with `is_blocked` memory must be freed.
        """
        done, pending = self.done, []
        for stage in self.instance.stages_by_rank[rank]:
            if self.split[stage] and done[WEIGHT][stage] < done[BACKWARD][stage]:
                pending.append((done[BACKWARD][stage] - done[WEIGHT][stage], -stage))
        if not pending:
            return None
        # Of equal ones the first stage goes first.
        stage = -max(pending)[1]
        if is_blocked or next_ns is None or not self._waits(rank, stage, now, next_ns):
            return WEIGHT, stage
        return None

    def _waits(self, rank: int, stage: int, now: int, next_ns: int) -> bool:
        """Return whether a rank idles until `next_ns` rather than start a weight backward."""
        # The wait is longer than the patience for it: the weight backward starts.
        if next_ns - now >= self.priorities.patience * self.task_ns[WEIGHT][stage]:
            return False
        if not self.priorities.waits_within_slack:
            return True
        backwards = self.done[BACKWARD]
        to_come = self.microbatches - min(
            backwards[other] for other in self.instance.stages_by_rank[rank]
        )
        # The time until the goal in which the rank has nothing to do.
        # A wait of 1 ns with 10 microbatches to come, if there is one
        # before each of them, takes 10 ns: with a slack of 8 ns that is
        # allowed, as up to two shares of it are, and with 4 ns it is not.
        slack_ns = self.goal_ns - now - self.todo_ns[rank]
        return (next_ns - now) * to_come <= SHARES * slack_ns

    def _is_safe(self, rank: int, stage: int) -> bool:
        """Return whether one more forward leaves room for the oldest microbatch to finish.

        The module's docstring has an example.
        """
        if self.caps is None:
            return True
        kept, stages = self.task_bytes[FORWARD], self.instance.stages_by_rank[rank]
        held, cap = self.held[rank] + kept[stage], self.caps[rank]
        if held > cap:
            return False
        forwards, backwards = self.done[FORWARD], self.done[BACKWARD]
        oldest = min(backwards[other] for other in stages)
        # What is held of the oldest microbatch already is part of its peak, and not counted twice.
        of_oldest = sum(
            kept[other] for other in stages if forwards[other] > oldest == backwards[other]
        )
        if forwards[stage] == oldest:
            of_oldest += kept[stage]
        # Pending weight backwards wait for nothing, so what they free can be had at any moment.
        freed = self._pending_weight_bytes(stages)
        return held - freed - of_oldest + self.single_peaks[rank] <= cap

    def _pending_weight_bytes(self, stages: tuple[int, ...]) -> int:
        """Return the bytes that weight backwards free whose input backwards are done."""
        backward, weight, change = self.done[BACKWARD], self.done[WEIGHT], self.task_bytes[WEIGHT]
        return sum((weight[s] - backward[s]) * change[s] for s in stages if self.split[s])


class _WeightRefiller(_OrderBuilder):
    """Follows an order in all but its weight backwards."""

    def __init__(self, instance: ScheduleInstance, rows: Rows) -> None:
        problem = instance.problem
        super().__init__(instance, Priorities((problem.microbatches,) * problem.stages))
        self.script = [
            [operation for operation in row if instance.decode(operation)[0] != WEIGHT]
            for row in rows
        ]
        self.heads = [0] * len(rows)

    def choose(self, rank: int, now: int) -> tuple[int, int] | None:
        """Return the next operation of the order if it can start, else a weight backward."""
        if self.heads[rank] == len(self.script[rank]):
            return self._weight(rank, now, None, False)
        kind, stage, microbatch = self.instance.decode(self.script[rank][self.heads[rank]])
        arrival = self._arrival(kind, stage, microbatch)
        has_room = self._has_room(rank, self.task_bytes[kind][stage])
        if arrival is not None and arrival <= now and has_room:
            self.heads[rank] += 1
            return kind, stage
        return self._weight(rank, now, arrival, not has_room)

    def _arrival(self, kind: int, stage: int, microbatch: int) -> int | None:
        """Return when all inputs of an operation have arrived; None if that is not known yet."""
        if kind > BACKWARD:
            return 0
        if self.missing[kind][stage][microbatch]:
            return None
        return self.arrivals[kind][stage][microbatch]


def _busy_ns(instance: ScheduleInstance, stages: tuple[int, ...]) -> int:
    """Return how long these stages compute in a step."""
    once_ns = sum(times[stage] for times in instance.task_ns for stage in stages)
    return instance.problem.microbatches * once_ns


def _earlier(first: int | None, second: int | None) -> int | None:
    """Return the earlier of two times, either of which may be unknown."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


Users = list[list[list[tuple[int, int, int, int]]]]


def _users(instance: ScheduleInstance) -> Users:
    """Return by kind (forward, backward) and stage what waits for it in other stages.

    Each is a kind, a stage, the time of the message in ns, and the stage's rank.
    """
    problem = instance.problem
    users: Users = [[[] for _ in range(problem.stages)] for _ in range(2)]
    for kind, by_stage in enumerate(instance.task_inputs[: BACKWARD + 1]):
        for stage, inputs in enumerate(by_stage):
            for source_kind, source, transfer_ns in inputs:
                rank = problem.placement[stage]
                users[source_kind][source].append((kind, stage, transfer_ns, rank))
    return users
