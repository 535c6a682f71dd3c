"""Parameters and buffers on another device for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["lent"]


@contextmanager
def lent(state: Iterable[Tensor], device: torch.device, written: Collection[Tensor] = ()) -> Iterator[None]:
    """In the block `state` lies on `device` and has no gradients; afterwards all is as it was, random numbers too.

    The tensors stay the same objects: only what they hold is exchanged. What the block writes to `written`, and to any
    tensor that lay on another device, is lost.
    """
    copied = {id(value) for value in written}
    before = [(value, value.data, value.grad) for value in {id(value): value for value in state}.values()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
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
