"""List scheduling: time runs forward, and each rank that is free takes what a policy likes best.

A rank never starts what could leave it stuck. Its oldest unfinished microbatch must always be able to finish: with
what is held, less what weight gradients at hand would free, there must be room for all that this microbatch still
needs. (The banker's algorithm, Dijkstra, EWD 108; microbatches are served in one order on all ranks, so the oldest of
all can always go on, and the step ends.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import product

from pipecompile.schedule.instance import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Instance, Rows

__all__ = ["Policy", "build", "policies"]

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Policy:
    """What a free rank prefers.

    `depth[s]` is how many microbatches stage s may have between forward and backward. Among forwards and backwards
    that could start: backwards first, or forwards, or in turns. Among stages: deep ones first or the others. With
    nothing to start, a weight gradient runs unless something is known to arrive before `patience` of it is over.
    """

    depth: tuple[int, ...]
    prefer: str = "backward"
    deep_forward: bool = True
    deep_backward: bool = False
    patience: float = 0.0
    courteous: bool = False


def policies(instance: Instance) -> Iterator[Policy]:
    """A few that differ in kind; each is the best of all on some problem."""
    for depth in _depths(instance):
        for prefer, patience in product(("backward", "turns", "forward"), (0.0, 0.5, 1.0)):
            yield Policy(depth, prefer, patience=patience)
    if instance.problem.stages > instance.problem.ranks:
        for depth in _depths(instance):
            for deep_forward, deep_backward in ((True, True), (False, False), (False, True)):
                for prefer in ("backward", "turns", "forward"):
                    yield Policy(depth, prefer, deep_forward, deep_backward)


def _depths(instance: Instance) -> Iterator[tuple[int, ...]]:
    """As deep as one likes; what 1F1B has; and what the time from a forward to its backward calls for."""
    problem = instance.problem
    yield (problem.microbatches,) * problem.stages
    yield tuple(problem.stages - s for s in range(problem.stages))
    yield tuple(2 * (problem.stages - s) - 1 for s in range(problem.stages))
    yield tuple(_round_trips(instance))


def _round_trips(instance: Instance) -> Iterator[int]:
    """How many microbatches the slowest rank starts while one goes from a stage to the end and back."""
    forward, backward = instance.lane_ns[FORWARD], instance.lane_ns[BACKWARD]
    problem = instance.problem
    loads = [sum(sum(lane[s] for lane in instance.lane_ns) for s in stages) for stages in instance.stages_of]
    for stage in range(problem.stages):
        hops = sum(problem.forward_hops[stage:]) + sum(problem.backward_hops[stage:])
        trip = sum(forward[stage:]) + sum(backward[stage:]) + hops
        yield 1 + -(-trip // max(max(loads), 1))


def build(instance: Instance, policy: Policy) -> Rows | None:
    """The order that `policy` makes; None if the caps leave no room for even one microbatch."""
    builder = _Builder(instance, policy)
    return builder.rows if builder.run() else None


class _Builder:
    """A step in the making. Per stage: how many of each kind are done; per rank: the bytes held."""

    def __init__(self, instance: Instance, policy: Policy) -> None:
        problem = instance.problem
        self.policy = policy
        self.count = problem.microbatches
        self.placement, self.stages_of = problem.placement, instance.stages_of
        self.lane_ns, self.lane_bytes = instance.lane_ns, instance.lane_bytes
        self.split = instance.split
        self.recompute = problem.recompute
        self.lane_base = [[instance.operation(k, s, 0) for s in range(problem.stages)] for k in range(4)]
        self.users = _users(instance)
        self.missing = [[len(waits)] * self.count for lanes in instance.lane_sources[:2] for waits in lanes]
        self.arrivals = [[0] * self.count for _ in range(2 * problem.stages)]
        self.done = [[0] * problem.stages for _ in range(4)]
        self.free = [0] * problem.ranks
        self.held = [0] * problem.ranks
        self.caps = problem.caps
        self.needs = [self._reserve(stages) for stages in self.stages_of]
        self.forwarded = [False] * problem.ranks
        self.rows: Rows = [[] for _ in range(problem.ranks)]
        self.orders = [
            (tuple(sorted(stages, reverse=policy.deep_forward)), tuple(sorted(stages, reverse=policy.deep_backward)))
            for stages in self.stages_of
        ]

    def _reserve(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """What a microbatch may come to hold on a rank after 0, 1, … of its forwards there: the most from then on."""
        kept, again = self.lane_bytes[FORWARD], self.lane_bytes[RECOMPUTE]
        least, below = 0, 0
        for stage in stages:
            below += kept[stage]
            least = max(least, below + again[stage])
        return (max(least, below),)

    def run(self) -> bool:
        if self.caps is not None and any(need[0] > cap for need, cap in zip(self.needs, self.caps, strict=True)):
            return False
        queue = [(0, rank) for rank in range(len(self.rows))]
        heapify(queue)
        while queue:
            now, rank = heappop(queue)
            if self.free[rank] > now:
                continue
            lane = self._choose(rank, now)
            if lane is not None:
                self._perform(*lane, rank, now, queue)
        return all(done == self.count for done in self.done[BACKWARD]) and all(
            done == self.count for done, split in zip(self.done[WEIGHT], self.split, strict=True) if split
        )

    def _perform(self, kind: int, stage: int, rank: int, now: int, queue: list[tuple[int, int]]) -> None:
        microbatch = self.done[kind][stage]
        self.done[kind][stage] += 1
        end = now + self.lane_ns[kind][stage]
        self.free[rank] = end
        self.held[rank] += self.lane_bytes[kind][stage]
        self.rows[rank].append(self.lane_base[kind][stage] + microbatch)
        heappush(queue, (end, rank))
        if kind in (FORWARD, BACKWARD):
            self.forwarded[rank] = kind == FORWARD
            for lane, user, hop in self.users[kind][stage]:
                self.missing[lane][microbatch] -= 1
                if end + hop > self.arrivals[lane][microbatch]:
                    self.arrivals[lane][microbatch] = end + hop
                if not self.missing[lane][microbatch]:
                    heappush(queue, (self.arrivals[lane][microbatch], user))

    def _choose(self, rank: int, now: int) -> tuple[int, int] | None:
        backward, forward, soon, blocked = self._available(rank, now)
        if backward is not None and (forward is None or self._prefers_backward(rank)):
            return self._backward(backward)
        if forward is not None:
            return None if self._yields(rank, forward, now) else (FORWARD, forward)
        return self._weight(rank, now, soon, blocked)

    def _yields(self, rank: int, stage: int, now: int) -> bool:
        """Whether this forward would delay the first backward of its rank, which is known to come."""
        if not self.policy.courteous or self.coming == UNKNOWN or self.done[BACKWARD][self.stages_of[rank][-1]]:
            return False
        return self.coming - now < self.lane_ns[FORWARD][stage]

    def _prefers_backward(self, rank: int) -> bool:
        prefer = self.policy.prefer
        return prefer == "backward" or (prefer == "turns" and self.forwarded[rank])

    def _backward(self, stage: int) -> tuple[int, int]:
        again = self.recompute[stage] and self.done[RECOMPUTE][stage] == self.done[BACKWARD][stage]
        return (RECOMPUTE if again else BACKWARD), stage

    def _available(self, rank: int, now: int) -> tuple[int | None, int | None, int, bool]:
        """A stage whose backward could start, one whose forward could, when the next of either will, and whether
        memory alone keeps a forward from starting."""
        forwards, backwards = self.orders[rank]
        forward = backward = None
        soon, blocked = UNKNOWN, False
        done_forward, done_backward = self.done[FORWARD], self.done[BACKWARD]
        for stage in backwards:
            microbatch = done_backward[stage]
            if microbatch < done_forward[stage]:
                lane = len(self.placement) + stage
                if not self.missing[lane][microbatch]:
                    arrival = self.arrivals[lane][microbatch]
                    if arrival <= now:
                        backward = stage
                        break
                    soon = arrival if soon == UNKNOWN else min(soon, arrival)
        self.coming = soon
        for stage in forwards:
            microbatch = done_forward[stage]
            if microbatch < self.count and microbatch - done_backward[stage] < self.policy.depth[stage]:
                if not self.missing[stage][microbatch]:
                    arrival = self.arrivals[stage][microbatch]
                    if arrival > now:
                        soon = arrival if soon == UNKNOWN else min(soon, arrival)
                    elif self._safe(rank, stage):
                        forward = stage
                        break
                    else:
                        blocked = True
        return backward, forward, soon, blocked

    def _safe(self, rank: int, stage: int) -> bool:
        """Whether there is room for one more forward of `stage`, and for the oldest microbatch besides."""
        if self.caps is None:
            return True
        held, cap = self.held[rank] + self.lane_bytes[FORWARD][stage], self.caps[rank]
        if held > cap:
            return False
        stages = self.stages_of[rank]
        oldest = self.done[BACKWARD][stages[0]]
        own = sum(self.lane_bytes[FORWARD][s] for s in stages if self.done[FORWARD][s] > oldest >= self.done[BACKWARD][s])
        if self.done[FORWARD][stage] == oldest:
            own += self.lane_bytes[FORWARD][stage]
        return held - self._reclaimable(rank) - own + self.needs[rank][0] <= cap

    def _reclaimable(self, rank: int) -> int:
        return sum((self.done[WEIGHT][s] - self.done[BACKWARD][s]) * self.lane_bytes[WEIGHT][s] for s in self.stages_of[rank] if self.split[s])

    def _weight(self, rank: int, now: int, soon: int, blocked: bool) -> tuple[int, int] | None:
        pending = [s for s in self.stages_of[rank] if self.split[s] and self.done[WEIGHT][s] < self.done[BACKWARD][s]]
        if not pending:
            return None
        stage = max(pending, key=lambda s: self.done[BACKWARD][s] - self.done[WEIGHT][s])
        if blocked or soon == UNKNOWN or soon - now >= self.policy.patience * self.lane_ns[WEIGHT][stage]:
            return WEIGHT, stage
        return None


def _users(instance: Instance) -> list[list[list[tuple[int, int, int]]]]:
    """Per kind (forward, backward) and stage who waits for it: (lane, its rank, time of the message)."""
    stages = instance.problem.stages
    users: list[list[list[tuple[int, int, int]]]] = [[[] for _ in range(stages)] for _ in range(2)]
    for kind, lanes in enumerate(instance.lane_sources[:2]):
        for stage, waits in enumerate(lanes):
            for source_kind, source, hop in waits:
                users[source_kind][source].append((kind * stages + stage, instance.problem.placement[stage], hop))
    return users
