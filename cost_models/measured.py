"""Costs as measured on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pipecompile.cost_models.clock import Clock, TimeSample, steady_sample
from pipecompile.cost_models.device_transfer import moved_to, without_hooks
from pipecompile.cost_models.protocol import CallCost, DifferentiableRun, NodeCall
from pipecompile.ir.graph import FUSED_ATTENTION, FusedType

__all__ = ["VERSION", "Measured", "CachedCosts"]

VERSION = 4  # of how it is measured: costs of another version are not reused
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """Runs each distinct call on `device`, forward and backward, until its times are steady, and takes the median.

    CPU: wall time, on tensors that the run before has left in the caches, as in a step the node before has. GPU: CUDA
    events around each run, its L2 cache flushed before, or the time to queue it if that is longer. Entering the
    autograd engine is deducted from each backward, because a stage enters it once. Calls of equal signature are
    measured once.

    A model that lies elsewhere comes to the device node by node: the parameters and inputs of one at a time.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    name: ClassVar[str] = "measured"
    real: ClassVar[bool] = True
    costs_by_signature: dict[Hashable, CallCost] = field(default_factory=dict, init=False, repr=False)
    costs_by_name: dict[str, CallCost] = field(default_factory=dict, init=False, repr=False)
    samples: list[TimeSample] = field(default_factory=list, init=False, repr=False)
    engine_entry_ns: list[int] = field(default_factory=list, init=False, repr=False)

    @property
    def memory(self) -> Literal["cpu", "cuda"]:
        """Of the device."""
        return "cuda" if self.device.type == "cuda" else "cpu"

    @property
    def fused_attention(self) -> tuple[FusedType, ...]:
        """Below compute capability 8.0 not for bfloat16 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 0):
            return ("float16", "float32")
        return FUSED_ATTENTION

    @property
    def spread(self) -> float:
        """The median of what was measured: between the quartiles of its times, relative to their median."""
        return median(
            [sample.spread_ns / max(1, sample.median_ns) for sample in self.samples] or [0.0]
        )

    def cost(self, call: NodeCall) -> CallCost:
        """The cost of `call`, whose tensors are real; no `.grad` is touched."""
        if call.signature not in self.costs_by_signature:
            with without_hooks(call.parameters), _on(self.device, call) as moved:
                self.costs_by_signature[call.signature] = self._measure(moved)
        cost = self.costs_by_name[call.node.name] = self.costs_by_signature[call.signature]
        return cost

    def _measure(self, call: NodeCall) -> CallCost:
        if not self.engine_entry_ns:
            nothing = _nothing(self.device)
            self.engine_entry_ns.append(self._time_ns(lambda: nothing.inputs, nothing.backward))
        trial = call.differentiable_run()
        sources = (*trial.inputs, *trial.weights)
        return CallCost(
            forward_ns=self._time_ns(lambda: call.bind(call.fresh_arguments()), lambda run: run()),
            backward_ns=self._backward_ns(trial, sources),
            backward_input_ns=self._backward_ns(trial, trial.inputs),
            backward_weight_ns=self._backward_ns(trial, trial.weights),
            workspace_bytes=self._workspace_bytes(call, trial, sources),
        )

    def _backward_ns(self, trial: DifferentiableRun, sources: Sequence[GradientEdge]) -> int:
        if not sources:
            return 0
        return max(0, self._time_ns(lambda: sources, trial.backward) - self.engine_entry_ns[0])

    def _time_ns(self, prepare: Callable[[], T], action: Callable[[T], object]) -> int:
        """The median time of `action` on what `prepare` returns; preparing is not timed."""
        sample = steady_sample(lambda count: _timed(self.device, count, prepare, action))
        self.samples.append(sample)
        return sample.median_ns

    def _workspace_bytes(
        self, call: NodeCall, trial: DifferentiableRun, sources: Sequence[GradientEdge]
    ) -> int | None:
        """Of the forward or the backward, whichever takes more; None on a CPU, whose allocator does not say."""
        if self.device.type != "cuda":
            return None
        forward = _taken_bytes(self.device, lambda: call.bind(call.fresh_arguments())())
        return (
            max(forward, _taken_bytes(self.device, lambda: trial.backward(sources)))
            if sources
            else forward
        )


@dataclass(frozen=True)
class CachedCosts:
    """What nodes were measured to cost before, by their names, for a device of this memory."""

    costs: Mapping[str, CallCost]
    memory: Literal["cpu", "cuda"]
    fused_attention: tuple[FusedType, ...]
    name: ClassVar[str] = "measured"
    real: ClassVar[bool] = False

    def cost(self, call: NodeCall) -> CallCost:
        """As it was measured."""
        return self.costs[call.node.name]


def _timed(
    device: torch.device, count: int, prepare: Callable[[], T], action: Callable[[T], object]
) -> list[int]:
    """The times of `count` runs, queued without waiting in between."""
    clock, flush = Clock(device), _flusher(device)
    marks, queued = [], []
    clock.wait()
    for _ in range(count):
        prepared = prepare()
        flush()
        start, began = clock.mark(), time.perf_counter_ns()
        action(prepared)
        queued.append(time.perf_counter_ns() - began)
        marks.append((start, clock.mark()))
    clock.wait()
    times = [clock.between_ns(start, end) for start, end in marks]
    return (
        times if device.type != "cuda" else [max(pair) for pair in zip(times, queued, strict=True)]
    )


def _flusher(device: torch.device) -> Callable[[], object]:
    """Writes over the L2 cache of a GPU; nothing on a CPU."""
    if device.type != "cuda":
        return lambda: None
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.uint8, device=device).zero_


def _taken_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """What `run` takes on a GPU for a while and gives back before it ends."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = run()
    left = torch.cuda.memory_allocated(device)
    del kept
    return max(0, torch.cuda.max_memory_allocated(device) - left)


