"""Bytes twice: as they are asked for, and as an allocator may take them."""

from __future__ import annotations

from typing import Literal

from pipecompile.ir.serialization import NonNegative, Value

__all__ = ["ZERO", "AllocatorName", "Amount"]

AllocatorName = Literal["cpu", "cuda"]


class Amount(Value, frozen=True, kw_only=True, array_like=True):
    """Bytes twice: what is asked for, and what an allocator may take for it.

    In files it is [expected, bound].
    """

    expected: NonNegative
    bound: NonNegative

    def __add__(self, other: Amount) -> Amount:
        return Amount(expected=self.expected + other.expected, bound=self.bound + other.bound)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(expected=self.expected - other.expected, bound=self.bound - other.bound)

    # For differences only, such as what a backward frees: no file holds negative bytes.
    def __neg__(self) -> Amount:
        return ZERO - self

    def __mul__(self, times: int) -> Amount:
        return Amount(expected=self.expected * times, bound=self.bound * times)


ZERO = Amount(expected=0, bound=0)
