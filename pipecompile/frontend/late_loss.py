"""Does a loss know of a forward more than its output and target? A stage may have begun the next
microbatch by then, or another rank runs the forward.

    model.encoder.register_forward_hook(lambda *_, result: kept.update(features=result))
    def loss(output, target): return … + distance(kept["features"].detach(), …)

    a loop       F0 L0
    a pipeline   F0 F1 L0       the features are those of microbatch 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.deterministic_kernels import deterministic_kernels
from pipecompile.frontend.in_flight_check import other_data
from pipecompile.frontend.kept_state import hooks_of_user
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.frontend.training_step import SEED, restored_state
from pipecompile.graph.pytrees import map_tensors, tensor_leaves
from pipecompile.graph.restored_state import is_same_tensor

__all__ = ["refuse_late_loss"]


def refuse_late_loss(target: Target, call: Arguments, wanted: object) -> None:
    """Raise InputError if the loss of a microbatch is another one after the forward of the next.

    What forwards write to buffers or set as attributes is put back in between: reading that is
    refused in steps, by its name. Nothing is refused where model or loss fail, or a loss is never
    the same.
    """
    if target.loss_fn is None:
        return
    tensors = target.inputs.flatten(call)
    other = target.inputs.unflatten(other_data(tensors, target.inputs.batch_dims))
    try:
        once, again = (_losses(target, call, wanted) for _ in range(2))
        late = _losses(target, call, wanted, then=[other])
    except Exception:
        return  # a step says what is wrong with it
    if _are_the_same(once, again) and not _are_the_same(once, late):
        raise InputError(
            "loss_fn uses what the forward leaves beside its output, such as what a hook keeps: "
            "on another rank that is not there, and in a pipeline the next microbatches may have "
            "replaced it; return it from the model's forward, beside the output"
        )


@torch.enable_grad()
def _losses(
    target: Target, call: Arguments, wanted: object, then: Sequence[Arguments] = ()
) -> list[Tensor]:
    """Return the tensors that the loss returns for a call, after the forwards `then`."""
    model, loss = target.model, target.loss_module or nn.Identity()
    with (
        _gradients_put_aside(target.model_with_loss),
        restored_state(model),
        restored_state(loss),
        callable_restored(target.loss_fn, *hooks_of_user(model)),
        deterministic_kernels(),
    ):
        torch.manual_seed(SEED)
        # In containers of its own: the next forward may fill the same ones.
        output = map_tensors(lambda value: value, model(*call.args, **call.kwargs))
        for each in then:
            with restored_state(model):
                model(*each.args, **each.kwargs)
        torch.manual_seed(SEED)
        returned = tensor_leaves(target.trained_by(output, wanted))
        return [each.detach().clone() for each in returned]


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
