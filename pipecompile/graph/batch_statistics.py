"""Batch norms whose running averages wait for the end of the step.

Under `batch_norm="minibatch"` the pass `DeferStatistics` puts a `DeferredBatchNorm` into the graph
of a stage in the place of each node that updates running averages. Microbatches are normalised as
ever, and what they would have added to the averages is recorded:

    MinibatchStatistics.of_step()      opens a record, and commits it at the end of the step
        stage.forward, microbatch 0        record_forward(key)     count, mean, variance
        stage.forward, microbatch 1        record_forward(key)     count, mean, variance
        recompute, backward, evaluation                            nothing

Only forwards are recorded, so a microbatch counts once however often it is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from pipecompile.errors import InputError
from pipecompile.graph.model_state import swapped_state
from pipecompile.graph.random_streams import StreamKey

__all__ = [
    "BATCH_NORMS",
    "BatchNormCall",
    "DeferredBatchNorm",
    "MicrobatchStatistics",
    "RunningAverages",
    "StepStatistics",
    "is_other_batch_norm",
    "record_forward",
    "record_statistics",
]

BATCH_NORMS: Mapping[Any, tuple[str, ...]] = {
    functional.batch_norm: (
        *("input", "running_mean", "running_var", "weight", "bias"),
        *("training", "momentum", "eps"),
    ),
    torch.batch_norm: (
        *("input", "weight", "bias", "running_mean", "running_var"),
        *("training", "momentum", "eps", "cudnn_enabled"),
    ),
}
"""The functions whose running averages can wait, with the names of their parameters."""


class BatchNormCall(NamedTuple):
    """One batch norm in the forward of a microbatch: `node` calls `number` others before it.

    A module that is called twice is two nodes, so its averages are updated twice.
    """

    node: str
    number: int


@dataclass(frozen=True)
class RunningAverages:
    """The buffers that a batch norm updates; `momentum` is None for a cumulative average.

    `batches` is the number of updates so far, None if it is not counted.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor | None
    momentum: float | None


@dataclass(frozen=True)
class MicrobatchStatistics:
    """The statistics of each channel: of `count` elements the mean and the unbiased variance."""

    count: int
    mean: Tensor
    variance: Tensor


@dataclass
class StepStatistics:
    """What the batch norms of a minibatch recorded, in the order in which stages first called them.

    `recorded` has the statistics of each call, by step and microbatch.
    """

    averages: dict[BatchNormCall, RunningAverages] = field(default_factory=dict)
    recorded: dict[BatchNormCall, dict[StreamKey, MicrobatchStatistics]] = field(
        default_factory=dict
    )

    def add(
        self,
        call: BatchNormCall,
        key: StreamKey,
        averages: RunningAverages,
        statistics: MicrobatchStatistics,
    ) -> None:
        """Record one microbatch of a call; if it was recorded before, this takes its place."""
        self._set_averages(call, averages)
        # A step that begins once more, after an early update that was wrong, records the same
        # keys.
        self.recorded.setdefault(call, {})[key] = statistics

    def add_all(self, later: StepStatistics) -> None:
        """Add what a later step recorded."""
        for call, by_key in later.recorded.items():
            self._set_averages(call, later.averages[call])
            self.recorded.setdefault(call, {}).update(by_key)

    def _set_averages(self, call: BatchNormCall, averages: RunningAverages) -> None:
        """Note what a call updates; InputError if one of this name updates something else.

        Microbatches of other sizes have graphs of their own, and where the forward branches on the
        size, a node of one may have the name of another one's batch norm.
        """
        if call in self.averages and self.averages[call].mean is not averages.mean:
            raise InputError(
                f"{call.node} updates one batch norm in microbatches of one size and another one "
                "in those of another size, so that batch_norm='minibatch' cannot merge them; "
                "choose batch_norm='microbatch'"
            )
        self.averages[call] = averages


_current_step: ContextVar[StepStatistics | None] = ContextVar(
    "pipecompile_statistics", default=None
)
_current_forward: ContextVar[StreamKey | None] = ContextVar("pipecompile_forward", default=None)


@contextmanager
def record_statistics() -> Iterator[StepStatistics]:
    """Yield what the deferred batch norms of the microbatches in the block record."""
    step = StepStatistics()
    token = _current_step.set(step)
    try:
        yield step
    finally:
        _current_step.reset(token)


def record_forward(key: StreamKey) -> AbstractContextManager[None]:
    """Let deferred batch norms record in the block, a stage's forward of the microbatch `key`."""
    return nullcontext() if _current_step.get() is None else _recorded_forward(key)


