"""Recomputes of regions, found the long way: what is saved for whom, and what lives meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.memory_model.naive_encodings import Key
from tests.memory_model.naive_stage import NaiveStage

__all__ = ["LiveBytes", "NaiveRecompute"]


@dataclass
class LiveBytes:
    """What is held, by a key that says what it is; nothing is held twice under one key."""

    sizes: dict[Key, int] = field(default_factory=dict)
    highest: int = 0

    def hold(self, key: Key, size: int) -> None:
        assert key not in self.sizes
        self.sizes[key] = size

    def need(self, more: int) -> None:
        self.highest = max(self.highest, sum(self.sizes.values()) + more)

    def drop(self, *start: Any) -> None:
        """Free all whose key starts with these."""
        for key in [key for key in self.sizes if key[: len(start)] == start]:
            del self.sizes[key]


@dataclass
class NaiveRecompute:
    """What lives on a rank, and what is saved for regions by (stage, microbatch, region)."""

    live: LiveBytes = field(default_factory=LiveBytes)
    saved_in: dict[Key, set[tuple[Key, int]]] = field(default_factory=dict)

    def _work(self, rise: int, workspace: int, beside: int = 0) -> None:
        """Run a node's kernels: what they make is part of the rise; views run none."""
        self.live.need(beside + (rise + workspace if rise else 0))

    def _recompute(self, stage: NaiveStage, microbatch: int, region_index: int | None) -> None:
        """Recompute a region, unless that was done; before it the region around it.

        PyTorch's rules: what nodes save is saved for the innermost region, and what a region reads
        for the one around it, before it runs. A recompute ends when everything is saved.
        """
        if region_index is None or (stage.index, microbatch, region_index) in self.saved_in:
            return
        outer = stage.region_around(stage.regions[region_index])
        self._recompute(stage, microbatch, outer)
        aside = self.saved_in[stage.index, microbatch, region_index] = set()
        packs, done = stage.saves_of(region_index), set[str]()
        for number, name in enumerate(stage.regions[region_index]):
            packs = self._save(stage, aside, packs, (number, False))
            if not packs:
                break
            node = stage.graph.by_name[name]
            self._work(node.forward_peak_bytes, node.workspace_bytes)
            done.add(name)
            for storage in stage.produced_by(node):
                self.live.hold(
                    (stage.index, microbatch, "recomputed", region_index, storage),
                    stage.graph.storages[storage],
                )
            packs = self._save(stage, aside, packs, (number, True))
            self._free_recomputed(stage, microbatch, region_index, done)
            self.live.need(0)
            if not packs:
                break
        self._free_recomputed(stage, microbatch, region_index, set(stage.order))
        self._use_saved(stage, microbatch, outer, ("region", region_index))

    @staticmethod
    def _save(
        stage: NaiveStage,
        aside: set[tuple[Key, int]],
        packs: Sequence[tuple[int, bool, Key, Sequence[int]]],
        moment: tuple[int, bool],
    ) -> Sequence[tuple[int, bool, Key, Sequence[int]]]:
        """Save what is due at this moment, and return what is still to come."""
        for _, _, who, storages in (pack for pack in packs if pack[:2] == moment):
            if who[0] == "node" or stage.is_recomputed(who[1]):
                aside.update((who, storage) for storage in storages)
        return [pack for pack in packs if pack[:2] > moment]

    def _use_saved(
        self, stage: NaiveStage, microbatch: int, region_index: int | None, who: Key
    ) -> None:
        """Free what was saved for a backward that has run."""
        aside = self.saved_in.get((stage.index, microbatch, region_index), set())
        aside.difference_update([each for each in aside if each[0] == who])
        for index, _ in enumerate(stage.regions):
            self._free_recomputed(stage, microbatch, index, set(stage.order))

    def _free_recomputed(
        self, stage: NaiveStage, microbatch: int, region_index: int, done: set[str]
    ) -> None:
        """Free what a recompute made if it is saved nowhere, and read only by what is `done`."""
        for storage in stage.own_storages():
            needed = any(
                (stage.index, microbatch) == key[:2]
                and stage.recompute_holding(key[2], storage) == region_index
                for key, aside in self.saved_in.items()
                if storage in {each[1] for each in aside}
            )
            if not needed and stage.read_by(storage, done):
                self.live.drop(stage.index, microbatch, "recomputed", region_index, storage)
