"""Losses that have parameters and buffers, and the training step of an unsplit model with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipecompile.frontend.loss_reduction import LossReduction

__all__ = ["LOSS_MODULES", "WIDTH", "Head", "Projected", "data", "layers", "unsplit_step"]

WIDTH, CLASSES = 8, 4


def layers(depth: int = 6) -> nn.Sequential:
    """A small model in float64, always with the same weights."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*(module for pair in pairs for module in pair)).double()


def data(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A batch of shape (samples, WIDTH) and its classes."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
    return batch, torch.randint(CLASSES, (samples,), generator=generator)


class Head(nn.Module):
    """Cross entropy of a layer of its own, with a temperature and centred outputs; it draws too."""

    def __init__(self, reduction: LossReduction = "mean", dropout: float = 0.0) -> None:
        super().__init__()
        self.reduction = reduction
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.temperature = nn.Parameter(torch.zeros(1))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Any:
        """Values of shape (N, WIDTH) and classes (N,) to what the reduction asks for."""
        logits = self.layer(self.dropout(output)) * self.temperature.exp() - self.center
        if self.training:
            self._move_center(logits.detach())
        if self.reduction == "sum":
            return functional.cross_entropy(logits, target, reduction="sum")
        loss = functional.cross_entropy(logits, target)
        return (loss, len(target), logits) if self.reduction == "weighted" else loss

    def _move_center(self, logits: Tensor) -> None:
        self.center.mul_(0.9).add_(logits.mean(0), alpha=0.1)


class Replaced(Head):
    """It puts a new tensor in the place of its buffer, as DINO's loss does."""

    def _move_center(self, logits: Tensor) -> None:
        self.center = self.center * 0.9 + logits.mean(0) * 0.1


class Normed(Head):
    """It normalises what it gets, with running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, output: Tensor, target: Tensor) -> Any:
        """As before."""
        return super().forward(self.norm(output), target)


class Tied(Head):
    """One of its weights has two names, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.twin, self.frozen = nn.Linear(WIDTH, CLASSES, bias=False), nn.Linear(WIDTH, WIDTH)
        self.twin.weight = self.layer.weight
        self.frozen.requires_grad_(False)

    def forward(self, output: Tensor, target: Tensor) -> Any:
        """As before."""
        return super().forward(self.frozen(output), target) + self.twin(output).square().mean()


class Unused(Head):
    """It has a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))


class Parameters(nn.Module):
    """It is made of a parameter and of arithmetic alone."""

    def __init__(self) -> None:
        super().__init__()
        self.sigma = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The negative logarithm of a density with a learned deviation."""
        return (output / self.sigma).square().mean() + self.sigma.abs().log().sum()


LOSS_MODULES: dict[str, Callable[[], nn.Module]] = {
    "head": Head,
    "drawing": lambda: Head(dropout=0.3),
    "replaced buffer": Replaced,
    "batch norm": Normed,
    "tied and frozen": Tied,
    "unused parameter": Unused,
    "parameters alone": Parameters,
}


def unsplit_step(
    model: nn.Module, loss_fn: nn.Module, batch: Tensor, target: Tensor, size: int, total: float
) -> Tensor:
    """Add the gradients over microbatches of so many samples, divided by `total`: what the step of
    a pipeline divides by. Return the loss.

    A smaller last microbatch counts by its samples, if the loss is a mean over them.
    """
    value = torch.zeros((), dtype=torch.float64)
    for rows, wanted in zip(batch.split(size), target.split(size), strict=True):
        returned = loss_fn(model(rows), wanted)
        if isinstance(returned, tuple):
            loss = returned[0] * float(returned[1])
        else:
            is_sum = getattr(loss_fn, "reduction", "mean") == "sum"
            loss = returned if is_sum or len(rows) == size else returned * (len(rows) / size)
        loss.backward()
        value += loss.detach()
    for parameter in (*model.parameters(), *loss_fn.parameters()):
        if parameter.grad is not None:
            parameter.grad /= total
    return value / total


class Projected(nn.Module):
    """Cross entropy of what layers make of the output."""

    def __init__(self, modules: nn.Module) -> None:
        super().__init__()
        self.layers = modules

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Values of shape (N, WIDTH) and classes (N,) to a scalar."""
        return nn.functional.cross_entropy(self.layers(output), target)
