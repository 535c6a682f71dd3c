"""Module paths: which block of a model a module lies in."""

from __future__ import annotations

import re

__all__ = ["block_of"]


def block_of(path: str) -> str:
    """The path up to its first number: the block that a module lies in."""
    match = re.match(r"(.*?\.\d+|\d+)(\.|$)", path)
    return match[1] if match else path
