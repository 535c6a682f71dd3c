"""What a cost model is: one call of a node in, its times out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.ir.graph import FusedType

__all__ = ["FREE_CALL", "NodeCall", "CallCost", "CostModel", "DifferentiableRun"]


@dataclass(frozen=True, slots=True)
class CallCost:
    """Nanoseconds of one call: its forward, and its backward for everything, for its inputs, for its parameters.

    `workspace_bytes` is the scratch that its kernels were seen to take beside tensors that fake ones show; None where
    nobody looked, and profiling/kernel_scratch.py has to know.
    """

    forward_ns: int
    backward_ns: int
    backward_input_ns: int
    backward_weight_ns: int
    workspace_bytes: int | None = None


FREE_CALL = CallCost(0, 0, 0, 0)


class CostModel(Protocol):
    """Prices calls one at a time, in the order of the forward."""

    @property
    def name(self) -> str:
        """As a user writes it after `--costs`."""

    @property
    def memory(self) -> Literal["cpu", "cuda"]:
        """Whose allocator and kernels decide what is held, as memory.py and profiling/cuda.py know them."""

    @property
    def fused_attention(self) -> Sequence[FusedType]:
        """The data types for which it fuses attention, where `memory` is "cuda"; a CPU always does."""

    @property
    def real(self) -> bool:
        """Whether calls must carry real tensors; else they carry fake ones, under an active FakeTensorMode."""

    def cost(self, call: NodeCall) -> CallCost:
        """The times of `call`; grad mode is on. It may run the call as often as it likes."""


@dataclass(frozen=True)
class DifferentiableRun:
    """A call that has run on arguments of its own and can be differentiated, as often as needed."""

    outputs: tuple[Tensor, ...]
    inputs: tuple[GradientEdge, ...]
    weights: tuple[GradientEdge, ...]
    gradients: tuple[Tensor, ...]

    def backward(self, sources: Sequence[GradientEdge]) -> tuple[Tensor | None, ...]:
        """The gradients of `sources`, of which there is at least one; no `.grad` is touched."""
        return torch.autograd.grad(
            self.outputs, sources, self.gradients, retain_graph=True, allow_unused=True
        )


@dataclass(frozen=True)
class NodeCall:
    """One node as a function of the tensors that flow into it.

    `arguments` are the actual values, parameters and buffers apart; `differentiable` says which of them carry a
    gradient in the model, `mutates` whether the node writes to any. `parameters` are the parameters and buffers it
    reads. `bind` takes replacements of the arguments and gives what runs the node on them. `configuration` is all
    else that decides what it does: the operator or the module's settings, the constants among its arguments.
    """

    node: fx.Node
    operator: str
    configuration: Hashable
    bind: Callable[[Sequence[Tensor]], Callable[[], Any]]
    arguments: tuple[Tensor, ...]
    differentiable: tuple[bool, ...]
    parameters: tuple[Tensor, ...]
    mutates: bool

    @property
    def signature(self) -> Hashable:
        """Calls of equal signature cost the same: one operator, configured alike, on tensors that differ in values."""
        layouts = (tuple(map(_layout, self.arguments)), tuple(map(_layout, self.parameters)))
        weights = tuple(parameter.requires_grad for parameter in self.parameters)
        return (
            self.operator,
            self.configuration,
            layouts,
            self.differentiable,
            weights,
            self.mutates,
        )

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments that receive a gradient."""
        return tuple(
            a for a, wanted in zip(self.arguments, self.differentiable, strict=True) if wanted
        )

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The parameters that receive a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.requires_grad)

    def fresh_arguments(self) -> tuple[Tensor, ...]:
        """Arguments to run on: detached, differentiable as in the model, and copied where the node writes to them."""
        pairs = zip(self.arguments, self.differentiable, strict=True)
        leaves = tuple(argument.detach().requires_grad_(wanted) for argument, wanted in pairs)
        return tuple(leaf.clone() for leaf in leaves) if self.mutates else leaves

    def run(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors the node returns; a node that returns none has written to its arguments."""
        return tensor_leaves(self.bind(arguments)()) or tuple(arguments)

    def differentiable_run(self) -> DifferentiableRun:
        """Runs the node once on fresh arguments, for its backward."""
        arguments = self.fresh_arguments()
        # Edges, not tensors: an in-place node moves its argument's history, the edge stays where the value entered.
        inputs = tuple(
            get_gradient_edge(argument) for argument in arguments if argument.requires_grad
        )
        outputs = tuple(output for output in self.run(arguments) if output.requires_grad)
        if not outputs:
            return DifferentiableRun((), (), (), ())
        weights = tuple(get_gradient_edge(weight) for weight in self.weights)
        return DifferentiableRun(outputs, inputs, weights, tuple(torch.ones_like(output) for output in outputs))


def _layout(value: Tensor) -> Hashable:
    return tuple(value.shape), value.stride(), value.dtype, value.device