def _nothing(device: torch.device) -> DifferentiableRun:
    """A backward with nothing to do."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    return DifferentiableRun((leaf.view(1),), (get_gradient_edge(leaf),), (), (torch.ones(1, device=device),))


@contextmanager
def _on(device: torch.device, call: NodeCall) -> Iterator[NodeCall]:
    """The call on `device`, with all that it reads; as it is if it lies there already."""
    homes = {value.device for value in (*call.arguments, *call.parameters)}
    if all(home.type == device.type for home in homes):
        yield call
        return
    arguments = tuple(
        value.to(device).requires_grad_(value.requires_grad)
        for value in map(_detached, call.arguments)
    )
    with (
        moved_to(call.parameters, device),
        _cast_as_on_cpu(device, call.node),
        torch.device(device),
        _DeviceRedirection(device),
    ):
        yield replace(call, arguments=arguments)


def _detached(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.requires_grad)


class _DeviceRedirection(TorchFunctionMode):
    """What a graph asks of the CPU by name is asked of `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(
            torch.device,
            lambda named: self.device if named.type == "cpu" else named,
            (args, kwargs or {}),
        )
        if kwargs.get("device") == "cpu":
            kwargs["device"] = self.device
        return func(*args, **kwargs)


@contextmanager
def _cast_as_on_cpu(device: torch.device, node: fx.Node) -> Iterator[None]:
    """The autocast that is on for the CPU, around the node or in its region, is on for `device` instead."""
    context = node.meta.get("autograd_context")
    if context is not None:
        casts = tuple((device.type, *cast) for name, *cast in context.autocast if name == "cpu")
        node.meta["autograd_context"] = replace(context, autocast=casts)
    kind, enabled = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    try:
        with torch.autocast(device.type, dtype=kind, enabled=enabled):
            yield
    finally:
        if context is not None:
            node.meta["autograd_context"] = context
