"""The cost model `flops`: floating-point operations and bytes moved, on a nominal device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pipecompile.cost_models.protocol import FREE_CALL, CallCost, DifferentiableRun, NodeCall
from pipecompile.graph.storages import size_bytes
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.graph import FUSED_ATTENTION, FusedType, TimeUnit

__all__ = ["BYTES_PER_NS", "FLOPS_PER_NS", "UNCOUNTED", "Flops"]

FLOPS_PER_NS = 10_000  # 10 TFLOP/s
BYTES_PER_NS = 1_000  # 1 TB/s


def _attention(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    return int(sdpa_flop_count(query, _for_each_head(key, query), _for_each_head(value, query)))


def _attention_backward(
    gradient: torch.Size,
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    *_: object,
    **__: object,
) -> int:
    key, value = _for_each_head(key, query), _for_each_head(value, query)
    return int(sdpa_backward_flop_count(gradient, query, key, value))


def _for_each_head(shape: torch.Size, query: torch.Size) -> torch.Size:
    """Return the shape of keys or values of which each head of the query has its own.

    Heads that share them compute no less. PyTorch 2.11 counts only where there are as many.
    """
    batch, _, *rest = shape
    return torch.Size((batch, query[1], *rest))


def _grouped_product(left: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    """Return the FLOPs of the products of groups, as those of experts with their tokens.

    Two batches of matrices have a product for each group. Otherwise groups are ranges of rows, of
    columns or of what is summed over, and together they are as much as one product.
    """
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


# What PyTorch does not count, or not in all versions: of fused attention it knows the kernels of
# GPUs, and fake tensors are on the CPU, which has one of its own.
UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention: _attention,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_cudnn_attention: _attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    torch.ops.aten._grouped_mm: _grouped_product,
}
# These read only the rows that they return, not the whole table.
_GATHERS = {"torch.nn.Embedding", "torch.nn.EmbeddingBag", "torch.nn.functional.embedding"}


@dataclass(frozen=True)
class Flops:
    """Says what a call costs by its FLOPs and the bytes it moves, at 10 TFLOP/s and 1 TB/s.

    A time is ceil(max(FLOPs / 10 000, bytes / 1 000)) ns. For float32, y = x @ w with shapes
    (1000, 1000) has 2 · 10⁹ FLOPs (200 000 ns) and moves 12 · 10⁶ bytes (12 000 ns): its forward
    takes 200 000 ns.

    The forward moves its arguments, the parameters that it reads and its outputs. A backward moves
    the gradients of the outputs, all that the forward read, and the gradients that it computes.
    Views cost nothing. FLOPs are those of `torch.utils.flop_counter` and of `UNCOUNTED`: matrix
    products, convolutions and attention, where a multiply-add counts as two. Costs are the same on
    every machine.
    """

    name: ClassVar[str] = "flops"
    real: ClassVar[bool] = False
    time_unit: ClassVar[TimeUnit] = "relative"
    reproducible: ClassVar[bool] = True
    by_signature: ClassVar[bool] = True
    allocator: ClassVar[AllocatorName] = "cpu"
    fused_attention: ClassVar[tuple[FusedType, ...]] = FUSED_ATTENTION
    costs_by_signature: dict[Hashable, CallCost] = field(
        default_factory=dict, init=False, repr=False
    )

    def cost(self, call: NodeCall) -> CallCost:
        """Return the cost of `call`, whose tensors are fake."""
        if call.signature not in self.costs_by_signature:
            self.costs_by_signature[call.signature] = _cost(call)
        return self.costs_by_signature[call.signature]


def _cost(call: NodeCall) -> CallCost:
    """Return the cost of a call by its FLOPs and bytes; views are free."""
    arguments = call.fresh_arguments()
    forward_flops, outputs = _counted(lambda: call.run(arguments))
    # A view returns storages that it was given, and writes nothing.
    if not call.mutates and _storages(outputs) <= _storages((*arguments, *call.parameters)):
        return FREE_CALL
    # A backward reads what the forward read, besides the gradients of the outputs.
    read = size_bytes(arguments) + _parameter_bytes(call, outputs)
    run = call.differentiable_run()
    inputs, weights = size_bytes(call.inputs), size_bytes(call.weights)
    moved = size_bytes(run.output_gradients) + read
    return CallCost(
        forward_ns=_time_ns(forward_flops, read + size_bytes(outputs)),
        backward_ns=_backward_ns(run, (*run.inputs, *run.weights), moved + inputs + weights),
        backward_input_ns=_backward_ns(run, run.inputs, moved + inputs),
        backward_weight_ns=_backward_ns(run, run.weights, moved + weights),
    )


def _parameter_bytes(call: NodeCall, outputs: Sequence[Tensor]) -> int:
    return size_bytes(outputs) if call.operator in _GATHERS else size_bytes(call.parameters)


def _backward_ns(run: DifferentiableRun, sources: Sequence[GradientEdge], moved: int) -> int:
    if not sources:
        return 0
    flops, _ = _counted(lambda: run.backward(sources))
    return _time_ns(flops, moved)


def _time_ns(flops: int, moved: int) -> int:
    return max(-(-flops // FLOPS_PER_NS), -(-moved // BYTES_PER_NS))


def _counted(action: Callable[[], Any]) -> tuple[int, Any]:
    """Return the FLOPs of `action` and its result."""
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    counter.mod_tracker = _AnyModule()  # type: ignore[assignment]
    with counter:
        result = action()
    return counter.get_total_flops(), result


class _AnyModule(nullcontext[None]):
    """Stands for what tells modules apart. That sets hooks on their inputs, and no checkpoint can
    run its module with these in a backward of some inputs only.
    """

    parents = frozenset({"Global"})


def _storages(values: Iterable[Tensor]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values}
