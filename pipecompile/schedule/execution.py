"""Runs the compute actions of a schedule by the rules that pipecompile.schedule.simulator states.

Numbers stand for actions: task = kind × stages + stage, code = task × microbatches + microbatch.
A schedule of 64 ranks and 512 microbatches has 98,000 actions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipecompile.errors import ScheduleError
from pipecompile.ir.action_order import dependency_order
from pipecompile.ir.schedule import Action, Event, Kind, Schedule
from pipecompile.schedule.dependencies import (
    TASK_KINDS,
    compute_dependencies,
    dependents,
    waits_for_replicas,
)
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["Execution", "Wait", "execute"]


class Wait(NamedTuple):
    """A rank's wait before its event at index `position`, in ns since the step began.

    At `produced_ns` the last input has been computed; if messages took no time, the wait would end
    there.
    """

    position: int
    start_ns: int
    produced_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Execution:
    """What happened: events and waits by rank.

    `rank_order` are the ranks of all actions in an order in which these can happen.
    `arrivals[code]` is when all inputs of an action have arrived. `free_ns[rank]` is the time after
    a rank's last action and the sends that blocked it, which took `sending_ns[rank]` in all.
    """

    events: tuple[tuple[Event, ...], ...]
    waits: list[list[Wait]]
    rank_order: list[int]
    arrivals: list[int]
    free_ns: list[int]
    sending_ns: list[int]


def execute(problem: PlacedProblem, schedule: Schedule) -> Execution:
    """Return what happens; at a deadlock ScheduleError says what every rank waits for."""
    rows, waits = schedule.compute, waits_for_replicas(schedule)
    executor = _Executor(problem, rows, waits)
    rank_order = executor.run()
    if len(rank_order) < sum(map(len, rows)):
        inputs = compute_dependencies(problem, schedule)
        # This is slower, but its error says who waits for what.
        for _ in dependency_order(rows, lambda action: [*inputs(action), *waits.get(action, ())]):
            pass
        raise AssertionError("actions that have an order can be executed")
    events = []
    for row, starts, durations in zip(rows, executor.starts, executor.durations, strict=True):
        events.append(tuple(map(Event, row, starts, map(int.__add__, starts, durations))))
    return Execution(
        tuple(events),
        executor.waits,
        rank_order,
        executor.arrivals,
        executor.free_ns,
        executor.sending_ns,
    )


class _Executor:
    """The ranks while they run: where each stands, and what has arrived so far.

    A rank runs until its next action lacks an input. It is then woken by the rank that produces
    the last missing one, so that the time is linear in the number of actions.
    """

    def __init__(
        self,
        problem: PlacedProblem,
        rows: Sequence[Sequence[Action]],
        waits: Mapping[Action, Sequence[Action]],
    ) -> None:
        self.stages = problem.stages
        self.microbatches = problem.microbatches
        self.network = problem.network
        self.dependents = dependents(problem)
        self.tasks = [[self._task(action) for action in row] for row in rows]
        self.durations = [list(_durations(problem, row)) for row in rows]
        self.numbers = [[action.microbatch or 0 for action in row] for row in rows]
        # These three are by code: missing inputs, when the last input arrives, when it is computed.
        self.pending = self._pending()
        self.arrivals = [0] * len(self.pending)
        self.produced = [0] * len(self.pending)
        ranks = range(len(rows))
        # links_ns[rank][peer] is when the link between them is free.
        self.links_ns = [[0] * len(rows) for _ in ranks]
        self.free_ns, self.sending_ns = [0 for _ in ranks], [0 for _ in ranks]
        self.starts: list[list[int]] = [[] for _ in ranks]
        self.waits: list[list[Wait]] = [[] for _ in ranks]
        self.waiting: dict[int, int] = {}
        # What waits for a code beside its dependents: none has a message for that.
        self.followers: dict[int, list[int]] = defaultdict(list)
        for action, before in waits.items():
            self.pending[self._code(action)] += len(before)
            for each in before:
                self.followers[self._code(each)].append(self._code(action))

    def _task(self, action: Action) -> int:
        return TASK_KINDS[action.kind] * self.stages + action.stage

    def _code(self, action: Action) -> int:
        return self._task(action) * self.microbatches + (action.microbatch or 0)

    def _pending(self) -> list[int]:
        """Return by code how many inputs are missing.

        It stays below zero for actions that the schedule does not have.
        """
        inputs = [0] * len(self.dependents)
        for row in self.dependents:
            for dependent in row:
                inputs[dependent.task] += 1
        # A negative number marks what the schedule does not have; nothing is delivered to it.
        pending = [-1 - max(inputs)] * (len(inputs) * self.microbatches)
        for tasks, numbers in zip(self.tasks, self.numbers, strict=True):
            for task, number in zip(tasks, numbers, strict=True):
                pending[task * self.microbatches + number] = inputs[task]
        return pending

    def run(self) -> list[int]:
        """Return the ranks of the actions in the order in which they ran, as far as they could."""
        ready = deque(range(len(self.tasks)))
        rank_order: list[int] = []
        while ready:
            rank = ready.popleft()
            before = len(self.starts[rank])
            ready.extend(self.advance(rank))
            rank_order += [rank] * (len(self.starts[rank]) - before)
        return rank_order

    def advance(self, rank: int) -> list[int]:
        """Run what a rank has inputs for, and return the ranks that waited for the results."""
        tasks, numbers, durations, starts = (
            table[rank] for table in (self.tasks, self.numbers, self.durations, self.starts)
        )
        # Rows are looked up once, since this is the inner loop of every simulation.
        woken: list[int] = []
        for index in range(len(starts), len(tasks)):
            code = tasks[index] * self.microbatches + numbers[index]
            if self.pending[code] > 0:
                self.waiting[code] = rank
                break
            # All inputs are produced, though they may still be under way.
            start, now = self.arrivals[code], self.free_ns[rank]
            if start > now:
                self.waits[rank].append(Wait(index, now, max(now, self.produced[code]), start))
            else:
                start = now
            starts.append(start)
            self.free_ns[rank] = start + durations[index]
            self.deliver(rank, tasks[index], numbers[index], woken)
        return woken

    def deliver(self, rank: int, task: int, number: int, woken: list[int]) -> None:
        """Give the result of a task that has just ended to those that wait for it.

        The ranks that waited for nothing else are added to `woken`.
        """
        pending, arrive, end = self.pending, self.arrive, self.free_ns[rank]
        for target, first, transfer_ns, replicas in self.dependents[task]:
            code = target * self.microbatches + number
            if pending[code] <= 0:
                continue  # the schedule does not have this action
            peer = first + number % replicas
            arrival = end if peer == rank else self.send(rank, peer, end, transfer_ns)
            arrive(code, end, arrival, woken)
        if self.followers:
            for code in self.followers.get(task * self.microbatches + number, ()):
                arrive(code, end, end, woken)

    def arrive(self, code: int, produced: int, arrival: int, woken: list[int]) -> None:
        """Note that one of the missing inputs of an action is there."""
        if arrival > self.arrivals[code]:
            self.arrivals[code] = arrival
        if produced > self.produced[code]:
            self.produced[code] = produced
        missing = self.pending[code] = self.pending[code] - 1
        if not missing and code in self.waiting:
            woken.append(self.waiting.pop(code))

    def send(self, rank: int, peer: int, produced_ns: int, transfer_ns: int) -> int:
        """Return when a message arrives."""
        if self.network.blocking:
            # The rank itself is busy with the message, and so goes on later.
            self.sending_ns[rank] += transfer_ns
            self.free_ns[rank] += transfer_ns
            return self.free_ns[rank]
        if self.network.shared:
            # The message waits until the one ahead of it on the link has arrived.
            links = self.links_ns[rank]
            links[peer] = max(produced_ns, links[peer]) + transfer_ns
            return links[peer]
        return produced_ns + transfer_ns


def _durations(problem: PlacedProblem, row: Sequence[Action]) -> Iterator[int]:
    halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    for action in row:
        if action.kind in halves and not problem.costs[action.stage].can_split:
            raise ScheduleError(
                f"{action}: the backward of stage {action.stage} is not split; use B instead"
            )
        yield problem.duration_ns(action)
