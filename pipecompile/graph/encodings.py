"""Other forms in which what a backward needs can lie in memory; after Jain et al., "Gist", ISCA 2018.

Each encodes the elements of a whole storage, flat, and restores them: `half` to 8 bits of precision, all others such
that the backward is the same bit for bit. Bits are made and read a chunk at a time, in memory for one chunk.

    mask       0 and one constant          1 bit per element
    sign       what ReLU returned          1 bit per element: its backward asks which are not ≤ 0, nothing else
    narrow     indices below a bound       the smallest integers that hold them
    shape      what pooling was given      nothing: its backward asks for size and layout alone
    half       float32                     bfloat16
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pipecompile.ir.encodings import CHUNK_ELEMENTS

__all__ = [
    "Encoded",
    "Encoder",
    "half",
    "mask",
    "narrow",
    "pack_bits",
    "shape",
    "sign",
    "unpack_bits",
]


class Encoded(Protocol):
    """What stands for the elements of a storage."""

    def restore(self) -> Tensor:
        """The elements, flat, in memory of their own, on the device where they were."""


Encoder = Callable[[Tensor], Encoded | None]
"""From the elements of a storage, flat; None where they are not what it is for."""

_GATHER = (
    0x0102040810204080  # the product moves bit 0 of byte i to bit 56 + i, and carries nothing there
)
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


def _chunks(flat: Tensor, bits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of `flat`, each with the bytes of `bits` that are for it."""
    size = CHUNK_ELEMENTS["cuda" if flat.is_cuda else "cpu"]
    return zip(flat.split(size), bits.split(size // 8), strict=True)


def _room_for_bits(flat: Tensor) -> Tensor:
    return torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)


def _packed(flat: Tensor, flags_of: Callable[[Tensor], Tensor]) -> Tensor:
    """A bit for what `flags_of` says of each element."""
    bits = _room_for_bits(flat)
    for part, packed in _chunks(flat, bits):
        packed.copy_(pack_bits(flags_of(part)))
    return bits


def _unpacked(bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Ones and zeros."""
    flat = torch.empty(count, dtype=dtype, device=bits.device)
    for part, packed in _chunks(flat, bits):
        part.copy_(unpack_bits(packed, part.numel()))
    return flat


@dataclass(frozen=True)
class _Mask:
    bits: Tensor
    count: int
    dtype: torch.dtype
    constant: int  # its bits, as an integer

    def restore(self) -> Tensor:
        if self.dtype == torch.bool:
            return _unpacked(self.bits, self.count, torch.bool)
        return (
            _unpacked(self.bits, self.count, _INTEGERS[self.dtype.itemsize])
            .mul_(self.constant)
            .view(self.dtype)
        )


def mask(flat: Tensor) -> Encoded | None:
    """Elements that are zero (not minus zero) or one constant, whatever it is.

    Booleans always are. Others are looked at on a CPU alone: on a GPU, whose dropout keeps booleans, it would wait.
    """
    if flat.dtype == torch.bool:
        # A boolean made by a view may hold any byte.
        return _Mask(
            _packed(flat.view(torch.uint8), lambda part: part != 0), flat.numel(), flat.dtype, 1
        )
    if flat.device.type != "cpu" or flat.dtype.itemsize not in _INTEGERS:
        return None
    elements = flat.view(_INTEGERS[flat.dtype.itemsize])
    if len({0, *elements[:_PREFIX].tolist()}) > 2:
        return None
    bits, constant = _room_for_bits(flat), 0
    for part, packed in _chunks(elements, bits):
        low, high = _extremes(part)
        constant = constant or low or high
        flags = part.to(torch.bool)
        if not _is_all(part, flags, constant):
            return None
        packed.copy_(pack_bits(flags))
    return _Mask(bits, flat.numel(), flat.dtype, constant)


def _is_all(elements: Tensor, flags: Tensor, constant: int) -> bool:
    """Whether they are the constant where there are flags, and else zero."""
    return not any(_extremes(flags.to(elements.dtype).mul_(constant).bitwise_xor_(elements)))


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
        return _unpacked(self.bits, self.count, self.dtype)


def sign(flat: Tensor) -> Encoded:
    """1 for what is positive or not a number, else 0: threshold_backward stops the gradient where its result is ≤ 0."""
    return _Sign(_packed(flat, lambda part: (part <= 0).logical_not_()), flat.numel(), flat.dtype)


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
