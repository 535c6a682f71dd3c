"""The unsplit model's step over microbatches of unequal size: the oracle of tests of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.graph.random_streams import StreamKey

__all__ = ["gradients_of", "largest_difference", "sizes_of", "unsplit_step"]

Run = Callable[[StreamKey, Tensor], Any]
"""The unsplit model on one microbatch, with the random numbers of a key."""


def sizes_of(samples: int, planned: int) -> list[int]:
    """The sizes of the microbatches of a batch."""
    full, rest = divmod(samples, planned)
    return [planned] * full + ([rest] if rest else [])


def unsplit_step(
    run: Run,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Tensor,
    target: Tensor,
    planned: int,
    *,
    step: int = 0,
    first: int = 0,
) -> Tensor:
    """Add the gradients, undivided, of a step over these samples; return the mean loss.

    Backwards begin with the size over the planned one. `first` is the number of the first
    microbatch.
    """
    losses = []
    for number, (rows, wanted, size) in enumerate(_parts(batch, target, planned)):
        loss = loss_fn(run(StreamKey(0, step, first + number), rows), wanted)
        loss.backward(torch.full_like(loss, size / planned))
        losses.append(loss.detach())
    sizes = sizes_of(len(batch), planned)
    if len(set(sizes)) == 1 and sizes[0] == planned:
        return torch.stack(losses).mean()
    parts = zip(losses, sizes, strict=True)
    return torch.stack([loss * (size / len(batch)) for loss, size in parts]).sum()


def _parts(batch: Tensor, target: Tensor, planned: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    sizes = sizes_of(len(batch), planned)
    yield from zip(batch.split(sizes), target.split(sizes), sizes, strict=True)


def gradients_of(model: nn.Module, divisor: float = 1.0) -> dict[str, Tensor]:
    """The gradients of a model by name, divided."""
    named = model.named_parameters()
    return {name: p.grad / divisor for name, p in named if p.grad is not None}


def largest_difference(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of a gradient in `got`, over the largest element of all."""
    largest = max(value.abs().max().item() for value in wanted.values())
    return max((value - wanted[name]).abs().max().item() for name, value in got.items()) / largest
