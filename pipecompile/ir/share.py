"""Shares as people write them: 5% is 0.05."""

from __future__ import annotations

import re

from pipecompile.errors import InputError

__all__ = ["parse_share"]


def parse_share(text: str) -> float:
    """Return the share that 5% or 0.05 stands for; InputError shows how to write it."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise InputError(f"{text!r} is not a share; write 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)
