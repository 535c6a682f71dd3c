"""Records when this rank's actions begin, are ready and end, with as little work as possible.

While a step runs, only marks are taken: a number on a CPU, an event in the stream on a GPU. They
become times when all recorded steps are over. Called by `training/run_recorder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from time import perf_counter_ns
from typing import Any

import torch

from pipecompile.cost_models.clock import Clock
from pipecompile.ir.recorded_run import RecordedAction, RecordedRank
from pipecompile.ir.schedule import BACKWARDS, TRANSFERS, Action, Kind
from pipecompile.runtime.messages import Boundaries

__all__ = ["ActionRecorder", "RankTimes"]

# Only these may wait: for a message, or the first message for ranks that have not begun the step.
# What other actions need is on this rank.
_MAY_WAIT = BACKWARDS | TRANSFERS | {Kind.FORWARD}


@dataclass(frozen=True)
class RankTimes:
    """One step of this rank, in times on its own clock."""

    number: int
    microbatches: int
    microbatch_shapes: tuple[tuple[int, ...], ...]
    rank: RecordedRank


@dataclass
class _MarkedStep:
    """The marks of one step: three of each action, one after another."""

    start: Any
    end: Any = None
    number: int = 0
    microbatches: int = 0
    boundaries: Callable[[], Sequence[Boundaries]] = tuple
    actions: list[Action] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    peaks: list[int | None] = field(default_factory=list)


class ActionRecorder:
    """Records the steps of this process that are begun and ended with it; an `ActionObserver`.

    On a GPU it resets the peak of the allocator's statistics, so that each action has its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = Clock(device)
        self._is_cuda = device.type == "cuda"
        self._mark: Callable[[], Any] = self._clock.mark if self._is_cuda else perf_counter_ns
        self._steps: list[_MarkedStep] = []
        self._anchor = self._now()

    def begin_step(self) -> None:
        """A step begins; what a step that failed has left is dropped."""
        self._current = _MarkedStep(self._mark())
        self._append_action = self._current.actions.append
        self._append_mark = self._current.marks.append

    def end_step(
        self, number: int, microbatches: int, boundaries: Callable[[], Sequence[Boundaries]]
    ) -> None:
        """The `number`th step is over; `boundaries` says for each microbatch what crosses between
        its stages.
        """
        step = self._current
        step.end = self._mark()
        step.number, step.microbatches, step.boundaries = number, microbatches, boundaries
        self._steps.append(step)

    # Between the kernels of a step little of this is in the caches, so each line counts.

    def begin(self, action: Action) -> None:
        """`action` is next."""
        self._append_action(action)
        self._append_mark(self._mark())

    def ready(self, action: Action) -> None:
        """All that `action` needs is there."""
        self._append_mark(self._mark())
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self, action: Action) -> None:
        """`action` is done."""
        self._append_mark(self._mark())
        if self._is_cuda:
            # `max_memory_allocated` would flatten hundreds of figures, which takes 0.1 ms.
            figures = torch.cuda.memory_stats_as_nested_dict(self._device)
            self._current.peaks.append(figures["allocated_bytes"]["all"]["peak"])

    def times(self) -> list[RankTimes]:
        """Return the steps on this process's `perf_counter_ns`, after all of their work is done."""
        self._clock.wait()
        (start, start_ns), (end, end_ns) = self._anchor, self._now()
        # The clock of a GPU may run faster than the host's: this stretches it to fit.
        length = max(1, self._clock.between_ns(start, end))

        def host_ns(since_start_ns: int) -> int:
            return start_ns + since_start_ns * (end_ns - start_ns) // length

        steps = []
        base, before = 0, start
        for step in self._steps:
            # From step to step, because CUDA measures long times with fewer digits.
            base += self._clock.between_ns(before, step.start)
            before = step.start
            steps.append(self._rank_times(step, base, host_ns))
        return steps

    def _rank_times(
        self, step: _MarkedStep, start_ns: int, host_ns: Callable[[int], int]
    ) -> RankTimes:
        def at(mark: Any) -> int:
            return host_ns(start_ns + self._clock.between_ns(step.start, mark))

        actions = tuple(self._actions(step, at))
        rank = RecordedRank(start_ns=at(step.start), end_ns=at(step.end), actions=actions)
        # What enters stage 0 is the model's input.
        shapes = tuple(shape for shape, *_ in step.boundaries()[0][0])
        return RankTimes(step.number, step.microbatches, shapes, rank)

    def _actions(self, step: _MarkedStep, at: Callable[[Any], int]) -> Iterator[RecordedAction]:
        boundaries = step.boundaries()
        peaks = step.peaks or [None] * len(step.actions)
        marks = iter(step.marks)
        for action, *moments, peak in zip(step.actions, marks, marks, marks, peaks, strict=True):
            start, ready, end = map(at, moments)
            # The other actions use what is on this rank: there is nothing to wait for.
            ready = ready if action.kind in _MAY_WAIT else start
            of_microbatch = () if action.microbatch is None else boundaries[action.microbatch]
            size = message_bytes(action, of_microbatch)
            yield RecordedAction(str(action), start, ready, end, size, peak)

    def _now(self) -> tuple[Any, int]:
        """Return a mark and what the host's clock shows at it."""
        self._clock.wait()
        mark = self._clock.mark()
        return mark, perf_counter_ns()


def message_bytes(action: Action, boundaries: Boundaries) -> int:
    """Return the bytes that `action` sends or receives; 0 if it does neither.

    `boundaries[s]` are the tensors that enter stage s. A gradient is as large as its tensor.
    """
    is_forward = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    # Values leave through the boundary behind a stage, and gradients through that before it.
    behind = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)
    if action.kind not in TRANSFERS:
        return 0
    return sum(
        prod(shape[0]) * shape[1].itemsize
        for shape in boundaries[action.stage + behind]
        if is_forward or shape.has_gradient
    )
