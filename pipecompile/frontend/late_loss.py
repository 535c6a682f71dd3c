"""Does a loss know of a forward more than its output and target, or a forward what a loss leaves? A
stage may have begun the next microbatch before the loss, or another rank runs the forward.

    model.encoder.register_forward_hook(lambda *_, result: kept.update(features=result))
    def loss(output, target): return … + distance(kept["features"].detach(), …)

    a loop       F0 L0 F1 L1
    a pipeline   F0 F1 L0 L1    the features are those of microbatch 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.deterministic_kernels import deterministic_kernels
from pipecompile.frontend.kept_state import has_code_of_user, holders_of_user
from pipecompile.frontend.other_data import FAR, enlarged, other_data
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.frontend.training_step import (
    restored_state,
    seed_everything,
)
from pipecompile.graph.pytrees import map_tensors, tensor_leaves
from pipecompile.graph.restored_state import is_same_tensor, tensors_restored

__all__ = ["refuse_late_loss"]

LOSS_USED = (
    "loss_fn uses what the forward leaves beside its output, such as what a hook keeps or is set "
    "on a module: on another rank that is not there, and in a pipeline the next microbatches may "
    "have replaced it; return it from the model's forward, beside the output"
)
FORWARD_USED = (
    "the forward uses what loss_fn leaves, such as a number in a dict: on another rank that is not "
    "there, and in a pipeline the forward of the next microbatch may come before the loss; set it "
    "between steps"
)


class _Taken(NamedTuple):
    """What the loss of a microbatch returned, with its gradients for the output and for what the
    loss trains, and the output of the next one.
    """

    loss: Sequence[Tensor]
    next_output: Sequence[Tensor]

    def is_same(self, other: _Taken) -> bool:
        """Return whether all tensors are equal."""
        return all(map(_are_the_same, self, other))


def refuse_late_loss(
    target: Target, call: Arguments, wanted: object, following: Arguments | None = None
) -> None:
    """Raise InputError if the loss of a microbatch, or one of its gradients, is another one after
    the forward of the next, which is that of `following` if this has other data; or if that forward
    gives something else before the loss.

    What forwards write to buffers is put back in between: reading that is refused in steps, by its
    name. Nothing is refused where model or loss fail, or a loss is never the same, although all
    generators that it may draw from are seeded.
    """
    if target.loss_fn is None:
        return
    then = _other_call(target, call, following)
    others = [then]
    if has_code_of_user(target.model):
        # A running maximum shows only beside larger numbers.
        others.append(_enlarged(target, then))
    for other in others:
        message = None
        with suppress(Exception):  # a step says what is wrong with it
            message = _lateness(target, call, wanted, other)
        if message is not None:
            raise InputError(message)


def _lateness(target: Target, call: Arguments, wanted: object, then: Arguments) -> str | None:
    """Return what is wrong if the loss of a call comes after the forward of the one that follows
    `then`; None if nothing is.
    """
    as_in_a_loop = partial(_taken, target, call, wanted, then, is_late=False)
    as_in_a_pipeline = partial(_taken, target, call, wanted, then, is_late=True)
    first, second = as_in_a_loop(), as_in_a_pipeline()
    if first.is_same(second):
        return None
    # A loss that goes its own way, such as by turns, has another one also at its own time. Turns of
    # two, three or four calls do not come out like this.
    if not all(each().is_same(second) for each in [as_in_a_pipeline] * 2):
        return None
    if not all(each().is_same(first) for each in [as_in_a_loop] * 2):
        return None
    return FORWARD_USED if _are_the_same(first.loss, second.loss) else LOSS_USED


def _other_call(target: Target, call: Arguments, following: Arguments | None) -> Arguments:
    """Return a call with other data, of which the model takes what follows in the sample."""
    tensors = target.inputs.flatten(call)
    if following is not None:
        next_tensors = target.inputs.flatten(following)
        if not _are_the_same(tensors, next_tensors):
            return following
    return target.inputs.unflatten(other_data(tensors, target.inputs.batch_dims))


def _enlarged(target: Target, call: Arguments) -> Arguments:
    tensors = target.inputs.flatten(call)
    return target.inputs.unflatten(enlarged(tensors, target.inputs.batch_dims, FAR))


@torch.enable_grad()
def _taken(
    target: Target, call: Arguments, wanted: object, then: Arguments, *, is_late: bool
) -> _Taken:
    """Take the forward of a call, its loss, and the forward of another call, the loss before that
    or, if it `is_late`, after it.
    """
    model, loss = target.model, target.loss_module or nn.Identity()

    def next_output() -> list[Tensor]:
        seed_everything()
        # Attributes stay as that forward leaves them: a hook may keep its output on a module.
        with tensors_restored(model, (*model.buffers(), *model.parameters())):
            return _copies(model(*then.args, **then.kwargs))

    with (
        _gradients_put_aside(target.model_with_loss),
        restored_state(model),
        restored_state(loss),
        callable_restored(target.loss_fn, *holders_of_user(model)),
        deterministic_kernels(),
    ):
        seed_everything()
        # In containers of its own: the next forward may fill the same ones.
        output = map_tensors(lambda value: value, model(*call.args, **call.kwargs))
        later = next_output() if is_late else []
        seed_everything()
        returned = target.tried_loss(output, wanted)
        values = _copies(returned)
        trained = [*tensor_leaves(output), *loss.parameters()]
        values += _gradients(tensor_leaves(returned), trained)
        return _Taken(values, later or next_output())


def _copies(values: object) -> list[Tensor]:
    return [each.detach().clone() for each in tensor_leaves(values)]


def _gradients(returned: Sequence[Tensor], trained: Sequence[Tensor]) -> list[Tensor]:
    roots = [each.sum() for each in returned if each.requires_grad]
    leaves = [each for each in trained if each.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    # A loss that goes back by itself may leave no graph.
    with suppress(RuntimeError):
        gradients = torch.autograd.grad(roots, leaves, allow_unused=True)
    return [each for each in gradients if each is not None]


@contextmanager
def _gradients_put_aside(model: nn.Module) -> Iterator[None]:
    """Leave the gradients of parameters as they are: a loss may go back by itself."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _are_the_same(losses: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(losses) == len(others) and all(map(is_same_tensor, losses, others))
