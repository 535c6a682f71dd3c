"""Streams of random numbers that do not depend on the cut: each random node has its own.

The runtime enters `use_stream` for each microbatch; the pass `Seed` puts a call of `reseed` before
each random node. The node's numbers then follow from (seed, step, microbatch, node name) alone, and
neither from the stage nor from what ran before:

    seed 0, step 7, microbatch 2
        reseed("dropout_1")   blake2b("0:7:2:dropout_1") → generator
        dropout_1 = …         the same mask on every rank and under every schedule
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

__all__ = ["StreamKey", "current_stream_key", "reseed", "seed_generators", "use_stream"]


@dataclass(frozen=True, slots=True)
class StreamKey:
    """What decides, together with a node's name, the node's random numbers."""

    seed: int
    step: int
    microbatch: int


_current_key: ContextVar[StreamKey | None] = ContextVar("pipecompile_stream_key", default=None)


@contextmanager
def use_stream(key: StreamKey, devices: tuple[int, ...] = ()) -> Iterator[None]:
    """Let random nodes in the block draw from the streams of `key`; then restore the generators.

    `devices` are the indices of the CUDA devices on which the nodes draw.
    """
    token = _current_key.set(key)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        _current_key.reset(token)


def current_stream_key() -> StreamKey | None:
    """Return the key of the streams that random nodes draw from; None outside `use_stream`."""
    return _current_key.get()


def reseed(node: str) -> None:
    """Seed the generators for the node of this name."""
    key = current_stream_key()
    assert key is not None, "a seeded graph runs inside `use_stream`"
    text = f"{key.seed}:{key.step}:{key.microbatch}:{node}"
    seed_generators(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big"))


def seed_generators(number: int) -> None:
    """Seed torch's generators of the CPU and of all GPUs."""
    # Not torch.manual_seed: before CUDA is initialised it formats stack traces on every call, which
    # takes 200 times as long.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
