"""What stands for a storage between forward and backward where nodes encode their saved tensors.

A stage may have runs of nodes whose saved tensors are encoded (graph/saved_tensors.py does it):
another, smaller form of the storage is kept, and the storage itself exists only from the
backward of its last saver to that of its first. stage_values.py and recompute_problem.py follow
these forms; recompute/encoding_offers.py prices them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.encodings import Encoding, Use
from pipecompile.memory_model.encoding_costs import (
    EncodingCost,
    SavedStorage,
    cost_for_any_use,
    costs_by_use,
)
from pipecompile.memory_model.live_ranges import Storage

__all__ = ["OTHER", "EncodedPlaces", "StorageEncoding", "storage_encodings"]

OTHER: tuple[Use, ...] = ("other",)


class EncodedPlaces(NamedTuple):
    """A run of a stage's nodes, by place, with the encodings that its saved tensors may have."""

    places: tuple[int, ...]
    encodings: tuple[Encoding, ...]

    @property
    def encodes_at_end(self) -> bool:
        """Whether nothing is encoded before the run is done.

        These encodings depend on who saves a tensor and what for, which is only known then.
        """
        return not {"relu", "pool"}.isdisjoint(self.encodings)


class StorageEncoding(NamedTuple):
    """A storage of `storage_bytes` in another form, or one of its saved tensors in such a form.

    It is made in the forward of the node at `encoded_at`: when that saves the storage, or when that
    is done if it `waits_for_end` of the run. The storage exists again from the backward of the node
    at `decoded_at` on. Both are freed with the backward of the first of `savers`:

        place      2        3        4        5
        forward    saves    saves             ╌╌ encoding (made at 2) ──▶
        backward   ◀── freed         ◀── decoded at 4
    """

    storage_bytes: int
    cost: EncodingCost
    encoded_at: int
    waits_for_end: bool
    savers: tuple[int, ...]
    decoded_at: int

    def kept_bytes(self, allocator: AllocatorName) -> int:
        """Return the bytes on the device; on a CPU the host's memory is the same memory."""
        return self.cost.kept_bytes + (self.cost.host_bytes if allocator == "cpu" else 0)


def storage_encodings(
    storage: Storage,
    savers: Sequence[int],
    runs: Mapping[int, EncodedPlaces],
    allocator: AllocatorName,
) -> tuple[tuple[StorageEncoding, ...], tuple[int, ...]]:
    """Return the encodings of a storage that the nodes at `savers` save, and who keeps it as it is.

    `runs` are by place. An encoding that fits any use is shared by all runs that choose it. Those
    that depend on the use of a saved tensor are made for each one.
    """
    by_use, shared, plain = list[StorageEncoding](), dict[Encoding, StorageEncoding](), list[int]()
    # Savers 2 and 3 in a run and 5 in none are two groups: the encoding of the run's saved tensors
    # stands for the storage at 2 and 3, but at 5 it is kept as it is.
    for run, group in groupby(savers, key=runs.get):
        places = tuple(group)
        saved = None if run is None else _saved(storage, places)
        if run is None or saved is None:
            plain += places
        # Encodings by use are tried first; every use must have one.
        elif (costs := costs_by_use(run.encodings, saved, allocator)) is not None:
            # The backward of the owner is the only one that decodes such a form, and it frees it.
            owners = [place for place in places for _ in storage.uses[place]]
            end = run.places[-1]
            by_use += [
                StorageEncoding(storage.bytes, cost, end, True, (owner,), owner)
                for owner, cost in zip(owners, costs, strict=True)
            ]
        elif (choice := cost_for_any_use(run.encodings, saved, allocator)) is not None:
            encoding, cost = choice
            encoded_at = run.places[-1] if run.encodes_at_end else places[0]
            new = StorageEncoding(storage.bytes, cost, encoded_at, run.encodes_at_end, (), 0)
            # A later run adds its savers to the form that an earlier one has made. Backwards begin
            # with the last saver, so that is where it is decoded.
            first = shared.get(encoding, new)
            # What a run has moved to the host comes back together, with its last node.
            from_host = encoding == "offload" and allocator == "cuda"
            decoded_at = run.places[-1] if from_host else places[-1]
            shared[encoding] = first._replace(
                savers=(*first.savers, *places), decoded_at=decoded_at
            )
        else:
            plain += places
    return (*by_use, *shared.values()), tuple(plain)


def _saved(storage: Storage, places: Sequence[int]) -> SavedStorage | None:
    """Return what the nodes at `places` save of the storage; None if its contents are not known."""
    content = storage.content
    if content is None or not storage.bytes:
        return None
    uses = tuple(use for place in places for use in storage.uses.get(place, OTHER))
    bound = {} if content.bound is None else {"bound": content.bound}
    return SavedStorage(storage.bytes, content.dtype, uses, content.is_mask, **bound)
