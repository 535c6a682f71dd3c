"""Parameters and buffers on another device for a while, and without the hooks of their owner."""

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
    """In the block `state` lies on `device`, has no gradients and no hooks; afterwards all is as it was.

    Random numbers too. The tensors stay the same objects: only what they hold is exchanged. What the block writes to
    `written`, and to any tensor that lay on another device, is lost.
    """
    copied = {id(value) for value in written}
    before = [
        (value, value.data, value.grad) for value in {id(value): value for value in state}.values()
    ]
    hookless = without_hooks(value for value, _, _ in before)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), hookless:
        try:
            for value, data, _ in before:
                value.grad = None
                value.data = data.clone().to(device) if id(value) in copied else data.to(device)
            yield
        finally:
            for value, data, gradient in before:
                value.grad = None
                value.data = data
                value.grad = gradient


@contextmanager
def without_hooks(state: Iterable[Tensor]) -> Iterator[None]:
    """In the block no hook on a tensor of `state` runs: one may be the user's optimizer, stepping in the backward."""
    unique = {id(value): value for value in state}.values()
    before = [(value, value._backward_hooks, value._post_accumulate_grad_hooks) for value in unique]
    try:
        for value, hooks, accumulated in before:
            if hooks is not None:
                value._backward_hooks = None
            if accumulated is not None:
                value._post_accumulate_grad_hooks = (
                    OrderedDict()
                )  # given None, autograd keeps those it has
        yield
    finally:
        for value, hooks, accumulated in before:
            if hooks is not None:
                value._backward_hooks = hooks
            if accumulated is not None:
                value._post_accumulate_grad_hooks = accumulated
