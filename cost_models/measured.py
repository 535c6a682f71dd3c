"""The cost model `measured`: each distinct call is run on a device until its times are steady."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pipecompile.cost_models.clock import Clock, TimeSample, steady_sample
from pipecompile.cost_models.device_transfer import moved_to, without_hooks
from pipecompile.cost_models.protocol import CallCost, DifferentiableRun, NodeCall
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.graph import FUSED_ATTENTION, FusedType, TimeUnit

__all__ = ["VERSION", "CachedCosts", "Measured"]

VERSION = 5  # of the method: the cache does not reuse costs that an older method measured
FLUSHES = 16  # before each run on a GPU: half a millisecond, in which Python queues the run
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """Runs each distinct call on `device` forward and backward, and takes the median of its times.

    On a CPU this is wall time, with tensors that the run before has left in the caches: in a step
    the node before leaves them there. On a GPU it is the time between CUDA events around each run,
    which is queued while the L2 cache is flushed, or the time to queue it if that is longer. The
    time that the host takes to enter the autograd engine is deducted from each backward, because a
    stage enters it only once.
    Calls with equal signatures are measured once.

    A model on another device is moved to `device` node by node: the parameters and inputs of one
    node at a time.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    name: ClassVar[str] = "measured"
    real: ClassVar[bool] = True
    time_unit: ClassVar[TimeUnit] = "ns"
    reproducible: ClassVar[bool] = False
    by_signature: ClassVar[bool] = True
    costs_by_signature: dict[Hashable, CallCost] = field(
        default_factory=dict, init=False, repr=False
    )
    costs_by_name: dict[str, CallCost] = field(default_factory=dict, init=False, repr=False)
    samples: list[TimeSample] = field(default_factory=list, init=False, repr=False)
    engine_entry_ns: list[int] = field(default_factory=list, init=False, repr=False)

    @property
    def allocator(self) -> AllocatorName:
        """The allocator of the device."""
        return "cuda" if self.device.type == "cuda" else "cpu"

    @property
    def fused_attention(self) -> tuple[FusedType, ...]:
        """The data types for which attention is fused: bfloat16 from compute capability 8.0 on.

        See aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
        """
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 0):
            return ("float16", "float32")
        return FUSED_ATTENTION

    @property
    def spread(self) -> float:
        """The median, over all samples, of the quartile distance relative to the median time."""
        spreads = [sample.spread_ns / max(1, sample.median_ns) for sample in self.samples]
        return median(spreads or [0.0])

    def cost(self, call: NodeCall) -> CallCost:
        """Return the cost of `call`, whose tensors are real; no `.grad` is changed."""
        if call.signature not in self.costs_by_signature:
            # Measuring must not have effects: hooks may be the user's.
            with without_hooks(call.parameters), _call_on(self.device, call) as moved:
                self.costs_by_signature[call.signature] = self._measure(moved)
        cost = self.costs_by_name[call.node.name] = self.costs_by_signature[call.signature]
        return cost

    def _measure(self, call: NodeCall) -> CallCost:
        """Return the median times of a call, each measured by itself."""
        # Measured once, before the first call.
        if not self.engine_entry_ns:
            empty = _empty_backward(self.device)
            self.engine_entry_ns.append(self._time_ns(lambda: empty.inputs, empty.backward))
        run = call.differentiable_run()
        sources = (*run.inputs, *run.weights)
        # The forward comes last: one that writes in place, such as a loss that keeps a running
        # mean, overwrites what the backward of an earlier one needs.
        cost = CallCost(
            forward_ns=0,
            backward_ns=self._backward_ns(run, sources),
            backward_input_ns=self._backward_ns(run, run.inputs),
            backward_weight_ns=self._backward_ns(run, run.weights),
            workspace_bytes=self._workspace_bytes(call, run, sources),
        )
        forward_ns = self._time_ns(
            lambda: call.bind(call.fresh_arguments()), lambda forward: forward()
        )
        return replace(cost, forward_ns=forward_ns)

    def _backward_ns(self, run: DifferentiableRun, sources: Sequence[GradientEdge]) -> int:
        if not sources:
            return 0
        return self._time_ns(lambda: sources, run.backward, self.engine_entry_ns[0])

    def _time_ns(
        self, prepare: Callable[[], T], action: Callable[[T], object], entry_ns: int = 0
    ) -> int:
        """Return the median time of `action` on what `prepare` returns, without what the host takes
        to enter it; only `action` is timed.
        """
        sample = steady_sample(lambda count: _timed(self.device, count, prepare, action, entry_ns))
        self.samples.append(sample)
        if self.device.type == "cuda":
            return sample.median_ns
        # Noise can make a tiny backward faster than an empty one.
        return max(0, sample.median_ns - entry_ns)

    def _workspace_bytes(
        self, call: NodeCall, run: DifferentiableRun, sources: Sequence[GradientEdge]
    ) -> int | None:
        """Return the workspace of the forward or of the backward, whichever is larger.

        Return None on a CPU, whose allocator does not report it.
        """
        if self.device.type != "cuda":
            return None
        forward = _temporary_bytes(self.device, lambda: call.bind(call.fresh_arguments())())
        if not sources:
            return forward
        return max(forward, _temporary_bytes(self.device, lambda: run.backward(sources)))


