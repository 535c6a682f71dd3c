"""A pipeline in one process, compared with the model itself in a plain loop over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from pipecompile import pipecompile
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.graph.model_state import copied_model

__all__ = ["mean_square", "steps_alike"]


def mean_square(output: Any, _: Any) -> Tensor:
    """The mean of the squares of all that a model returns with a gradient."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    squares = [value.square().mean() for value in tensors if value.requires_grad]
    return torch.stack(squares).sum()


def steps_alike(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss_fn: Callable[[Any, Any], Tensor] = mean_square,
    k: int = 2,
    microbatches: int = 2,
    **options: Any,
) -> None:
    """Assert that training steps leave the losses, gradients, weights and buffers of the loop."""
    unsplit = copied_model(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pipeline = pipecompile(
        model,
        batches[0],
        k=k,
        microbatches=microbatches,
        loss_fn=loss_fn,
        costs="flops",
        **options,
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was changed by the compile"
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipeline, unsplit)]
    for batch in batches:
        loss, wanted = pipeline.step(batch, None), _step(unsplit, batch, loss_fn, microbatches)
        assert torch.equal(loss, wanted)
        gradients = {name: p.grad for name, p in unsplit.named_parameters()}
        for name, parameter in pipeline.named_parameters():
            assert _is_same(parameter.grad, gradients[name]), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, value in unsplit.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name


def _is_same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


def _step(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor], microbatches: int
) -> Tensor:
    losses = []
    for call in Target(model, arguments_of(model, batch)).microbatches(microbatches):
        loss = loss_fn(model(*call.args, **call.kwargs), None)
        loss.backward()
        losses.append(loss.detach())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(microbatches)
    return torch.stack(losses).mean()
