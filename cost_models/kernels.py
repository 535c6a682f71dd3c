"""What a call launches: one kernel for each ATen operator that does more than make views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from pipecompile.cost_models.flops import CPU_ATTENTION
from pipecompile.cost_models.protocol import DifferentiableRun, NodeCall
from pipecompile.graph.pytrees import tensor_leaves

__all__ = ["Kernel", "CallKernels", "call_kernels"]

_COUNTS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **{operator: shape_wrapper(count) for operator, count in CPU_ATTENTION.items()},
}
# The first argument is read only where it is picked: as many bytes as are returned.
_GATHERS = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}
# The first argument is written and never read.
_OVERWRITES = {"bernoulli_", "copy_", "fill_", "normal_", "uniform_", "zero_"}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: what it computes, the bytes it reads and writes, and the type it computes in, such as "float32"."""

    operator: str
    flops: int
    bytes: int
    dtype: str

    @property
    def is_convolution(self) -> bool:
        """Whether cuDNN runs it on a GPU, with TF32 allowed."""
        return self.operator.startswith("convolution")


@dataclass(frozen=True, slots=True)
class CallKernels:
    """The kernels of a call, in order: its forward, and its backward as in `Cost`."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    backward_input: tuple[Kernel, ...]
    backward_weight: tuple[Kernel, ...]


def call_kernels(call: NodeCall) -> CallKernels:
    """What `call`, whose tensors are fake CPU ones, launches; on a GPU, under `as_on_cuda` of profiling."""
    arguments = call.fresh_arguments()
    with _KernelRecorder() as forward:
        call.run(arguments)
    trial = call.differentiable_run()
    return CallKernels(
        forward=tuple(forward.kernels),
        backward=_backward(trial, (*trial.inputs, *trial.weights)),
        backward_input=_backward(trial, trial.inputs),
        backward_weight=_backward(trial, trial.weights),
    )


def _backward(trial: DifferentiableRun, sources: Sequence[GradientEdge]) -> tuple[Kernel, ...]:
    if not sources:
        return ()
    with _KernelRecorder() as recorder:
        trial.backward(sources)
    return tuple(recorder.kernels)


class _KernelRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        kernel = _kernel(func, args, kwargs or {}, value)
        if kernel is not None:
            self.kernels.append(kernel)
        return value


def _kernel(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any
) -> Kernel | None:
    """What `func` launched; None where it allocates, or answers with views or no tensor at all."""
    operator = func._overloadpacket.__name__
    read, written = tensor_leaves((args, kwargs)), tensor_leaves(value)
    makes_views = not func._schema.is_mutable and _storages(written) <= _storages(read)
    if not any(output.numel() for output in written) or makes_views or operator in _ALLOCATIONS:
        return None
    count = _COUNTS.get(func._overloadpacket)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=value))
    if _argument(func, args, kwargs, "is_causal"):
        flops //= 2  # a fused kernel skips the half of the scores that is masked
    return Kernel(
        operator,
        flops,
        _read_bytes(operator, read, written) + _bytes(written),
        _compute_type(written),
    )


def _argument(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    places = [
        place for place, argument in enumerate(func._schema.arguments) if argument.name == name
    ]
    return args[places[0]] if places and places[0] < len(args) else kwargs.get(name)


def _read_bytes(operator: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    if operator in _GATHERS:
        return _bytes(written) + _bytes(read[1:])
    return _bytes(read[1:] if operator in _OVERWRITES else read)


def _bytes(values: Iterable[Tensor]) -> int:
    """What the elements take in memory, where an expanded tensor repeats what it has."""
    distinct = {id(value): value for value in values}.values()
    return sum(
        min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
        for value in distinct
    )


def _compute_type(written: Sequence[Tensor]) -> str:
    return str(written[0].dtype).removeprefix("torch.")


def _storages(values: Iterable[Tensor]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values}
