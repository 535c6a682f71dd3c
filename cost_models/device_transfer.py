"""The transfer of parameters and buffers to another device for a while, without their hooks.

Used where a node or a stage is measured on a GPU whose memory the whole model does not fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["moved_to", "without_hooks"]


@contextmanager
def moved_to(
    state: Iterable[Tensor], device: torch.device, written: Collection[Tensor] = ()
) -> Iterator[None]:
    """During the block, put `state` on `device`, without gradients and without hooks.

    Afterwards the tensors, their gradients and the random generators are as they were. Tensors stay
    the same objects; only their data are exchanged. What the block writes to `written`, and to any
    tensor that was on another device, is lost.
    """
    copied = {id(value) for value in written}
    unique = {id(value): value for value in state}.values()
    before = [(value, value.data, value.grad) for value in unique]
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(generators), without_hooks(unique):
        try:
            for value, data, _ in before:
                # A gradient on another device would not fit the data.
                value.grad = None
                value.data = data.clone().to(device) if id(value) in copied else data.to(device)
            yield
        finally:
            for value, data, gradient in before:
                value.grad = None
                # Data first: a tensor takes no gradient that lies on another device.
                value.data = data
                value.grad = gradient


@contextmanager
def without_hooks(state: Iterable[Tensor]) -> Iterator[None]:
    """During the block, run no hook on a tensor of `state`.

    A hook may be the user's optimizer, which would step in the measured backward.
    """
    unique = {id(value): value for value in state}.values()
    before = [(value, value._backward_hooks, value._post_accumulate_grad_hooks) for value in unique]
    try:
        for value, hooks, accumulated in before:
            if hooks is not None:
                value._backward_hooks = None
            if accumulated is not None:
                # If this is set to None, autograd keeps the hooks that it knows.
                value._post_accumulate_grad_hooks = OrderedDict()
        yield
    finally:
        for value, hooks, accumulated in before:
            if hooks is not None:
                value._backward_hooks = hooks
            if accumulated is not None:
                value._post_accumulate_grad_hooks = accumulated
