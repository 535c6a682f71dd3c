"""A stage as the runtime runs it: four calls, and recompute.

    forward(inputs)               → outputs, saved
    backward(saved, gradients)    → input gradients           parameter gradients go to `.grad`
    backward_input(saved, …)      → input gradients, parts
    backward_weight(parts)                                    parameter gradients go to `.grad`

`backward_input` and `backward_weight` are a split backward: together they do what `backward` does.
The runtime in one process (one_process.py), that under torchrun (distributed_pipeline.py) and the
timing of stages (stage_times.py) use the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError, PipecompileError
from pipecompile.graph.autograd_context import entered_contexts_left
from pipecompile.graph.batch_statistics import record_forward
from pipecompile.graph.gradient_hooks import hooks_noted, may_hook_tensors
from pipecompile.graph.model_state import swapped_state
from pipecompile.graph.random_streams import StreamKey, use_stream
from pipecompile.graph.recomputed_region import has_recomputed_regions
from pipecompile.runtime.random_generators import packed_generators, replayed_generators
from pipecompile.runtime.split_backward import (
    BackwardPart,
    TiedGradients,
    input_backward,
    weight_backward,
)
from pipecompile.runtime.stage_failures import ExplainedBackward, failure_of_forward
from pipecompile.runtime.stage_loss import Loss, StageLoss

__all__ = ["BackwardParts", "EagerStage", "Loss", "SavedForward", "TiedGradients"]

BackwardParts = list[BackwardPart]
"""What an input backward leaves for the weight backward."""


@dataclass(slots=True)
class SavedForward:
    """What a stage keeps of one microbatch from its forward to its backward.

    `outputs` is None from a forward that will be recomputed until its recompute. `buffers` are
    copies from before such a forward. `input_gradients` are those gradients, by the index of the
    input, that autograd is going to copy into the layout of the input: the stage before must get
    them as they were computed, since the rounding of later sums may depend on the layout.
    `extras` is what the loss function returned beside the loss, without history. `generators` are
    the states that it draws from, if it will be recomputed.
    """

    stream_key: StreamKey
    inputs: tuple[Tensor, ...]
    target: Any
    outputs: tuple[Tensor, ...] | None
    buffers: tuple[Tensor, ...] = ()
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    extras: Any = None
    generators: bytes | None = None


class EagerStage:
    """A stage that is run by eager autograd.

    `gradient_inputs` says for each input whether its gradient is sent back. The last stage has a
    `loss`, which may call a `loss_module` that is a part of the stage, and its only output is that
    loss. `buffers` are those that a forward writes to; `random`
    says whether it draws random numbers. `precision` enters what forwards run under, and backwards
    do not.

    Parameters in `tied_to_earlier` are held by earlier stages of this process too, those in
    `tied_to_later` by later ones. For each microbatch their gradients are handed from the last of
    these stages to the first, so that they are summed in the order of the unsplit model:

        stage 2    gradient ──▶ tied_gradients
        stage 1    tied_gradients + own ──▶ tied_gradients      (tied to earlier and to later)
        stage 0    tied_gradients + own ──▶ parameter.grad
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        gradient_inputs: Sequence[bool],
        loss: Loss | None = None,
        loss_module: nn.Module | None = None,
        buffers: Sequence[Tensor] = (),
        random: bool = False,
        tied_to_earlier: Sequence[nn.Parameter] = (),
        tied_to_later: Sequence[nn.Parameter] = (),
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.module = module
        self.loss = None if loss is None else StageLoss(loss, loss_module)
        self._precision = precision
        self._gradient_inputs = [index for index, is_sent in enumerate(gradient_inputs) if is_sent]
        self.buffers = tuple(buffers)
        self._random = random
        self.tied_to_earlier = frozenset(tied_to_earlier)
        self.tied_to_later = frozenset(tied_to_later)
        self._has_regions = has_recomputed_regions(module)
        self._noting = hooks_noted if may_hook_tensors(module) else nullcontext
        self._explained_backward = ExplainedBackward(module)

    def forward(
        self,
        inputs: Sequence[Tensor],
        stream_key: StreamKey,
        target: Any = None,
        *,
        recompute: bool = False,
    ) -> tuple[tuple[Tensor, ...], SavedForward]:
        """Run one microbatch; return the outputs without history, and what the backward needs.

        With `recompute` only the inputs are kept: `recompute` must be called before the backward.
        """
        leaves = tuple([value.detach() for value in inputs])
        before = tuple(buffer.clone() for buffer in self.buffers) if recompute else ()
        saved = SavedForward(stream_key, leaves, target, None, before)
        for index in self._gradient_inputs if torch.is_grad_enabled() else ():
            leaf = leaves[index].requires_grad_()
            leaf.register_hook(partial(_keep_layout, saved.input_gradients, index, leaf.stride()))
        if recompute and self.loss is not None:
            saved.generators = packed_generators(_device_of(inputs))
        # Gradients are on even if the forward will be recomputed: without them PyTorch may choose
        # kernels that round differently.
        with record_forward(stream_key):
            outputs = self._run(saved)
        saved.outputs = None if recompute else outputs
        detached = tuple([value.detach() for value in outputs])
        if self.loss is None:
            return detached, saved
        # The loss is copied, because its storage may be much larger than one number: that of
        # mse_loss has room for every element of its input.
        return tuple(value.clone() for value in detached), saved

    @contextmanager
    def swapped(self, replacement: dict[int, Tensor]) -> Iterator[None]:
        """Replace parameters by `replacement[id(parameter)]` in the block, those of the loss too.

        The stage's module has tables of its own, and the loss that is called is the user's module.
        """
        modules = [self.module, *([] if self.loss is None else self.loss.modules)]
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(swapped_state(module, replacement))
            yield

    def recompute(self, saved: SavedForward) -> None:
        """Run the forward once more, with the random numbers and buffers of the first time."""
        # It runs on copies of the buffers: a second run must not update them a second time, nor
        # write to what the backward will read.
        copies = {id(own): before for own, before in zip(self.buffers, saved.buffers, strict=True)}
        states, device = saved.generators, _device_of(saved.inputs)
        draws = nullcontext() if states is None else replayed_generators(states, device)
        with swapped_state(self.module, copies), draws:
            saved.outputs = self._run(saved)

    def evaluate(self, inputs: Sequence[Tensor], stream_key: StreamKey) -> tuple[Tensor, ...]:
        """Return the output tensors, without gradients and without the loss."""
        with torch.no_grad(), self._precision():
            return self._outputs(inputs, stream_key)

    def evaluate_loss(
        self, inputs: Sequence[Tensor], stream_key: StreamKey, target: Any
    ) -> tuple[tuple[Tensor], Any]:
        """Return the loss, and what the loss function returned beside it, without gradients."""
        assert self.loss is not None, "only the last stage has a loss"
        with torch.no_grad(), self._precision():
            outputs = self._outputs(inputs, stream_key)
            loss, extras = self.loss.evaluate(outputs, target)
        return (loss.clone(),), extras

    def backward(
        self,
        saved: SavedForward,
        gradients: Sequence[Tensor | None],
        tied_gradients: TiedGradients,
    ) -> list[Tensor | None]:
        """Add to the parameters' `.grad` and return the gradients of the inputs, None for some.

        `gradients` are those of the outputs; that of a loss is 1 if it is not given.
        `tied_gradients` holds what later stages contribute to tied parameters for this
        microbatch. Afterwards it holds what is to be handed to earlier stages.
        """
        roots, seeds = self._roots(saved, gradients)
        with self._redirected(tied_gradients), self._explained_backward:
            BackwardPart(roots, seeds).run(self._pop_own(tied_gradients))
        input_gradients = [value.grad for value in saved.inputs]
        for index, gradient in saved.input_gradients.items():
            input_gradients[index] = gradient
            # It frees autograd's copy: the same numbers, laid out anew.
            saved.inputs[index].grad = None
        return input_gradients

    def backward_input(
        self, saved: SavedForward, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], BackwardParts]:
        """Run the input backward: return the input gradients and what is left to do.

        The stage before waits for the input gradients.
        """
        assert not self._has_regions, "each half would recompute the regions: go back as a whole"
        roots, seeds = self._roots(saved, gradients)
        leaves = [value for value in saved.inputs if value.requires_grad]
        with self._explained_backward:
            leaf_gradients, parts = input_backward(roots, seeds, leaves, self.tied_to_later)
        # `input_backward` returns gradients as they were computed. The hooks that filled this table
        # belong to the graph, which lives on until the weight backward.
        saved.input_gradients.clear()
        by_leaf = {id(leaf): value for leaf, value in zip(leaves, leaf_gradients, strict=True)}
        return [by_leaf.get(id(value)) for value in saved.inputs], parts

    def backward_weight(self, parts: BackwardParts, tied_gradients: TiedGradients) -> None:
        """Run the weight backward: add to the parameters' `.grad`. `parts` is then empty."""
        with self._redirected(tied_gradients), self._explained_backward:
            weight_backward(parts, self._pop_own(tied_gradients))

    def _redirected(self, tied_gradients: TiedGradients) -> AbstractContextManager[None]:
        """Put gradients of parameters that earlier stages hold into `tied_gradients` instead."""
        if not self.tied_to_earlier:
            return nullcontext()
        return _redirected_gradients(self.tied_to_earlier, tied_gradients)

    def _pop_own(self, tied_gradients: TiedGradients) -> TiedGradients:
        """Remove and return the gradients of parameters that this stage holds."""
        return {
            parameter: tied_gradients.pop(parameter)
            for parameter in self.tied_to_later
            if parameter in tied_gradients
        }

    def _run(self, saved: SavedForward) -> tuple[Tensor, ...]:
        with self._precision():
            outputs = self._outputs(saved.inputs, saved.stream_key)
            if self.loss is not None:
                loss, saved.extras = self.loss(outputs, saved.target)
                return (loss,)
        # An output may be an input itself. Autograd copies the gradient of a root that is a leaf,
        # but passes it through a view as it is.
        given = set(map(id, saved.inputs)) if self._gradient_inputs else ()
        return tuple([value.view_as(value) if id(value) in given else value for value in outputs])

    def _outputs(self, inputs: Sequence[Tensor], stream_key: StreamKey) -> tuple[Tensor, ...]:
        is_enabled = torch.is_grad_enabled()
        stream = use_stream(stream_key, _cuda_devices(inputs)) if self._random else nullcontext()
        try:
            with stream, entered_contexts_left(), self._noting():
                outputs: tuple[Tensor, ...] = self.module(*inputs)
            return outputs
        except (PipecompileError, torch.OutOfMemoryError):
            raise  # who catches these wants them as they are
        except Exception as error:
            raise InputError(failure_of_forward(error, inputs)) from error
        finally:
            # The user's code may have failed where it had switched gradients off.
            if torch.is_grad_enabled() != is_enabled:
                torch.set_grad_enabled(is_enabled)

    def _roots(
        self, saved: SavedForward, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the outputs that a backward begins at, and their gradients (None: 1)."""
        assert saved.outputs is not None, "a recompute must come before the backward"
        if self.loss is not None:
            # No gradient arrives at the last stage. One of its own is there if the loss is
            # weighted or scaled.
            return list(saved.outputs), list(gradients) or [None]
        pairs = [
            (value, gradient)
            for value, gradient in zip(saved.outputs, gradients, strict=True)
            if value.requires_grad and gradient is not None
        ]
        return [value for value, _ in pairs], [gradient for _, gradient in pairs]


@contextmanager
def _redirected_gradients(
    parameters: Collection[nn.Parameter], gradients: TiedGradients
) -> Iterator[None]:
    """Put what the block adds to the `.grad` of `parameters` into `gradients` instead."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                gradients[parameter] = parameter.grad
            parameter.grad = gradient


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _cuda_devices(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(sorted({value.device.index for value in tensors if value.device.type == "cuda"}))


def _keep_layout(
    gradients: dict[int, Tensor], index: int, stride: tuple[int, ...], gradient: Tensor | None
) -> None:
    """Keep a gradient that is dense but laid out differently than its input, which has `stride`.
    A Function may return None for it, which autograd gives to hooks.

    A gradient with gaps is a view of something larger. It is not kept, so that autograd copies it
    and the larger storage is freed.
    """
    if gradient is None or gradient.stride() == stride:
        return
    # A gradient of shape (2, 3) with strides (1, 2) is dense: seen as (3, 2) it is contiguous.
    # One with strides (6, 1) is every second row of something larger, in whatever order it is
    # seen.
    order = sorted(range(gradient.dim()), key=gradient.stride().__getitem__, reverse=True)
    if gradient.permute(order).is_contiguous():
        gradients[index] = gradient
