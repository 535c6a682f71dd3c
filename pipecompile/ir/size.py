"""Sizes as people write them: 16GiB is 2³⁰ bytes each, 16GB is 10⁹."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipecompile.errors import InputError

__all__ = [
    "caps_by_rank",
    "exact_size_text",
    "option_text",
    "parse_bytes",
    "parse_caps",
    "size_scale",
    "size_text",
]

UNITS = {
    "B": 1,
    # KiB, MiB, GiB, TiB and KB, MB, GB, TB; the kilobyte has a large K in both.
    **{f"{p}iB": 2 ** (10 * n) for n, p in enumerate("KMGT", 1)},
    **{f"{p}B": 10 ** (3 * n) for n, p in enumerate("KMGT", 1)},
}


def parse_bytes(size: int | str) -> int:
    """Return the bytes of a size: a number, or text such as 16GiB, 500MB, 1.5GiB.

    InputError shows how to write it.
    """
    if isinstance(size, int) and size >= 0:
        return size
    # The i decides between 2¹⁰ and 10³, so that letters must have the case of the units.
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", str(size))
    if match is None:
        raise InputError(
            f"{size!r} is not a size; write 16GiB (2³⁰ bytes each), 16GB (10⁹) or a number of bytes"
        )
    # A fraction of a byte is dropped, so a cap is never more than was written.
    return int(float(match[1]) * UNITS[match[2] or "B"])


def parse_caps(memory: int | str | Sequence[int | str]) -> int | tuple[int, ...]:
    """Return the cap of all ranks in bytes, or the cap of each: text lists them as 16GiB,24GiB."""
    if isinstance(memory, str) and "," in memory:
        text, memory = memory, memory.split(",")
        if not all(part.strip() for part in memory):
            raise InputError(
                f"{text!r} lacks a size beside a comma; write one for each rank, as 16GiB,24GiB"
            )
    if isinstance(memory, str) or not isinstance(memory, Sequence):
        return parse_bytes(memory)
    return tuple(map(parse_bytes, memory))


def caps_by_rank(memory_bytes: int | tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the cap of each rank; InputError if a list is of another length."""
    if isinstance(memory_bytes, int):
        return (memory_bytes,) * ranks
    if len(memory_bytes) != ranks:
        raise InputError(
            f"memory lists {len(memory_bytes)} caps, but there are {ranks} ranks; "
            "give one for each, or one for all"
        )
    return memory_bytes


def size_text(size: int) -> str:
    """Return a number of bytes as 1.5 MiB (2²⁰ bytes each)."""
    name, scale = size_scale(size)
    return f"{size / scale:.{int(scale > 1)}f} {name}"


def size_scale(size: int) -> tuple[str, int]:
    """Return the unit in which a number of bytes reads best, and how many bytes it has."""
    # What is left under a cap may be negative.
    scales = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((pair for pair in scales if abs(size) >= pair[1]), ("B", 1))


def option_text(size: int) -> str:
    """Return a size as an option takes it, exact and as short as it goes: 16GB, 1536MiB, 1001B."""
    # The largest unit of which it is a whole number; of zero that is all of them.
    unit = max((name for name in UNITS if size % UNITS[name] == 0), key=lambda name: UNITS[name])
    return f"{size // UNITS[unit]}{unit}"


def exact_size_text(size: int) -> str:
    """Return a size that may be copied into an option: 1.5 MiB (1,572,864 bytes)."""
    return size_text(size) if abs(size) < 2**10 else f"{size_text(size)} ({size:,} bytes)"
