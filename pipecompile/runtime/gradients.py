"""The gradient of a step: the sum over microbatches in their order, divided by their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["fresh_gradients", "scale"]


@contextmanager
def fresh_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gradients start at nothing in the block; what was there before is added afterwards.

    So that gradients of earlier steps, which the user accumulates, are not divided again. If the block fails, they
    are put back alone: a step either happens or does not.
    """
    parameters = list(parameters)
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        raise
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


@torch.no_grad()
def scale(parameters: Iterable[Tensor], microbatches: int) -> None:
    """Divides the gradients by the number of microbatches, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(microbatches)
