"""What each encoding of a saved tensor leaves of a storage, and what it takes.

graph/saved_tensors.py is what they do; this is for planners, without PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from pipecompile.ir.encodings import CHUNK_ELEMENTS, ELEMENT_BYTES, POLICY_OF, Memory, Policy, Use

__all__ = ["SavedStorage", "SavingCost", "cost_by_policy", "costs_by_use"]

_NARROW = ((2**8, 1), (2**15, 2), (2**31, 4))  # below what these bytes of an integer hold
# Kernels of pack_bits and unpack_bits read and write so many bytes for each element, beside the bits themselves.
_GATHERED, _SPREAD = 5, 11


@dataclass(frozen=True)
class SavedStorage:
    """A storage of so many `bytes` that backwards keep, as elements of `dtype`, by torch's name without `torch.`.

    `uses` say what each saved tensor in it is for. `is_mask` where it holds zero and one constant, as booleans always
    do; `bound` is above all indices that it holds: the elements of one plane of what was pooled.
    """

    bytes: int
    dtype: str
    uses: tuple[Use, ...] = ("other",)
    is_mask: bool = False
    bound: int = 2**63

    @property
    def elements(self) -> int:
        """How many there are."""
        return self.bytes // ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class SavingCost:
    """What one storage takes, for one microbatch.

    `kept_bytes` lie on the device between forward and backward, `host_bytes` on the host, and have crossed the link to
    it once each way; on a CPU both are one memory. `packing_bytes` and `unpacking_bytes` are what kernels read and
    write in the forward and in the backward, where the storage exists again, in its full size, while it is read;
    `scratch_bytes` is the most that they take meanwhile, beside that and what is kept.
    """

    kept_bytes: int
    host_bytes: int = 0
    packing_bytes: int = 0
    unpacking_bytes: int = 0
    scratch_bytes: int = 0


def costs_by_use(
    policies: Collection[Policy], storage: SavedStorage, memory: Memory
) -> list[SavingCost] | None:
    """What each saved tensor in it leaves, as its backward reads it; None if that is not known of one of them."""
    costs = [
        _by_use(use, storage, memory) if POLICY_OF.get(use) in policies else None
        for use in storage.uses
    ]
    known = [cost for cost in costs if cost is not None]
    return known if len(known) == len(costs) else None


def cost_by_policy(
    policies: Collection[Policy], storage: SavedStorage, memory: Memory
) -> tuple[Policy, SavingCost] | None:
    """The first of the policies that fits whatever it is for, and what that leaves; None if none does."""
    costs = ((policy, _by_policy(policy, storage, memory)) for policy in policies)
    return next(((policy, cost) for policy, cost in costs if cost is not None), None)


def _by_use(use: Use, storage: SavedStorage, memory: Memory) -> SavingCost | None:
    """None for indices that no smaller integer holds."""
    size, count = storage.bytes, storage.elements
    if use == "pool input":
        return SavingCost(0)
    if use == "relu":
        return _bits(count, memory, packing=size + 3 * count, unpacking=count + size)
    width = next((width for bound, width in _NARROW if storage.bound <= bound), None)
    return None if width is None else _cast(size, count * width)


def _by_policy(policy: Policy, storage: SavedStorage, memory: Memory) -> SavingCost | None:
    """Whatever it is for; None where it is not what the policy expects."""
    size, count = storage.bytes, storage.elements
    if policy == "offload":
        return SavingCost(0, host_bytes=size, packing_bytes=size, unpacking_bytes=size)
    if policy == "half" and storage.dtype == "float32":
        return _cast(size, size // 2)
    if policy == "mask" and storage.dtype == "bool":
        return _bits(count, memory, packing=2 * count, unpacking=0)
    wide = ELEMENT_BYTES[storage.dtype]
    if policy == "mask" and storage.is_mask and memory == "cpu" and wide <= 8:
        return _bits(
            count, memory, packing=9 * size + 2 * count, unpacking=3 * size + count, wide=wide
        )
    return None


def _bits(count: int, memory: Memory, *, packing: int, unpacking: int, wide: int = 1) -> SavingCost:
    """Of a chunk there are flags, and beside them as many bytes for bits, or elements of `wide` bytes."""
    kept = ceil(count / 8)
    return SavingCost(
        kept,
        packing_bytes=packing + _GATHERED * count + kept,
        unpacking_bytes=unpacking + _SPREAD * count + kept,
        scratch_bytes=min(count, CHUNK_ELEMENTS[memory]) * (1 + wide),
    )


def _cast(size: int, kept: int) -> SavingCost:
    return SavingCost(kept, packing_bytes=size + kept, unpacking_bytes=size + kept)
