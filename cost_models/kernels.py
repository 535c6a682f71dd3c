"""The kernels that a call launches: one for each ATen operator that does more than make views.

The roofline says what they cost, and a calibration lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from pipecompile.cost_models.device import OperatorClass
from pipecompile.cost_models.flops import UNCOUNTED
from pipecompile.cost_models.protocol import DifferentiableRun, NodeCall
from pipecompile.graph.pytrees import tensor_leaves

__all__ = ["CallKernels", "Kernel", "call_kernels"]

_COUNTS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **{operator: shape_wrapper(count) for operator, count in UNCOUNTED.items()},
}
# Of the first argument only the elements that are returned are read.
_GATHERS = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}
# The first argument is written and not read.
_OVERWRITES = {"bernoulli_", "copy_", "fill_", "normal_", "uniform_", "zero_"}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: its FLOPs, the bytes it reads and writes, and its type, such as "float32"."""

    operator: str
    flops: int
    bytes: int
    dtype: str

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution: cuDNN runs these, and PyTorch allows TF32 for them."""
        return self.operator.startswith("convolution")

    @property
    def operator_class(self) -> OperatorClass:
        """The class whose efficiency it has; what has no FLOPs counted only moves bytes."""
        if not self.flops:
            return "move"
        if self.is_convolution:
            return "convolution"
        return "attention" if "attention" in self.operator else "product"


@dataclass(frozen=True, slots=True)
class CallKernels:
    """The kernels of a call in order, of its forward and of the backwards as in `CallCost`."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    backward_input: tuple[Kernel, ...]
    backward_weight: tuple[Kernel, ...]


def call_kernels(call: NodeCall) -> CallKernels:
    """Return the kernels of `call`, whose tensors are fake CPU tensors.

    Inside `as_on_cuda` (profiling/cuda.py) these are the kernels of a GPU.
    """
    arguments = call.fresh_arguments()
    with _KernelRecorder() as forward:
        call.run(arguments)
    # Outside of the recorder: this forward is one for the backward, and was listed already.
    run = call.differentiable_run()
    return CallKernels(
        forward=tuple(forward.kernels),
        backward=_backward_kernels(run, (*run.inputs, *run.weights)),
        backward_input=_backward_kernels(run, run.inputs),
        backward_weight=_backward_kernels(run, run.weights),
    )


def _backward_kernels(
    run: DifferentiableRun, sources: Sequence[GradientEdge]
) -> tuple[Kernel, ...]:
    if not sources:
        return ()
    with _KernelRecorder() as recorder:
        run.backward(sources)
    return tuple(recorder.kernels)


class _KernelRecorder(TorchDispatchMode):
    """Runs operators and lists the kernels that they launch."""

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
    """Return the kernel of `func`, if it has one.

    What only allocates, only makes views or returns no tensor has none.
    """
    operator = func._overloadpacket.__name__
    read, written = tensor_leaves((args, kwargs)), tensor_leaves(value)
    # A view returns storages that it was given, and writes nothing.
    makes_views = not func._schema.is_mutable and _storages(written) <= _storages(read)
    if not any(output.numel() for output in written) or makes_views or operator in _ALLOCATIONS:
        return None
    count = _COUNTS.get(func._overloadpacket)
    # Operators without a count, such as element-wise ones, are decided by their bytes.
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=value))
    if _argument(func, args, kwargs, "is_causal"):
        flops //= 2  # a fused kernel skips the masked half of the scores
    # What works in place reads its argument and returns it: that counts as read and as written.
    moved = _read_bytes(operator, read, written) + _bytes(written)
    dtype = str(written[0].dtype).removeprefix("torch.")
    return Kernel(operator, flops, moved, dtype)


def _argument(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return the argument that the operator's schema calls `name`; None if it was not passed."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name and position < len(args):
            return args[position]
    return kwargs.get(name)


def _read_bytes(operator: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    if operator in _GATHERS:
        return _bytes(written) + _bytes(read[1:])
    return _bytes(read[1:] if operator in _OVERWRITES else read)


def _bytes(values: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors; an expanded one counts as much as its storage."""
    # x · x reads x once. A row that is expanded over 1,000 is read from memory as one row.
    distinct = {id(value): value for value in values}.values()
    return sum(
        min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
        for value in distinct
    )


def _storages(values: Iterable[Tensor]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values}
