"""The protocol of cost models: from the call of a node to its times.

Profiling makes one `NodeCall` for each node, in the order of the forward, and asks the cost model
for its `CallCost`. docs/design/cost-models.md shows how to write a cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.graph import FusedType, TimeUnit

__all__ = ["FREE_CALL", "CallCost", "CostModel", "DifferentiableRun", "NodeCall"]


@dataclass(frozen=True, slots=True)
class CallCost:
    """The times of one call in nanoseconds: its forward, its whole backward and the halves of that.

    `workspace_bytes` is what its kernels take, if that was measured, besides the tensors that a run
    on fake tensors shows. If it is None, profiling/kernel_workspace.py supplies a margin.
    """

    forward_ns: int
    backward_ns: int
    backward_input_ns: int
    backward_weight_ns: int
    workspace_bytes: int | None = None


FREE_CALL = CallCost(0, 0, 0, 0)


class CostModel(Protocol):
    """Says what calls cost, one by one, in the order of the forward."""

    @property
    def name(self) -> str:
        """The name that a user writes after `--costs`."""

    @property
    def allocator(self) -> AllocatorName:
        """Whose allocator and kernels decide which bytes are held (see profiling/cuda.py)."""

    @property
    def fused_attention(self) -> Sequence[FusedType]:
        """The data types for which a GPU fuses attention; a CPU always does."""

    @property
    def real(self) -> bool:
        """Whether calls must have real tensors; else they have fake ones."""

    @property
    def time_unit(self) -> TimeUnit:
        """Whether times are predicted nanoseconds ("ns"), or only compare nodes ("relative").

        Reports print relative times without seconds, so that nobody takes them for a prediction.
        """

    @property
    def reproducible(self) -> bool:
        """Whether a later run gives the same costs, on every machine that has the model's files.

        `check` then makes the plan again, to find whether the costs have changed.
        """

    @property
    def by_signature(self) -> bool:
        """Whether calls of one `signature` cost the same.

        Equal blocks of a graph are then asked about a few times only, and else every node is.
        """

    def cost(self, call: NodeCall) -> CallCost:
        """Return the times of `call`, which may be run any number of times.

        Gradients are on. If tensors are fake, their FakeTensorMode is active.
        """


@dataclass(frozen=True)
class DifferentiableRun:
    """A call that has run on arguments of its own, and can be differentiated any number of times.

    `inputs` and `weights` are where the gradients of arguments and parameters come out.
    """

    outputs: tuple[Tensor, ...]
    inputs: tuple[GradientEdge, ...]
    weights: tuple[GradientEdge, ...]
    output_gradients: tuple[Tensor, ...]

    def backward(self, sources: Sequence[GradientEdge]) -> tuple[Tensor | None, ...]:
        """Return the gradients of `sources`, at least one; no `.grad` is changed."""
        # `retain_graph`, since it runs again and again to be timed; `allow_unused`, since an
        # argument may have no influence on what is returned.
        return torch.autograd.grad(
            self.outputs, sources, self.output_gradients, retain_graph=True, allow_unused=True
        )


@dataclass(frozen=True)
class NodeCall:
    """One node as a function of the tensors that flow into it.

    `arguments` are its tensor arguments, without parameters and buffers. `differentiable` says
    which of them have a gradient in the model, and `mutates` whether the node writes to any.
    `parameters` are the parameters and buffers that it reads. `bind` takes other arguments and
    returns a function that runs the node on them. `configuration` is everything else that decides
    what the node does: the settings of the operator or module, and constants among the arguments.
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
        """What decides the cost: calls of equal signature differ only in the values of tensors."""
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
        pairs = zip(self.arguments, self.differentiable, strict=True)
        return tuple(argument for argument, has_gradient in pairs if has_gradient)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The parameters that receive a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.requires_grad)

    def fresh_arguments(self) -> tuple[Tensor, ...]:
        """Return arguments to run on: detached, and with gradients as in the model.

        They are copies if the node writes to its arguments.
        """
        pairs = zip(self.arguments, self.differentiable, strict=True)
        # Detached, so that a backward ends here and does not go on through the nodes before.
        leaves = tuple(argument.detach().requires_grad_(flag) for argument, flag in pairs)
        return tuple(leaf.clone() for leaf in leaves) if self.mutates else leaves

    def run(self, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that the node returns, or its arguments if it returns none.

        A node that returns no tensor has written to its arguments.
        """
        return tensor_leaves(self.bind(arguments)()) or tuple(arguments)

    def differentiable_run(self) -> DifferentiableRun:
        """Run the node once on fresh arguments; return the run, ready for its backward."""
        arguments = self.fresh_arguments()
        # Edges instead of tensors: a node that works in place gives its argument a new history, and
        # the edge stays where the value entered.
        inputs = tuple(
            get_gradient_edge(argument) for argument in arguments if argument.requires_grad
        )
        outputs = tuple(output for output in self.run(arguments) if output.requires_grad)
        if not outputs:  # nothing flows back through this node
            return DifferentiableRun((), (), (), ())
        weights = tuple(get_gradient_edge(weight) for weight in self.weights)
        return DifferentiableRun(
            outputs, inputs, weights, tuple(torch.ones_like(output) for output in outputs)
        )


def _layout(value: Tensor) -> Hashable:
    # Strides too: the product of a transposed matrix may be another kernel.
    return tuple(value.shape), value.stride(), value.dtype, value.device
