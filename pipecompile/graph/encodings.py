"""Encodings: other forms in which a saved tensor lies in memory; after "Gist" (Jain et al., 2018).

Each encoder takes the elements of a whole storage as a flat tensor and returns a form that restores
them. With `encode_half` they are restored to 8 bits of precision; with all others the backward is
the same bit for bit. Bits are packed and unpacked in chunks, so that workspace is one chunk.

    encoder         for                            memory
    encode_mask     zeros and one constant         1 bit per element
    encode_sign     results of ReLU                1 bit per element: the backward only needs
                                                   to know which elements are not ≤ 0
    encode_narrow   indices below a bound          the smallest integers that hold them
    encode_shape    inputs of pooling              nothing: the backward only needs the layout
    encode_half     float32                        bfloat16
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
    "EncodedElements",
    "Encoder",
    "encode_half",
    "encode_mask",
    "encode_narrow",
    "encode_shape",
    "encode_sign",
    "pack_bits",
    "unpack_bits",
]


class EncodedElements(Protocol):
    """The encoded elements of a storage."""

    def restore(self) -> Tensor:
        """Return the elements, flat, in new memory on the device where they were."""


Encoder = Callable[[Tensor], EncodedElements | None]
"""Encodes the flat elements of a storage; None for elements that it cannot encode."""

# Eight booleans are eight bytes of 0 or 1, that is one 64-bit word. One multiplication moves them
# all into the word's top byte: bit 0 of byte i goes to bit 56 + i, and nothing carries there.
#
#     word               0000000h 0000000g … 0000000b 0000000a     byte 7 … byte 0
#     word × _GATHER     hgfedcba ????????  …  ????????            shift right by 56: hgfedcba
#
# Back: × _SPREAD copies the byte into all eight bytes, & _SELECT keeps bit i of byte i, and
# + _FULL carries into bit 7 of each byte that is not 0; shifted by 7 and masked, it is 0 or 1.
_GATHER = 0x0102040810204080
_SPREAD = 0x0101010101010101
_SELECT = 0x8040201008040201 - 2**64  # as a signed integer
_FULL = 0x7F7F7F7F7F7F7F7F
_PREFIX = 64  # elements, enough to tell most tensors from a mask
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW_TYPES = (torch.uint8, torch.int16, torch.int32)


def pack_bits(flags: Tensor) -> Tensor:
    """Return bytes (⌈n / 8⌉,) that hold booleans (n,), which are contiguous.

    The first boolean is the lowest bit of the first byte.
    """
    missing = -flags.numel() % 8
    flags = functional.pad(flags, (0, missing)) if missing else flags
    return (flags.view(torch.int64) * _GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` booleans that the bytes `packed` hold, in new memory."""
    words = packed.to(torch.int64).mul_(_SPREAD).bitwise_and_(_SELECT)
    return words.add_(_FULL).bitwise_right_shift_(7).bitwise_and_(_SPREAD).view(torch.bool)[:count]


