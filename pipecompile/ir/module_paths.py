"""Paths of modules: which block of a model a module lies in."""

from __future__ import annotations

import re

__all__ = ["block_of"]


def block_of(path: str) -> str:
    """Return the path up to its first number: h.0 for h.0.attn; the whole path without a number."""
    # Lists of blocks are numbered: the first number in a path is the block, later ones lie in it.
    match = re.match(r"(.*?\.\d+|\d+)(\.|$)", path)
    return match[1] if match else path
