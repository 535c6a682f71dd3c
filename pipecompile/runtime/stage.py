"""How the runtime talks to a stage: four calls, and recompute.

    forward(inputs)             → outputs, saved
    backward(saved, gradients)  → input gradients           (parameter gradients go to `.grad`)
    backward_input(saved, …)    → input gradients, live
    backward_weight(live)                             (consumes it)

The form here is eager autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.graph.model_state import swapped_state
from pipecompile.graph.random_streams import StreamKey, use_stream
from pipecompile.graph.recomputed_region import has_recomputed_regions
from pipecompile.runtime.split_backward import BackwardPart, TiedGradients, first_half, second_half

__all__ = ["TiedGradients", "EagerStage", "BackwardParts", "Loss", "SavedForward"]

Loss = Callable[[Sequence[Tensor], Any], Tensor]
BackwardParts = list[BackwardPart]


@dataclass
class SavedForward:
    """What a stage keeps of one microbatch from its forward to its backward.

    `outputs` is None between a forward that will be recomputed and its recompute. `arrived` are gradients of inputs, by
    index, that autograd would lay out anew as their tensors are: how later sums round may depend on it.
    """

    moment: StreamKey
    inputs: tuple[Tensor, ...]
    target: Any
    outputs: tuple[Tensor, ...] | None
    buffers: tuple[Tensor, ...] = ()
    arrived: dict[int, Tensor] = field(default_factory=dict)


class EagerStage:
    """A stage run by autograd.

    `gradient_inputs` tells which inputs carry gradients back. The last stage has a `loss` of (output tensors, target),
    and its only output is that loss. `tied` are parameters that earlier stages of this process hold too, `gathered`
    those that later ones do: their gradients are handed on, microbatch by microbatch, from the last of these stages to
    the first, so that they are summed as the unsplit model sums them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        gradient_inputs: Sequence[bool],
        loss: Loss | None = None,
        buffers: Sequence[Tensor] = (),
        random: bool = False,
        tied: Sequence[nn.Parameter] = (),
        gathered: Sequence[nn.Parameter] = (),
    ) -> None:
        self.module = module
        self.loss = loss
        self._gradient_inputs = tuple(gradient_inputs)
        self._buffers = tuple(buffers)
        self._random = random
        self.tied = frozenset(tied)
        self.gathered = frozenset(gathered)

    def forward(
        self,
        inputs: Sequence[Tensor],
        moment: StreamKey,
        target: Any = None,
        *,
        recompute: bool = False,
    ) -> tuple[tuple[Tensor, ...], SavedForward]:
        """One microbatch. With `recompute`, only the inputs are kept, and `recompute` must come before the backward."""
        leaves = tuple(self._leaf(index, value) for index, value in enumerate(inputs))
        before = tuple(buffer.clone() for buffer in self._buffers) if recompute else ()
        saved = SavedForward(moment, leaves, target, None, before)
        for index, leaf in enumerate(leaves):
            if leaf.requires_grad:
                leaf.register_hook(partial(_keep_layout, saved.arrived, index, leaf.stride()))
        # With gradients even if it will be recomputed: without them, kernels may be chosen that round differently.
        outputs = self._run(saved)
        saved.outputs = None if recompute else outputs
        if self.loss is not None:  # a copy: that of mse_loss lies in memory for every element
            return tuple(value.detach().clone() for value in outputs), saved
        return tuple(value.detach() for value in outputs), saved

    def recompute(self, saved: SavedForward) -> None:
        """The forward once more, with gradients; random numbers and buffers are those of the first time."""
        # On copies: the second run must not update the buffers again, nor touch what the backward will read.
        twins = {id(own): before for own, before in zip(self._buffers, saved.buffers, strict=True)}
        with swapped_state(self.module, twins):
            saved.outputs = self._run(saved)

    def evaluate(self, inputs: Sequence[Tensor], moment: StreamKey) -> tuple[Tensor, ...]:
        """The output tensors, without gradients and without the loss."""
        with torch.no_grad():
            return self._outputs(inputs, moment)

    def backward(
        self, saved: SavedForward, gradients: Sequence[Tensor | None], carried: TiedGradients
    ) -> list[Tensor | None]:
        """Adds to the parameters' `.grad` and returns the gradients of the inputs (None where there are none).

        `gradients` are those of the outputs; ignored by the last stage, whose output is the loss. `carried` holds
        what later stages add to tied parameters for this microbatch; it leaves with what this stage adds.
        """
        roots, seeds = self._roots(saved, gradients)
        with _set_aside(self.tied, carried):
            BackwardPart.at(roots, seeds).run(self._taken(carried))
        for index in saved.arrived:
            saved.inputs[index].grad = None  # the same numbers, laid out anew
        return [saved.arrived.get(index, value.grad) for index, value in enumerate(saved.inputs)]

    def backward_input(
        self, saved: SavedForward, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], BackwardParts]:
        """The first half of the backward: the gradients of the inputs, on which the stage before waits."""
        assert not has_recomputed_regions(self.module), (
            "each half would compute the regions again: go back as a whole"
        )
        roots, seeds = self._roots(saved, gradients)
        wanted = [value for value in saved.inputs if value.requires_grad]
        found, live = first_half(roots, seeds, wanted, self.gathered)
        saved.arrived.clear()  # these are as they arrived; what is left of the graph holds this
        by_input = {id(value): gradient for value, gradient in zip(wanted, found, strict=True)}
        return [by_input.get(id(value)) for value in saved.inputs], live

    def backward_weight(self, live: BackwardParts, carried: TiedGradients) -> None:
        """The second half: the gradients of the parameters. Consumes `live`."""
        with _set_aside(self.tied, carried):
            second_half(live, self._taken(carried))

    def _taken(self, carried: TiedGradients) -> TiedGradients:
        """What is carried to this stage; what is for others stays."""
        return {
            parameter: carried.pop(parameter) for parameter in self.gathered if parameter in carried
        }

    def _leaf(self, index: int, value: Tensor) -> Tensor:
        return value.detach().requires_grad_(
            self._gradient_inputs[index] and torch.is_grad_enabled()
        )

    def _run(self, saved: SavedForward) -> tuple[Tensor, ...]:
        outputs = self._outputs(saved.inputs, saved.moment)
        if self.loss is not None:
            return (_scalar(self.loss(outputs, saved.target)),)
        leaves = {id(value) for value in saved.inputs if value.requires_grad}
        # Through a view autograd takes the gradient of what only passes through as it is; otherwise it copies it.
        return tuple(value.view_as(value) if id(value) in leaves else value for value in outputs)

    def _outputs(self, inputs: Sequence[Tensor], moment: StreamKey) -> tuple[Tensor, ...]:
        with ExitStack() as stack:
            # A failure inside a region of the model must not leave gradients off.
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            if self._random:
                stack.enter_context(use_stream(moment, _cuda_devices(inputs)))
            outputs: tuple[Tensor, ...] = self.module(*inputs)
        return outputs

    def _roots(
        self, saved: SavedForward, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        assert saved.outputs is not None, "a recompute must come before the backward"
        if self.loss is not None:
            return list(saved.outputs), [None]
        pairs = [
            (value, gradient)
            for value, gradient in zip(saved.outputs, gradients, strict=True)
            if value.requires_grad and gradient is not None
        ]
        return [value for value, _ in pairs], [gradient for _, gradient in pairs]


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim():
        got = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__name__}"
        )
        raise InputError(
            f"the loss function returned {got}, but it must be a scalar tensor, for example its mean"
        )
    return loss


@contextmanager
def _set_aside(tied: Collection[nn.Parameter], carried: TiedGradients) -> Iterator[None]:
    """What the block adds to `tied` parameters goes to `carried` instead of their `.grad`."""
    before = [parameter.grad for parameter in tied]
    for parameter in tied:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(tied, before, strict=True):
            if parameter.grad is not None:
                carried[parameter] = parameter.grad
            parameter.grad = gradient


def _cuda_devices(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(sorted({value.device.index for value in tensors if value.device.type == "cuda"}))


def _keep_layout(
    arrived: dict[int, Tensor], index: int, stride: tuple[int, ...], gradient: Tensor
) -> None:
    order = sorted(range(gradient.dim()), key=gradient.stride().__getitem__, reverse=True)
    if (
        gradient.stride() != stride and gradient.permute(order).is_contiguous()
    ):  # not a view with gaps of more
        arrived[index] = gradient
