"""The best of all orders of a tiny problem, by a dynamic program over sets of finished actions.

What may come next depends only on the set of finished actions, and so does memory. Of two ways to
finish the same set, one whose ends are all as early is as good. For the span a rank that starts
later is better, so ways are compared only after all ranks have started; before that only equal
ones are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from pipecompile.ir.schedule import BACKWARDS, WEIGHT_GRADIENT_KINDS, Action, Kind
from pipecompile.schedule.problem import PlacedProblem

Halves = Callable[[int], tuple[bool, ...]]
"""Returns whether the backwards of a stage may be in halves, whole, or either."""
Mark = tuple[int, str, int]
"""Stage, letter and microbatch. B stands for full backwards and first halves, W for both ends."""


@dataclass(frozen=True)
class Way:
    """When each rank is free, its first start, the end of its sums, and ends that others need."""

    free: tuple[int, ...]
    first: tuple[int | None, ...]
    summed: tuple[int, ...]
    ends: tuple[tuple[Mark, int], ...] = ()

    @property
    def makespan(self) -> int:
        return max(self.free + self.summed)

    @property
    def span(self) -> int:
        return max(end - (start or 0) for end, start in zip(self.free, self.first, strict=True))


@dataclass(frozen=True)
class Move:
    """An action, what it needs, with the times of the messages, and the marks that it leaves."""

    action: Action
    needs: tuple[tuple[Mark, int], ...]
    leaves: frozenset[Mark]
    rank: int
    time: int
    size: int


def either(stage: int) -> tuple[bool, ...]:
    return (False, True)


def best(
    problem: PlacedProblem, objective: str, halves: Halves = either, *, in_turn: bool = False
) -> int | None:
    """Return the least makespan or largest span of all orders within the caps, None without one.

    With `in_turn` each stage takes the microbatches in order. Otherwise only the first stage does,
    since the microbatches are numbered by its order.
    """
    return _Table(problem, objective, halves, in_turn).run()


class _Table:
    def __init__(
        self, problem: PlacedProblem, objective: str, halves: Halves, in_turn: bool
    ) -> None:
        self.problem, self.objective, self.in_turn = problem, objective, in_turn
        each = product(range(problem.stages), range(problem.microbatches))
        self.moves = [
            self._move(Action(s, kind, j)) for s, j in each for kind in self._kinds(s, halves)
        ]
        self.complete = frozenset(mark for move in self.moves for mark in move.leaves)
        self.users: dict[Mark, set[Mark]] = {}
        for move in self.moves:
            for need, _ in move.needs:
                if problem.placement[need[0]] != move.rank:
                    self.users.setdefault(need, set()).update(move.leaves)

    def run(self) -> int | None:
        nothing = (0,) * self.problem.ranks
        start = Way(nothing, (None,) * len(nothing), nothing)
        # The key includes what is held: a full backward leaves the marks of both halves.
        table = [{} for _ in range(len(self.complete) + 1)]
        table[0][frozenset(), nothing] = {start}
        for level in table:
            for (done, held), ways in level.items():
                ways = self._undominated(ways)
                for move in self._next(done, held):
                    after = done | move.leaves
                    key = after, _put(held, move.rank, held[move.rank] + move.size)
                    table[len(after)].setdefault(key, set()).update(
                        self._perform(w, move, after) for w in ways
                    )
        return min(
            (getattr(way, self.objective) for ways in table[-1].values() for way in ways),
            default=None,
        )

    def _kinds(self, stage: int, halves: Halves) -> list[Kind]:
        costs = self.problem.costs[stage]
        both = {half and costs.can_split for half in halves(stage)}
        split = [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if True in both else []
        return [
            Kind.FORWARD,
            *[Kind.RECOMPUTE] * costs.recompute,
            *[Kind.BACKWARD] * (False in both),
            *split,
        ]

    def _move(self, action: Action) -> Move:
        stage, kind, j, _ = action
        lane = "B" if kind in BACKWARDS else kind.value
        leaves = {(stage, lane, j), *([(stage, "W", j)] if kind is Kind.BACKWARD else [])}
        rank, time = self.problem.placement[stage], self.problem.duration_ns(action)
        needs = tuple(((s, of, j), hop) for s, of, hop in self._needs(stage, lane))
        return Move(action, needs, frozenset(leaves), rank, time, self.problem.change_bytes(action))

    def _needs(self, stage: int, lane: str) -> Iterator[tuple[int, str, int]]:
        problem = self.problem
        if lane == "F":
            if stage:
                yield stage - 1, "F", problem.forward_transfer_ns[stage - 1]
            yield from (
                (skip.source, "F", skip.forward_ns)
                for skip in problem.skips
                if skip.destination == stage
            )
        elif lane == "B":
            yield stage, "R" if problem.costs[stage].recompute else "F", 0
            if stage + 1 < problem.stages and problem.gradient[stage]:
                yield stage + 1, "B", problem.backward_transfer_ns[stage]
            yield from (
                (skip.destination, "B", skip.backward_ns)
                for skip in problem.skips
                if skip.source == stage
            )
        else:
            yield stage, {"R": "F", "W": "B"}[lane], 0

    def _next(self, done: frozenset[Mark], held: tuple[int, ...]) -> Iterator[Move]:
        caps = self.problem.caps
        for move in self.moves:
            room = caps is None or held[move.rank] + move.size <= caps[move.rank]
            possible = not move.leaves & done and all(need in done for need, _ in move.needs)
            if room and possible and self._is_turn(move, done):
                yield move

    def _is_turn(self, move: Move, done: frozenset[Mark]) -> bool:
        if not self.in_turn and (move.action.stage or move.action.kind is not Kind.FORWARD):
            return True
        return all(j == 0 or (stage, lane, j - 1) in done for stage, lane, j in move.leaves)

    def _perform(self, way: Way, move: Move, after: frozenset[Mark]) -> Way:
        known = dict(way.ends)
        start = max(
            [way.free[move.rank], *(known[need] + hop for need, hop in move.needs if need in known)]
        )
        end = start + move.time
        known |= {mark: end for mark in move.leaves if mark in self.users}
        first = way.first if way.first[move.rank] is not None else _put(way.first, move.rank, start)
        ends = tuple(
            sorted((mark, time) for mark, time in known.items() if self.users[mark] - after)
        )
        return Way(_put(way.free, move.rank, end), first, self._summed(way, move, end, after), ends)

    def _summed(self, way: Way, move: Move, end: int, after: frozenset[Mark]) -> tuple[int, ...]:
        """A stage's sum over replicas starts after its last gradient."""
        stage, rank = move.action.stage, move.rank
        reduce_ns = self.problem.costs[stage].reduce_ns
        closed = all((stage, "W", j) in after for j in range(self.problem.microbatches))
        if not reduce_ns or not closed or move.action.kind not in WEIGHT_GRADIENT_KINDS:
            return way.summed
        return _put(way.summed, rank, max(way.summed[rank], end) + reduce_ns)

    def _undominated(self, ways: set[Way]) -> set[Way]:
        if self.objective == "span" and any(None in way.first for way in ways):
            return ways
        kept: dict[tuple[int, ...], Way] = {}
        for vector, way in sorted(
            ((self._vector(way), way) for way in ways), key=lambda pair: pair[0]
        ):
            if not any(all(map(int.__le__, other, vector)) for other in kept):
                kept[vector] = way
        return set(kept.values())

    def _vector(self, way: Way) -> tuple[int, ...]:
        """Return all times that should be small."""
        late = tuple(-(start or 0) for start in way.first) if self.objective == "span" else ()
        return (*way.free, *way.summed, *late, *(end for _, end in way.ends))


def _put(row: tuple, index: int, value: object) -> tuple:
    return (*row[:index], value, *row[index + 1 :])
