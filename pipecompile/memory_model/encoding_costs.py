"""What each encoding of a saved tensor leaves of a storage, and what it takes to make and read it.

graph/saved_tensors.py encodes real tensors; this is the same for planners, without PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.encodings import CHUNK_ELEMENTS, ELEMENT_BYTES, ENCODING_OF, Encoding, Use

__all__ = ["EncodingCost", "SavedStorage", "cost_for_any_use", "costs_by_use"]

# Integers below these limits fit into so many bytes.
_INTEGER_BYTES = ((2**8, 1), (2**15, 2), (2**31, 4))
# Bytes per element that the kernels of pack_bits and unpack_bits read and write, beside the bits.
_BYTES_TO_PACK_A_BIT, _BYTES_TO_UNPACK_A_BIT = 5, 11


@dataclass(frozen=True)
class SavedStorage:
    """A storage of so many `bytes` that backwards need, with elements of `dtype`.

    `dtype` is torch's name without `torch.`, and `uses` say what each saved tensor in it is for.
    `is_mask` says that every element is zero or one constant, as booleans always are. All indices
    that it holds are below `bound`: the elements of one plane of what was pooled.
    """

    bytes: int
    dtype: str
    uses: tuple[Use, ...] = ("other",)
    is_mask: bool = False
    bound: int = 2**63

    @property
    def elements(self) -> int:
        """The number of elements."""
        return self.bytes // ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class EncodingCost:
    """What the encoding of one storage takes, for one microbatch.

    `kept_bytes` lie on the device between forward and backward. `host_bytes` lie on the host, and
    have crossed the link to it once each way; on a CPU both are one memory. `packing_bytes` and
    `unpacking_bytes` are what kernels read and write in the forward and in the backward.
    `workspace_bytes` is the most that they allocate meanwhile, beside the storage and its encoding.
    """

    kept_bytes: int
    host_bytes: int = 0
    packing_bytes: int = 0
    unpacking_bytes: int = 0
    workspace_bytes: int = 0


def costs_by_use(
    encodings: Collection[Encoding], storage: SavedStorage, allocator: AllocatorName
) -> list[EncodingCost] | None:
    """Return the cost of each saved tensor, encoded for what its backward reads of it.

    None if one of them has no such encoding among `encodings`.
    """
    costs = []
    for use in storage.uses:
        cost = _cost_by_use(use, storage, allocator) if ENCODING_OF.get(use) in encodings else None
        if cost is None:
            return None
        costs.append(cost)
    return costs


def cost_for_any_use(
    encodings: Collection[Encoding], storage: SavedStorage, allocator: AllocatorName
) -> tuple[Encoding, EncodingCost] | None:
    """Return the first of the encodings that fits for any use, and its cost; None if none does."""
    for encoding in encodings:
        cost = _cost_for_any_use(encoding, storage, allocator)
        if cost is not None:
            return encoding, cost
    return None


def _cost_by_use(use: Use, storage: SavedStorage, allocator: AllocatorName) -> EncodingCost | None:
    """Return the cost for this use; None for indices that no smaller integer holds."""
    size, count = storage.bytes, storage.elements
    if use == "pool input":
        return EncodingCost(0)  # the backward reads only its shape
    if use == "relu":  # the backward reads only the sign
        return _bits_cost(count, allocator, packing=size + 3 * count, unpacking=count + size)
    width = next((width for limit, width in _INTEGER_BYTES if storage.bound <= limit), None)
    return None if width is None else _cast_cost(size, count * width)


def _cost_for_any_use(
    encoding: Encoding, storage: SavedStorage, allocator: AllocatorName
) -> EncodingCost | None:
    """Return the cost for any use; None where the storage is not what the encoding is for."""
    size, count = storage.bytes, storage.elements
    if encoding == "offload":
        return EncodingCost(0, host_bytes=size, packing_bytes=size, unpacking_bytes=size)
    if encoding == "half" and storage.dtype == "float32":
        return _cast_cost(size, size // 2)
    if encoding == "mask" and storage.dtype == "bool":
        return _bits_cost(count, allocator, packing=2 * count, unpacking=0)
    width = ELEMENT_BYTES[storage.dtype]
    # Whether a float tensor is a mask is only checked on a CPU: on a GPU the check would wait.
    if encoding == "mask" and storage.is_mask and allocator == "cpu" and width <= 8:
        packing, unpacking = 9 * size + 2 * count, 3 * size + count
        return _bits_cost(count, allocator, packing=packing, unpacking=unpacking, width=width)
    return None


def _bits_cost(
    count: int, allocator: AllocatorName, *, packing: int, unpacking: int, width: int = 1
) -> EncodingCost:
    """Return the cost of one bit per element.

    Elements are packed in chunks. For each element of a chunk there is a flag of one byte, and
    beside it another byte for its bit, or the element itself in `width` bytes.
    """
    kept = ceil(count / 8)
    return EncodingCost(
        kept,
        packing_bytes=packing + _BYTES_TO_PACK_A_BIT * count + kept,
        unpacking_bytes=unpacking + _BYTES_TO_UNPACK_A_BIT * count + kept,
        workspace_bytes=min(count, CHUNK_ELEMENTS[allocator]) * (1 + width),
    )


def _cast_cost(size: int, kept: int) -> EncodingCost:
    return EncodingCost(kept, packing_bytes=size + kept, unpacking_bytes=size + kept)
