"""Gradients of a step: the sum over microbatches in their order, divided by their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["divide_gradients", "fresh_gradients"]


@contextmanager
def fresh_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Begin the block without gradients, and add what was there before afterwards.

    So gradients of earlier steps, which the user accumulates, are not divided a second time. If the
    block fails, the gradients from before are restored: a step happens as a whole or not at all.
    """
    parameters = list(parameters)  # an iterator could be read only once
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
def divide_gradients(parameters: Iterable[Tensor], microbatches: int) -> None:
    """Divide the gradients by the number of microbatches, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(microbatches)
