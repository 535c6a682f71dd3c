"""Which kernels attention takes: those of a training step, or PyTorch's shortcut without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["training_attention"]


@contextmanager
def training_attention() -> Iterator[None]:
    """Make nn.MultiheadAttention in eval mode, without gradients, take the path of a training
    step: its shortcut gives other last bits.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
