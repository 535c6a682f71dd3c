"""The states of a process's random generators, for checkpoints and recomputed losses.

Random nodes of a pipeline draw from streams of their own; these are for what else a run draws, such
as the order of its data.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = [
    "generator_states",
    "packed_generators",
    "replayed_generators",
    "restore_generators",
]


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, numpy and torch, there also of `device`."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    # Only the own GPU: the generators of others belong to other processes.
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to what `generator_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def packed_generators(device: torch.device) -> bytes:
    """Return the states as bytes, which take no memory of tensors: what stages hold is counted."""
    return pickle.dumps(generator_states(device))


@contextmanager
def replayed_generators(packed: bytes, device: torch.device) -> Iterator[None]:
    """Let the block draw once more what was drawn from `packed_generators`."""
    before = generator_states(device)
    restore_generators(pickle.loads(packed), device)
    try:
        yield
    finally:
        # A recompute may run anywhere between other microbatches' forwards: what these draw must
        # not depend on it.
        restore_generators(before, device)