@dataclass(frozen=True)
class CachedCosts:
    """A cost model that returns costs of the cache, by the names of nodes."""

    costs: Mapping[str, CallCost]
    allocator: AllocatorName
    fused_attention: tuple[FusedType, ...]
    name: ClassVar[str] = "measured"
    real: ClassVar[bool] = False
    time_unit: ClassVar[TimeUnit] = "ns"
    reproducible: ClassVar[bool] = False
    by_signature: ClassVar[bool] = False

    def cost(self, call: NodeCall) -> CallCost:
        """Return the cost that was measured before."""
        return self.costs[call.node.name]


def _timed(
    device: torch.device,
    count: int,
    prepare: Callable[[], T],
    action: Callable[[T], object],
    entry_ns: int,
) -> list[int]:
    """Return the times in ns of `count` runs, which are queued without waiting in between; on a GPU
    without the time that the host takes to enter `action`, in which kernels may run.
    """
    clock, flush = Clock(device), _flusher(device)
    marks, queueing_ns = [], []
    clock.wait()
    for _ in range(count):
        # Before the first mark: copies of arguments are no part of the node.
        prepared = prepare()
        flush()
        start, began = clock.mark(), time.perf_counter_ns()
        action(prepared)
        queueing_ns.append(time.perf_counter_ns() - began)
        marks.append((start, clock.mark()))
    clock.wait()
    times = [clock.between_ns(start, end) for start, end in marks]
    if device.type != "cuda":
        return times
    # While it is flushed the GPU is busy, so that its kernels run without a pause. In a step it may
    # have to wait: it cannot start a kernel before Python has queued it.
    pairs = zip(times, queueing_ns, strict=True)
    return [max(kernels_ns, queued_ns - entry_ns) for kernels_ns, queued_ns in pairs]


def _flusher(device: torch.device) -> Callable[[], object]:
    """Return a function that overwrites the L2 cache of a GPU several times; on a CPU it does
    nothing.
    """
    if device.type != "cuda":
        return lambda: None
    # Twice the cache, so that nothing of what was there before stays.
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    cache = torch.empty(size, dtype=torch.uint8, device=device)
    return lambda: [cache.zero_() for _ in range(FLUSHES)]


def _temporary_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the bytes that `run` allocates on a GPU and frees before it ends, at most."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    # With the result still there: what stays after the run is an
    # output or a saved tensor, which the run on fake tensors counts.
    bytes_after = torch.cuda.memory_allocated(device)
    del result
    return max(0, torch.cuda.max_memory_allocated(device) - bytes_after)


def _empty_backward(device: torch.device) -> DifferentiableRun:
    """Return a run whose backward has nothing to compute."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    return DifferentiableRun(
        (leaf.view(1),), (get_gradient_edge(leaf),), (), (torch.ones(1, device=device),)
    )


@contextmanager
def _call_on(device: torch.device, call: NodeCall) -> Iterator[NodeCall]:
    """Yield the call on `device` with all that it reads, unchanged if it is there already."""
    types = {value.device.type for value in (*call.arguments, *call.parameters)}
    if types <= {device.type}:
        yield call
        return
    arguments = tuple(
        value.to(device).requires_grad_(value.requires_grad)
        for value in map(_detached, call.arguments)
    )
    with (
        # The last two are for tensors that the node makes itself:
        # `torch.device` for those that name no device, the redirection
        # for those that name the CPU, as a graph captured there does.
        moved_to(call.parameters, device),
        _cast_as_on_cpu(device, call.node),
        torch.device(device),
        _DeviceRedirection(device),
    ):
        yield replace(call, arguments=arguments)


def _detached(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.requires_grad)


class _DeviceRedirection(TorchFunctionMode):
    """Replaces the CPU by `device` where a graph names it as an argument."""

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
    """During the block, enable autocast for `device` as it is for the CPU.

    This holds for autocast around the node and for that of its region of the model.
    """
    # Inside a region of the model the node's note decides, around it the current setting.
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
