"""Kernels whose sums have the same order in every run, for steps that are compared bit for bit.

On a GPU some kernels add with atomic operations: two steps of one model then differ in their last
bits. Scatters do so, and cuDNN's gradients of convolutions (seen on a H200 with PyTorch 2.11).
PyTorch has deterministic kernels for most of these operators. Those for attention it only takes
where a missing one is an error (`torch.use_deterministic_algorithms(True)`), and here it is none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["deterministic_kernels"]

WARNING = ".*(deterministic|Deterministic)"


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let torch choose such kernels in the block if there is a GPU; settings of the user stay."""
    if not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        yield
        return
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", WARNING, UserWarning)
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)
