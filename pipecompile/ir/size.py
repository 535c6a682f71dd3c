"""Sizes as people write them: 16GiB is 2³⁰ bytes each, 16GB is 10⁹."""

from __future__ import annotations

import re

from pipecompile.errors import InputError

__all__ = ["parse_bytes"]

UNITS = {
    "B": 1,
    **{f"{p}iB": 2 ** (10 * n) for n, p in enumerate("KMGT", 1)},
    **{f"{p}B": 10 ** (3 * n) for n, p in enumerate("KMGT", 1)},
}


def parse_bytes(size: int | str) -> int:
    """The bytes that `size` says, a number or text such as 16GiB, 500MB, 1.5GiB; InputError shows how to write it."""
    if isinstance(size, int) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", str(size))
    if match is None:
        raise InputError(f"{size!r} is not a size; write 16GiB (2³⁰ bytes each), 16GB (10⁹) or a number of bytes")
    return int(float(match[1]) * UNITS[match[2] or "B"])
