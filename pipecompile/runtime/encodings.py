"""Other forms in which what a backward needs can lie in memory; after Jain et al., "Gist", ISCA 2018.

Each encodes the elements of a whole storage, flat, and restores them: `half` to 8 bits of precision, all others such
that the backward is the same bit for bit.

    mask       0 and one constant          1 bit per element
    sign       what ReLU returned          1 bit per element: its backward asks which are not ≤ 0, nothing else
    narrow     indices below a bound       the smallest integers that hold them
    shape      what pooling was given      nothing: its backward asks for size and layout alone
    half       float32                     bfloat16
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Encoded", "Encoder", "half", "mask", "narrow", "pack_bits", "shape", "sign", "unpack_bits"]


class Encoded(Protocol):
    """What stands for the elements of a storage."""

    def restore(self) -> Tensor:
        """The elements, flat, in memory of their own, on the device where they were."""


Encoder = Callable[[Tensor], Encoded | None]
"""From the elements of a storage, flat; None where they are not what it is for."""

_GATHER = 0x0102040810204080  # the product moves bit 0 of byte i to bit 56 + i, and carries nothing there
_SPREAD = 0x0101010101010101
_SELECT = 0x8040201008040201 - 2**64  # bit i of byte i
_FULL = 0x7F7F7F7F7F7F7F7F
_PREFIX = 64  # elements, enough to tell most tensors from a mask
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW = (torch.uint8, torch.int16, torch.int32)


def pack_bits(flags: Tensor) -> Tensor:
    """Bytes (⌈n / 8⌉,) that hold the booleans `flags` (n,), contiguous; the first in the lowest bit."""
    missing = -flags.numel() % 8
    flags = functional.pad(flags, (0, missing)) if missing else flags
    return (flags.view(torch.int64) * _GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` booleans of `packed`, in memory of their own."""
    words = packed.to(torch.int64).mul_(_SPREAD).bitwise_and_(_SELECT)
    return words.add_(_FULL).bitwise_right_shift_(7).bitwise_and_(_SPREAD).view(torch.bool)[:count]


@dataclass(frozen=True)
class _Mask:
    bits: Tensor
    count: int
    dtype: torch.dtype
    constant: int  # its bits, as an integer

    def restore(self) -> Tensor:
        flags = unpack_bits(self.bits, self.count)
        if self.dtype == torch.bool:
            return flags
        return flags.to(_INTEGERS[self.dtype.itemsize]).mul_(self.constant).view(self.dtype)


def mask(flat: Tensor) -> Encoded | None:
    """Elements that are zero (not minus zero) or one constant, whatever it is.

    Booleans always are. Others are looked at on a CPU alone: on a GPU, whose dropout keeps booleans, it would wait.
    """
    if flat.dtype == torch.bool:
        flags = flat.view(torch.uint8) != 0  # a boolean made by a view may hold any byte
        return _Mask(pack_bits(flags), flat.numel(), flat.dtype, 1)
    if flat.device.type != "cpu" or flat.dtype.itemsize not in _INTEGERS:
        return None
    elements = flat.view(_INTEGERS[flat.dtype.itemsize])
    if len({0, *elements[:_PREFIX].tolist()}) > 2:
        return None
    low, high = _extremes(elements)
    constant, flags = low or high, elements.to(torch.bool)
    rest = flags.to(elements.dtype).mul_(constant).bitwise_xor_(elements)
    return None if any(_extremes(rest)) else _Mask(pack_bits(flags), flat.numel(), flat.dtype, constant)


def _extremes(elements: Tensor) -> tuple[int, int]:
    """The lowest and the highest; on a CPU this takes a fraction of the time of comparisons."""
    low, high = elements.aminmax()
    return int(low), int(high)


@dataclass(frozen=True)
class _Sign:
    bits: Tensor
    count: int
    dtype: torch.dtype

    def restore(self) -> Tensor:
        return unpack_bits(self.bits, self.count).to(self.dtype)


def sign(flat: Tensor) -> Encoded:
    """1 for what is positive or not a number, else 0: threshold_backward stops the gradient where its result is ≤ 0."""
    return _Sign(pack_bits((flat <= 0).logical_not_()), flat.numel(), flat.dtype)


@dataclass(frozen=True)
class _Cast:
    elements: Tensor
    dtype: torch.dtype

    def restore(self) -> Tensor:
        return self.elements.to(self.dtype)


def narrow(flat: Tensor, *, bound: int) -> Encoded | None:
    """Integers from 0 to below `bound`; 32 bits must hold them."""
    for dtype in _NARROW:
        if bound - 1 <= torch.iinfo(dtype).max:
            return _Cast(flat.to(dtype), flat.dtype)
    return None


def half(flat: Tensor) -> Encoded | None:
    """Float32 as bfloat16: a relative error of up to 2⁻⁸ each, and the lowest float32 becomes −∞."""
    return _Cast(flat.to(torch.bfloat16), flat.dtype) if flat.dtype == torch.float32 else None


@dataclass(frozen=True)
class _Shape:
    count: int
    dtype: torch.dtype
    device: torch.device

    def restore(self) -> Tensor:
        return torch.empty(self.count, dtype=self.dtype, device=self.device)


def shape(flat: Tensor) -> Encoded:
    """Nothing of the elements."""
    return _Shape(flat.numel(), flat.dtype, flat.device)
