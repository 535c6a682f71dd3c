"""Tokens with unequal padding, losses for each reduction, and the unsplit model's loss of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LENGTH", "LOSSES", "language_model", "padded", "unsplit_loss"]

LENGTH, WORDS, PADDING = 5, 11, -100


def language_model() -> nn.Sequential:
    """A small model in float64 without random numbers, always with the same weights."""
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WORDS)
    return nn.Sequential(*layers).double()


def padded(samples: int, seed: int, first_row: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and labels of so many samples; many labels are padding, of some samples all.

    `first_row` is how many labels of the first sample are none.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (samples, LENGTH), generator=generator)
    lengths = torch.randint(0, LENGTH + 1, (samples,), generator=generator)
    if first_row is not None:
        lengths[0] = first_row
    return tokens, tokens.masked_fill(torch.arange(LENGTH) >= lengths[:, None], PADDING)


def mean_of_samples(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples of what one has."""
    return total(logits, labels) / len(labels)


def total(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over all labels that are none of padding."""
    return _entropy(logits, labels, "sum")


def mean_of_tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over such labels, and how many there are."""
    return _entropy(logits, labels, "mean"), (labels != PADDING).sum()


def _entropy(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING, reduction=reduction
    )


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": mean_of_samples,
    "sum": total,
    "weighted": mean_of_tokens,
}
"""The loss function for each reduction."""


def unsplit_loss(model: nn.Module, reduction: str, tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of the unsplit model on the whole minibatch at once."""
    loss = LOSSES[reduction](model(tokens), labels)
    return loss[0] if isinstance(loss, tuple) else loss
