"""What stands for storages between forward and backward where runs of nodes save them by policies of saving.py.

Part of the memory model, see memory.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from pipecompile.ir.encodings import Memory, Policy, Use
from pipecompile.memory_model.encoding_costs import (
    SavedStorage,
    SavingCost,
    cost_by_policy,
    costs_by_use,
)
from pipecompile.memory_model.live_ranges import Storage

__all__ = ["OTHER", "StorageEncoding", "EncodedPlaces", "storage_encodings"]

OTHER: tuple[Use, ...] = ("other",)


class EncodedPlaces(NamedTuple):
    """Nodes of a stage that follow each other, by place, with the policies of what they save."""

    places: tuple[int, ...]
    policies: tuple[Policy, ...]

    @property
    def settles(self) -> bool:
        """Whether all that it saves waits until it is done: only then is it known who saves what."""
        return not {"relu", "pool"}.isdisjoint(self.policies)


class StorageEncoding(NamedTuple):
    """A storage of `full` bytes in another form, or what stands for one saved tensor in it.

    It is made in the forward of the node at `made`: when that saves, or where it `waits`, when that is done. From the
    backward of the node at `back` on the storage is there again; both go with that of the first of `savers`.
    """

    full: int
    cost: SavingCost
    made: int
    waits: bool
    savers: tuple[int, ...]
    back: int

    def kept(self, memory: Memory) -> int:
        """Bytes on the device; on a CPU the host's memory is the same."""
        return self.cost.kept_bytes + (self.cost.host_bytes if memory == "cpu" else 0)


def storage_encodings(
    storage: Storage, savers: Sequence[int], runs: Mapping[int, EncodedPlaces], memory: Memory
) -> tuple[tuple[StorageEncoding, ...], tuple[int, ...]]:
    """The forms of a storage that nodes at the places `savers` save, and those that keep it as it is.

    `runs` are by place. A form by a policy for any use is one for all runs; others are made for each saved tensor.
    """
    forms, shared, plain = list[StorageEncoding](), dict[Policy, StorageEncoding](), list[int]()
    for run, group in groupby(savers, key=runs.get):
        places = tuple(group)
        saved = None if run is None else _saved(storage, places)
        if run is None or saved is None:
            plain += places
        elif (costs := costs_by_use(run.policies, saved, memory)) is not None:
            owners = [place for place in places for _ in storage.uses[place]]
            made = run.places[-1]
            forms += [
                StorageEncoding(storage.bytes, c, made, True, (at,), at)
                for at, c in zip(owners, costs, strict=True)
            ]
        elif (found := cost_by_policy(run.policies, saved, memory)) is not None:
            policy, cost = found
            made = run.places[-1] if run.settles else places[0]
            first = shared.get(
                policy, StorageEncoding(storage.bytes, cost, made, run.settles, (), 0)
            )
            # What a run has moved to the host comes back together.
            back = run.places[-1] if policy == "offload" and memory == "cuda" else places[-1]
            shared[policy] = first._replace(savers=(*first.savers, *places), back=back)
        else:
            plain += places
    return (*forms, *shared.values()), tuple(plain)


def _saved(storage: Storage, places: Sequence[int]) -> SavedStorage | None:
    """What nodes at these places save of it; None if that is not known."""
    content = storage.content
    if content is None or not storage.bytes:
        return None
    uses = tuple(use for place in places for use in storage.uses.get(place, OTHER))
    bound = {} if content.bound is None else {"bound": content.bound}
    return SavedStorage(storage.bytes, content.dtype, uses, content.is_mask, **bound)
