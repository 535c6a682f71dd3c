"""What a checkpoint must know of a training run: its counters, and what this process holds.

A pipeline has its own of both; those of an unsplit model are here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from pipecompile.runtime.place import RankPlace

__all__ = ["HeldState", "ModelRun", "TrainingRun", "WholeModel"]


class TrainingRun(Protocol):
    """What a checkpoint sets besides tensors; a `Pipeline` is one.

    `steps` and `seed` are what random nodes draw from.
    """

    steps: int
    seed: int

    def zero_grad(self) -> None:
        """Drop gradients, which are those of other weights."""

    def drain(self) -> None:
        """Let what is in flight end: it would write to weights that were loaded meanwhile."""

    def meet(self, what: str) -> None:
        """Wait until all ranks come to `what`."""


class HeldState(Protocol):
    """What of the model's state this process holds; `LocalShare` is one.

    `holders` are the stages that hold each parameter and buffer.
    """

    place: RankPlace
    holders: dict[str, tuple[int, ...]]

    def holds(self, name: str) -> bool:
        """Return whether the value of `name` is here."""

    def counts(self, name: str) -> bool:
        """Return whether this process is the one that saves its part of `name`."""


@dataclass
class ModelRun:
    """The training of an unsplit model."""

    model: nn.Module
    steps: int = 0
    seed: int = 0

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad(set_to_none=True)

    def drain(self) -> None:
        """Nothing is in flight."""

    def meet(self, what: str) -> None:
        """Nobody else comes."""


@dataclass
class WholeModel:
    """All of an unsplit model is in this process, and no stage has it."""

    place: RankPlace = field(default_factory=RankPlace)
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def holds(self, name: str) -> bool:
        """Return True: every value is here."""
        return True

    def counts(self, name: str) -> bool:
        """Return True: this process saves every value."""
        return True
