"""Costs as measured on the device that the model is on."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar, Literal, TypeVar

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipecompile.cost_models.protocol import Call, Cost, Trial

__all__ = ["REPEATS", "Measured"]

WARM_UPS = 1
REPEATS = 5
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """Runs each distinct call, forward and backward, and takes the median time of `REPEATS` runs after a warm-up.

    CPU: wall time. GPU: CUDA events around each run, queued without waiting in between, so that a small operator
    costs what it costs in a row of them: the larger of its kernel and its launch. Entering the autograd engine is
    deducted from each backward, because a stage enters it once. Calls of equal signature are measured once.
    """

    name: ClassVar[str] = "measured"
    real: ClassVar[bool] = True
    memory: Literal["cpu", "cuda"] = "cpu"
    known: dict[Hashable, Cost] = field(default_factory=dict, init=False, repr=False)
    entry_ns: dict[torch.device, int] = field(default_factory=dict, init=False, repr=False)

    def cost(self, call: Call) -> Cost:
        """The cost of `call`, whose tensors are real; no `.grad` is touched."""
        if call.signature not in self.known:
            self.known[call.signature] = self._measure(call)
        return self.known[call.signature]

    def _measure(self, call: Call) -> Cost:
        device, trial = _device(call), call.trial()
        if device not in self.entry_ns:
            nothing = _nothing(device)
            self.entry_ns[device] = _time_ns(device, lambda: nothing.inputs, nothing.backward)
        return Cost(
            forward_ns=_time_ns(device, lambda: call.bind(call.fresh()), lambda run: run()),
            backward_ns=self._backward_ns(device, trial, (*trial.inputs, *trial.weights)),
            backward_input_ns=self._backward_ns(device, trial, trial.inputs),
            backward_weight_ns=self._backward_ns(device, trial, trial.weights),
        )

    def _backward_ns(self, device: torch.device, trial: Trial, sources: Sequence[GradientEdge]) -> int:
        if not sources:
            return 0
        return max(0, _time_ns(device, lambda: sources, trial.backward) - self.entry_ns[device])


def _device(call: Call) -> torch.device:
    touched = (*call.arguments, *call.parameters, *call.run(call.fresh()))
    return next((value.device for value in touched if value.is_cuda), torch.device("cpu"))


def _nothing(device: torch.device) -> Trial:
    """A backward with nothing to do."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    return Trial((leaf.view(1),), (get_gradient_edge(leaf),), (), (torch.ones(1, device=device),))


def _time_ns(device: torch.device, prepare: Callable[[], T], action: Callable[[T], object]) -> int:
    """The median time of `action` on what `prepare` returns; preparing is not timed."""
    for _ in range(WARM_UPS):
        action(prepare())
    if device.type == "cuda":
        return round(median(_gpu_times_ns(device, prepare, action)))
    return round(median(_cpu_times_ns(prepare, action)))


def _cpu_times_ns(prepare: Callable[[], T], action: Callable[[T], object]) -> list[int]:
    times = []
    for _ in range(REPEATS):
        prepared = prepare()
        start = time.perf_counter_ns()
        action(prepared)
        times.append(time.perf_counter_ns() - start)
    return times


def _gpu_times_ns(device: torch.device, prepare: Callable[[], T], action: Callable[[T], object]) -> list[int]:
    events = []
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    for _ in range(REPEATS):
        prepared = prepare()
        start, end = _event(), _event()
        start.record(stream)
        action(prepared)
        end.record(stream)
        events.append((start, end))
    torch.cuda.synchronize(device)
    return [round(start.elapsed_time(end) * 1e6) for start, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
