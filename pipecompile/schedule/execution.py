"""The compute actions of a schedule, performed by the rules that pipecompile.schedule.simulator states.

Numbers stand for actions: task = part × stages + stage, code = task × microbatches + microbatch. A schedule of 64
ranks and 512 microbatches has 98,000 of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipecompile.errors import ScheduleError
from pipecompile.ir.schedule import Action, Event, Kind, Schedule
from pipecompile.schedule.dependencies import (
    TASK_KINDS,
    compute_dependencies,
    dependency_order,
    dependents,
)
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["Execution", "Wait", "execute"]


class Wait(NamedTuple):
    """A rank's wait before its event at `position`, in ns; if messages took no time it would end at `made_ns`."""

    position: int
    start_ns: int
    produced_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Execution:
    """What happened: events and waits by rank, and `turns`, the ranks in an order in which it could happen.

    `arrivals[code]` is when all inputs of an action are there. `free[rank]` is the time after the rank's last action
    and the messages that kept it; these kept it for `sending[rank]` in all.
    """

    events: tuple[tuple[Event, ...], ...]
    waits: list[list[Wait]]
    rank_order: list[int]
    arrivals: list[int]
    free_ns: list[int]
    sending_ns: list[int]


def execute(problem: PlacedProblem, schedule: Schedule) -> Execution:
    """What happens; ScheduleError names what every rank waits for if the actions cannot come to their end."""
    rows = schedule.compute
    floor = _Executor(problem, rows)
    rank_order = floor.run()
    if len(rank_order) < sum(map(len, rows)):
        for _ in dependency_order(
            rows, compute_dependencies(problem, schedule)
        ):  # slower, but it names who waits for what
            pass
        raise AssertionError("what can happen in an order can be performed")
    ends = [
        map(int.__add__, starts, durations)
        for starts, durations in zip(floor.starts, floor.durations, strict=True)
    ]
    events = tuple(
        tuple(map(Event, *columns)) for columns in zip(rows, floor.starts, ends, strict=True)
    )
    return Execution(
        events, floor.waits, rank_order, floor.arrivals, floor.free_ns, floor.sending_ns
    )


class _Executor:
    """The ranks at work: where each stands, and what has arrived so far."""

    def __init__(self, problem: PlacedProblem, rows: Sequence[Sequence[Action]]) -> None:
        self.microbatches = problem.microbatches
        self.network = problem.network
        self.given = dependents(problem)
        self.tasks = [
            [TASK_KINDS[action.kind] * problem.stages + action.stage for action in row]
            for row in rows
        ]
        self.durations = [list(_durations(problem, row)) for row in rows]
        self.numbers = [[action.microbatch or 0 for action in row] for row in rows]
        self.pending = self._pending()
        self.arrivals = [0] * len(self.pending)
        self.made = [0] * len(self.pending)
        ranks = range(len(rows))
        self.links = [[0] * len(rows) for _ in ranks]
        self.free_ns, self.sending_ns = [0 for _ in ranks], [0 for _ in ranks]
        self.starts: list[list[int]] = [[] for _ in ranks]
        self.waits: list[list[Wait]] = [[] for _ in ranks]
        self.waiting: dict[int, int] = {}

    def _pending(self) -> list[int]:
        """By code how many inputs are missing; less than zero for actions that the schedule does not have."""
        inputs = [0] * len(self.given)
        for row in self.given:
            for handover in row:
                inputs[handover.target] += 1
        pending = [-1 - max(inputs)] * (len(inputs) * self.microbatches)
        for tasks, numbers in zip(self.tasks, self.numbers, strict=True):
            for task, number in zip(tasks, numbers, strict=True):
                pending[task * self.microbatches + number] = inputs[task]
        return pending

    def run(self) -> list[int]:
        """The rank of each action in the order in which they were performed, as far as they could be."""
        ready = deque(range(len(self.tasks)))
        rank_order: list[int] = []
        while ready:
            rank = ready.popleft()
            before = len(self.starts[rank])
            ready.extend(self.advance(rank))
            rank_order += [rank] * (len(self.starts[rank]) - before)
        return rank_order

    def advance(self, rank: int) -> list[int]:
        """Performs what `rank` has inputs for, and returns the ranks that waited for what it made."""
        tasks, numbers, durations, starts = (
            t[rank] for t in (self.tasks, self.numbers, self.durations, self.starts)
        )
        woken: list[int] = []
        for index in range(len(starts), len(tasks)):
            code = tasks[index] * self.microbatches + numbers[index]
            if self.pending[code] > 0:
                self.waiting[code] = rank
                break
            start, now = self.arrivals[code], self.free_ns[rank]
            if start > now:
                self.waits[rank].append(Wait(index, now, max(now, self.made[code]), start))
            else:
                start = now
            starts.append(start)
            self.free_ns[rank] = start + durations[index]
            self.hand_over(rank, tasks[index], numbers[index], woken)
        return woken

    def hand_over(self, rank: int, task: int, number: int, woken: list[int]) -> None:
        """Gives what a task has just made to those that need it; adds to `woken` the ranks that waited for it."""
        pending, end = self.pending, self.free_ns[rank]
        for target, peer, hop in self.given[task]:
            code = target * self.microbatches + number
            if pending[code] <= 0:  # the schedule does not have it
                continue
            arrival = end if peer == rank else self.send(rank, peer, end, hop)
            if arrival > self.arrivals[code]:
                self.arrivals[code] = arrival
            if end > self.made[code]:
                self.made[code] = end
            pending[code] -= 1
            if not pending[code] and code in self.waiting:
                woken.append(self.waiting.pop(code))

    def send(self, rank: int, peer: int, end: int, hop: int) -> int:
        """When a message that was made at `end` arrives."""
        if self.network.blocking:
            self.sending_ns[rank] += hop
            self.free_ns[rank] += hop
            return self.free_ns[rank]
        if self.network.shared:
            links = self.links[rank]
            links[peer] = max(end, links[peer]) + hop
            return links[peer]
        return end + hop


def _durations(problem: PlacedProblem, row: Sequence[Action]) -> Iterator[int]:
    for action in row:
        if (
            action.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            and not problem.costs[action.stage].can_split
        ):
            raise ScheduleError(
                f"{action}: the backward of stage {action.stage} is not split; use B instead"
            )
        yield problem.duration_ns(action)
