"""A second simulator: times are the least solution of equations, found by repeated sweeps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Schedule
from pipecompile.schedule.problem import PlacedProblem

Messages = list[tuple[Action, int, int]]  # receiver, its rank, time on the way


@dataclass
class OrderTimes:
    starts: dict[Action, int]
    ends: dict[Action, int]
    reduced: dict[int, int]
    peaks: list[int]

    @property
    def makespan_ns(self) -> int:
        return max([*self.ends.values(), *self.reduced.values()], default=0)


def naive_times(problem: PlacedProblem, schedule: Schedule) -> OrderTimes:
    starts = {action: 0 for row in schedule.compute for action in row}
    ends = dict(starts)
    arrivals: dict[tuple[Action, Action], int] = defaultdict(int)
    while True:
        before = dict(starts), dict(ends), dict(arrivals)
        for rank, row in enumerate(schedule.compute):
            _sweep(problem, rank, row, starts, ends, arrivals)
        if before == (starts, ends, arrivals):
            return OrderTimes(
                starts, ends, _reduced(problem, schedule, ends), _peaks(problem, schedule)
            )


def _sweep(
    problem: PlacedProblem,
    rank: int,
    row: tuple[Action, ...],
    starts: dict[Action, int],
    ends: dict[Action, int],
    arrivals: dict[tuple[Action, Action], int],
) -> None:
    clock, lines = 0, defaultdict(int)
    for action in row:
        inputs = [time for (_, receiver), time in arrivals.items() if receiver == action]
        starts[action] = max([clock, *inputs])
        clock = ends[action] = starts[action] + problem.duration_ns(action)
        for receiver, peer, hop in _messages(problem, action):
            if receiver not in ends:
                continue
            begin = ends[action]
            if peer != rank and problem.network.blocking:
                begin, clock = clock, clock + hop
            elif peer != rank and problem.network.shared:
                begin = max(begin, lines[peer])
                lines[peer] = begin + hop
            arrivals[action, receiver] = begin + hop


def _messages(problem: PlacedProblem, action: Action) -> Messages:
    found: Messages = []
    stage, place = action.stage, problem.placement

    def send(kinds: tuple[Kind, ...], target: int, hop: int) -> None:
        hop = hop if place[target] != place[stage] else 0
        found.extend(
            (Action(target, kind, action.microbatch), place[target], hop) for kind in kinds
        )

    if action.kind is Kind.FORWARD:
        if stage + 1 < problem.stages:
            send((Kind.FORWARD,), stage + 1, problem.forward_transfer_ns[stage])
        for skip in problem.skips:
            if skip.source == stage:
                send((Kind.FORWARD,), skip.destination, skip.forward_ns)
    if action.kind in BACKWARDS:
        if stage and problem.gradient[stage - 1]:
            send(tuple(BACKWARDS), stage - 1, problem.backward_transfer_ns[stage - 1])
        for skip in problem.skips:
            if skip.destination == stage:
                send(tuple(BACKWARDS), skip.source, skip.backward_ns)
    return found


def _reduced(problem: PlacedProblem, schedule: Schedule, ends: dict[Action, int]) -> dict[int, int]:
    """Return by stage when its sum over the replicas is done."""
    found = {}
    for row in schedule.compute:
        done: dict[int, tuple[int, int]] = {}
        for place, action in enumerate(row):
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                done[action.stage] = (ends[action], place)
        clock = 0
        for stage in sorted(done, key=done.__getitem__):
            clock = max(clock, done[stage][0]) + problem.costs[stage].reduce_ns
            found[stage] = clock
    return found


def _peaks(problem: PlacedProblem, schedule: Schedule) -> list[int]:
    """Return for each rank the most bytes, counted after each action from all finished ones."""
    peaks = []
    for row in schedule.compute:
        peaks.append(max((_held(problem, row[: end + 1]) for end in range(len(row))), default=0))
    return peaks


def _held(problem: PlacedProblem, done: tuple[Action, ...]) -> int:
    total = 0
    for stage, microbatch in {(a.stage, a.microbatch) for a in done}:
        kinds = {a.kind for a in done if (a.stage, a.microbatch) == (stage, microbatch)}
        costs = problem.costs[stage]
        over = sum(skip.bytes for skip in problem.skips if skip.source == stage)
        if Kind.BACKWARD_INPUT in kinds:
            total += costs.between_bytes if Kind.BACKWARD_WEIGHT not in kinds else 0
        elif Kind.BACKWARD not in kinds:
            total += (
                costs.kept_bytes + over + (costs.recomputed_bytes if Kind.RECOMPUTE in kinds else 0)
            )
    return total
