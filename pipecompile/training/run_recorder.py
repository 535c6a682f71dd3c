"""What `Pipeline.record()` gives: the steps of a block, gathered from all ranks when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipecompile.cost_models.clock import device_name
from pipecompile.errors import InputError
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedAction, RecordedRank, RecordedRun, RecordedStep
from pipecompile.ir.schedule import Action, Schedule
from pipecompile.ir.serialization import fingerprint
from pipecompile.runtime.action_recorder import ActionRecorder, RankTimes
from pipecompile.runtime.clock_alignment import ClockOffset, clock_offsets
from pipecompile.runtime.place import RankPlace

__all__ = ["RunRecorder"]


class RunRecorder:
    """The steps that a pipeline takes in a block, recorded.

    `run` is there when the block has ended, on rank 0 of the first replica; None elsewhere.
    """

    def __init__(self) -> None:
        self.run: RecordedRun | None = None
        self._is_over = False

    def save(self, path: str | Path) -> None:
        """Write the run to `path`, on the rank that has it; InputError before the block has ended,
        or if it had no steps.
        """
        if not self._is_over:
            raise InputError("nothing was recorded: take steps in the block, and save behind it")
        if self.run is not None:
            self.run.save(path)

    @contextmanager
    def recording(
        self, plan: Plan, place: RankPlace, device: torch.device, recorders: list[ActionRecorder]
    ) -> Iterator[RunRecorder]:
        """Add a recorder to `recorders` for the block, and make the run when it ends.

        All ranks of a pipeline enter it and leave it together. After an error nothing is gathered,
        since other ranks may not come to the end of the block.
        """
        # Clocks are read on both sides of the block, since those of two machines drift apart.
        before = _read_clocks(place, device)
        recorder = ActionRecorder(device)
        recorders.append(recorder)
        try:
            yield self
        finally:
            recorders.remove(recorder)
        # Before the clocks are read again, because it waits for the device: marks have no times
        # until then.
        steps = recorder.times()
        clocks = before, _read_clocks(place, device)
        # Once for the whole block: to gather within it would be a pause that is recorded.
        rows = _gather(place, steps)
        self._is_over = bool(steps)
        if steps and rows and place.is_first:
            self.run = _run_of(plan, place, device, rows, clocks)


class _ClockReading(NamedTuple):
    """A moment on rank 0's clock, and then the offsets of all clocks, which only rank 0 knows."""

    ns: int
    offsets: Sequence[ClockOffset]


def _read_clocks(place: RankPlace, device: torch.device) -> _ClockReading:
    if not place.is_distributed:
        return _ClockReading(perf_counter_ns(), [ClockOffset()])
    offsets = clock_offsets(place.global_ranks, device, place.pipeline_group)
    return _ClockReading(perf_counter_ns(), offsets)


def _gather(place: RankPlace, steps: list[RankTimes]) -> list[list[RankTimes]]:
    """Return on rank 0 the steps of each rank; [] elsewhere."""
    if not place.is_distributed:
        return [steps]
    rows: list[list[RankTimes]] | None = None
    if place.rank == 0:
        rows = [[] for _ in place.global_ranks]
    dist.gather_object(steps, rows, dst=place.global_ranks[0], group=place.pipeline_group)
    return rows or []


def _run_of(
    plan: Plan,
    place: RankPlace,
    device: torch.device,
    rows: Sequence[Sequence[RankTimes]],
    clocks: tuple[_ClockReading, _ClockReading],
) -> RecordedRun:
    conversions = [_to_rank_0(rank, clocks) for rank in range(len(rows))]
    steps = []
    for times in zip(*rows, strict=True):
        pairs = zip(times, conversions, strict=True)
        ranks = [_converted(of_rank.rank, convert) for of_rank, convert in pairs]
        if not place.is_distributed:
            # One process performed the actions of all ranks in turns, and has one list of them.
            ranks = _by_rank(ranks[0], plan.schedule)
        steps.append(_step(times[0], ranks))
    return RecordedRun(
        plan=fingerprint(plan),
        device=device_name(device),
        torch=str(torch.__version__),
        processes=len(rows),
        # A time of rank r is no better than its clock was read, on the worse of the two sides.
        clock_error_ns=max(offset.error_ns for clock in clocks for offset in clock.offsets),
        steps=tuple(steps),
    )


def _step(times: RankTimes, ranks: Sequence[RecordedRank]) -> RecordedStep:
    """Return the step of these ranks, in times since the first one began it."""
    start_ns = min(rank.start_ns for rank in ranks)
    return RecordedStep(
        number=times.number,
        microbatches=times.microbatches,
        microbatch_shapes=times.microbatch_shapes,
        ranks=tuple(_converted(rank, lambda ns: ns - start_ns) for rank in ranks),
    )


def _to_rank_0(rank: int, clocks: tuple[_ClockReading, _ClockReading]) -> Callable[[int], int]:
    """Return what makes a time on a rank's clock one on rank 0's.

    Between the two readings of the clocks the offset is taken to change evenly.
    """
    before, after = (clock.offsets[rank] for clock in clocks)
    # On one machine all processes read the same clock. A measured offset would add only its error.
    if before.may_be_zero and after.may_be_zero:
        return lambda ns: ns
    start, end = (clock.ns for clock in clocks)
    drift, length = after.ns - before.ns, max(1, end - start)

    def converted(ns: int) -> int:
        # Whole numbers: a clock in ns since the machine started is beyond the digits of a float.
        passed = ns - before.ns - start
        return ns - before.ns - drift * passed // length

    return converted


def _converted(rank: RecordedRank, convert: Callable[[int], int]) -> RecordedRank:
    """Return `rank` with all its times converted."""
    actions = tuple(
        action._replace(
            start_ns=convert(action.start_ns),
            ready_ns=convert(action.ready_ns),
            end_ns=convert(action.end_ns),
        )
        for action in rank.actions
    )
    return RecordedRank(
        start_ns=convert(rank.start_ns), end_ns=convert(rank.end_ns), actions=actions
    )


def _by_rank(process: RecordedRank, schedule: Schedule) -> list[RecordedRank]:
    """Return the actions of the only process as those of the ranks that it performed them for."""
    rows: list[list[RecordedAction]] = [[] for _ in range(schedule.ranks)]
    for recorded in process.actions:
        rows[schedule.rank_of(Action.parse(recorded.action))].append(recorded)
    return [
        RecordedRank(start_ns=process.start_ns, end_ns=process.end_ns, actions=tuple(row))
        for row in rows
    ]