def _chunks(flat: Tensor, bits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of `flat`, each with the bytes of `bits` that belong to it."""
    size = CHUNK_ELEMENTS["cuda" if flat.is_cuda else "cpu"]
    return zip(flat.split(size), bits.split(size // 8), strict=True)


def _empty_bits(flat: Tensor) -> Tensor:
    """Return bytes with a bit for each element of `flat`."""
    return torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)


def _pack_chunks(flat: Tensor, flags_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return bytes with the bit that `flags_of` gives for each element of `flat`."""
    bits = _empty_bits(flat)
    for part, packed in _chunks(flat, bits):
        packed.copy_(pack_bits(flags_of(part)))
    return bits


def _unpack_chunks(bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` ones and zeros of type `dtype`."""
    flat = torch.empty(count, dtype=dtype, device=bits.device)
    for part, packed in _chunks(flat, bits):
        part.copy_(unpack_bits(packed, part.numel()))
    return flat


@dataclass(frozen=True)
class _MaskedConstant:
    bits: Tensor
    count: int
    dtype: torch.dtype
    constant: int  # the bits of the constant, as an integer

    def restore(self) -> Tensor:
        if self.dtype == torch.bool:
            return _unpack_chunks(self.bits, self.count, torch.bool)
        flags = _unpack_chunks(self.bits, self.count, _INTEGERS[self.dtype.itemsize])
        return flags.mul_(self.constant).view(self.dtype)


def encode_mask(flat: Tensor) -> EncodedElements | None:
    """Encode elements that are zero (not minus zero) or one constant, whatever this is.

    Booleans always are. Elements of other types are examined on a CPU only: on a GPU that would
    have to wait for the kernel, and dropout saves booleans there.
    """
    if flat.dtype == torch.bool:
        # A boolean that is a view of another type may hold any byte.
        bits = _pack_chunks(flat.view(torch.uint8), lambda part: part != 0)
        return _MaskedConstant(bits, flat.numel(), flat.dtype, 1)
    if flat.device.type != "cpu" or flat.dtype.itemsize not in _INTEGERS:
        return None
    # As integers, minus zero and NaN are compared by their bits.
    elements = flat.view(_INTEGERS[flat.dtype.itemsize])
    if len({0, *elements[:_PREFIX].tolist()}) > 2:
        return None
    bits, constant = _empty_bits(flat), 0
    for part, packed in _chunks(elements, bits):
        low, high = _extremes(part)
        constant = constant or low or high
        flags = part.to(torch.bool)
        if not _is_masked_constant(part, flags, constant):
            return None
        packed.copy_(pack_bits(flags))
    return _MaskedConstant(bits, flat.numel(), flat.dtype, constant)


def _is_masked_constant(elements: Tensor, flags: Tensor, constant: int) -> bool:
    """Return whether the elements are `constant` where `flags` are set, and zero elsewhere."""
    return not any(_extremes(flags.to(elements.dtype).mul_(constant).bitwise_xor_(elements)))


def _extremes(elements: Tensor) -> tuple[int, int]:
    """Return the lowest and the highest element; on a CPU this is far faster than comparisons."""
    low, high = elements.aminmax()
    return int(low), int(high)


@dataclass(frozen=True)
class _Sign:
    bits: Tensor
    count: int
    dtype: torch.dtype

    def restore(self) -> Tensor:
        return _unpack_chunks(self.bits, self.count, self.dtype)


def encode_sign(flat: Tensor) -> EncodedElements:
    """Encode elements as 1 if they are positive or NaN, and as 0 otherwise.

    The backward of ReLU, threshold_backward, stops the gradient where its result is ≤ 0.
    """
    bits = _pack_chunks(flat, lambda part: (part <= 0).logical_not_())
    return _Sign(bits, flat.numel(), flat.dtype)


@dataclass(frozen=True)
class _CastElements:
    elements: Tensor
    dtype: torch.dtype

    def restore(self) -> Tensor:
        return self.elements.to(self.dtype)


def encode_narrow(flat: Tensor, *, bound: int) -> EncodedElements | None:
    """Encode integers from 0 to `bound` − 1; None if 32 bits do not hold them."""
    for dtype in _NARROW_TYPES:
        if bound - 1 <= torch.iinfo(dtype).max:
            return _CastElements(flat.to(dtype), flat.dtype)
    return None


def encode_half(flat: Tensor) -> EncodedElements | None:
    """Encode float32 as bfloat16.

    The relative error of an element is at most 2⁻⁸; the lowest float32 becomes −∞.
    """
    if flat.dtype != torch.float32:
        return None
    return _CastElements(flat.to(torch.bfloat16), flat.dtype)


@dataclass(frozen=True)
class _ShapeOnly:
    count: int
    dtype: torch.dtype
    device: torch.device

    def restore(self) -> Tensor:
        return torch.empty(self.count, dtype=self.dtype, device=self.device)


def encode_shape(flat: Tensor) -> EncodedElements:
    """Encode only how many elements there are; the restored ones are not set."""
    return _ShapeOnly(flat.numel(), flat.dtype, flat.device)
