"""Streams of random numbers that do not depend on the cut: one for each random node."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

__all__ = ["Moment", "at", "now", "reseed"]


@dataclass(frozen=True, slots=True)
class Moment:
    """What, with the node's name, decides its random numbers: not the stage, rank, or time at which it runs."""

    seed: int
    step: int
    microbatch: int


_now: ContextVar[Moment | None] = ContextVar("pipecompile_moment", default=None)


@contextmanager
def at(moment: Moment, devices: tuple[int, ...] = ()) -> Iterator[None]:
    """Random nodes in the block draw as of `moment`; the generators are as before afterwards.

    `devices` are the indices of the CUDA devices on which they draw.
    """
    token = _now.set(moment)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        _now.reset(token)


def now() -> Moment | None:
    """The moment as of which random nodes draw here; None outside `at`."""
    return _now.get()


def reseed(node: str) -> None:
    """Seeds the generators for the node of this name at the current moment."""
    moment = now()
    assert moment is not None, "a seeded graph runs inside `at(moment)`"
    text = f"{moment.seed}:{moment.step}:{moment.microbatch}:{node}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    # Not torch.manual_seed: before CUDA is initialised it formats a stack trace on every call, 70 times the cost.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
