"""The project's own pages as a text to train on, one token a byte."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 256  # the values of a byte: no tokenizer is needed


def corpus() -> Tensor:
    """Return README and all pages of docs, one after another, as int64 tokens."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = b"\n\n".join(page.read_bytes() for page in pages)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def minibatch(tokens: Tensor, position: int, *, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return minibatch number `position` and its targets, each of shape (size, length).

    Rows begin at random places that follow from `position`. So a run that goes on from a checkpoint
    needs nothing but that number. Targets are the tokens one place further on.
    """
    generator = torch.Generator().manual_seed(position)
    begins = torch.randint(len(tokens) - length, (size, 1), generator=generator)
    rows = tokens[begins + torch.arange(length + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