@contextmanager
def _recorded_forward(key: StreamKey) -> Iterator[None]:
    token = _current_forward.set(key)
    try:
        yield
    finally:
        _current_forward.reset(token)


class DeferredBatchNorm:
    """A function that calls `target` but leaves running averages for the end of the step.

    `target` is a batch norm of torch, or `operator.call`, whose first argument is a module. Within
    a module all batch norms are deferred, also those of submodules and of a forward of its own.
    """

    def __init__(self, target: Callable[..., Any], node: str) -> None:
        self.__name__ = "deferred_batch_norm"  # fx names the global of its code by it
        self.target = target
        self.node = node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `target` returns. InputError if it updates averages in a way of its own."""
        module = args[0] if args else None
        if not isinstance(module, nn.Module):
            with _Deferral(self.node, []):
                return self.target(*args, **kwargs)
        norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        # A module counts its batches itself, so it counts on a copy.
        counters = {
            id(counter): counter.clone()
            for norm in norms
            if (counter := norm.num_batches_tracked) is not None
        }
        with _Deferral(self.node, norms), swapped_state(module, counters):
            return self.target(*args, **kwargs)


class _Deferral(TorchFunctionMode):
    """A mode in which batch norms that train update temporary tensors instead of their averages.

    With a momentum of 1 and averages of 0, the kernel's own update leaves exactly the statistics of
    the microbatch in the temporary tensors: nothing is computed twice, and the same kernel runs.
    """

    def __init__(self, node: str, norms: list[_BatchNorm]) -> None:
        super().__init__()
        self._node = node
        self._norms = norms
        # Counters are swapped while the mode is active, so the real ones are looked up here.
        self._counters = {id(norm.running_mean): norm.num_batches_tracked for norm in norms}
        self._cumulative = {id(norm.running_mean) for norm in norms if norm.momentum is None}
        self._versions = self._current_versions()
        self._calls = 0

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if raised[0] is None and self._current_versions() != self._versions:
            raise InputError(
                f"{self._node} writes to its running averages itself, which batch_norm='minibatch' "
                "cannot leave for the end of the step; let it call torch.nn.functional.batch_norm, "
                "or choose batch_norm='microbatch'"
            )

    def _current_versions(self) -> list[int]:
        buffers = [value for norm in self._norms for value in (norm.running_mean, norm.running_var)]
        # The kernels write to averages without raising their versions: a version that has risen
        # tells of a write in the Python of the module.
        return [value._version for value in buffers if value is not None]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in BATCH_NORMS:
            if is_other_batch_norm(func):
                raise InputError(other_batch_norm_error(self._node, func))
            return func(*args, **kwargs)
        arguments = {**dict(zip(BATCH_NORMS[func], args, strict=False)), **kwargs}
        if not arguments.get("training") or arguments.get("running_mean") is None:
            return func(*args, **kwargs)
        return self._normalised(func, arguments)

    def _normalised(self, func: Any, arguments: dict[str, Any]) -> Any:
        """Run a batch norm on temporary tensors, and record what it leaves there."""
        mean, variance = arguments["running_mean"], arguments["running_var"]
        momentum = arguments.get("momentum", 0.1)
        temporary = torch.zeros_like(mean), torch.zeros_like(variance)
        arguments |= {"running_mean": temporary[0], "running_var": temporary[1], "momentum": 1.0}
        result = func(**arguments)
        call, self._calls = BatchNormCall(self._node, self._calls), self._calls + 1
        # In a recompute there is no key: nothing is recorded, and the averages stay as they are
        # all the same.
        step, key = _current_step.get(), _current_forward.get()
        if step is not None and key is not None:
            values: Tensor = arguments["input"]
            averages = RunningAverages(
                mean,
                variance,
                self._counters.get(id(mean)),
                None if id(mean) in self._cumulative else momentum,
            )
            # Of (N, C, H, W) each channel has N · H · W elements: (4, 3, 8, 8) has 256.
            count = values.numel() // values.shape[1]
            step.add(call, key, averages, MicrobatchStatistics(count, *temporary))
        return result


def is_other_batch_norm(function: Any) -> bool:
    """Return whether `function` is a batch norm of torch whose averages cannot wait."""
    return "batch_norm" in getattr(function, "__name__", "") and function not in BATCH_NORMS


def other_batch_norm_error(node: str, function: Any) -> str:
    """Return why `node`, which calls such a function, is refused."""
    return (
        f"{node} calls {function.__name__}, whose running averages batch_norm='minibatch' cannot "
        "leave for the end of the step; call torch.nn.functional.batch_norm, or choose "
        "batch_norm='microbatch'"
    )
