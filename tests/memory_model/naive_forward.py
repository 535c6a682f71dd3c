"""A forward, found the long way: what lives while it runs, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.memory_model.naive_encodings import EncodedStorage, Key
from tests.memory_model.naive_recompute import NaiveRecompute
from tests.memory_model.naive_stage import NaiveStage

__all__ = ["NaiveForward"]


@dataclass
class NaiveForward(NaiveRecompute):
    """What lives on a rank in forwards."""

    def forward(self, stage: NaiveStage, microbatch: int, run: str) -> None:
        done: set[str] = set()
        for copy in stage.strided_copies:
            self.live.hold((stage.index, microbatch, run, *copy.key), copy.size)
            self.live.need(0)
        for node in stage.nodes:
            for index in stage.regions_beginning(node.name):
                self.live.hold(
                    (stage.index, microbatch, "region's copies", index),
                    stage.buffer_copy_bytes(stage.regions[index]),
                )
            made = [
                (key, encoding)
                for key, encoding in stage.own_encodings()
                if encoding.encoded_at == node.name
            ]
            for key, encoding in made:
                if not encoding.waits_for_end:
                    self.live.hold((stage.index, microbatch, "encoding", *key), encoding.size)
            beside = max(
                (encoding.workspace for _, encoding in made if not encoding.waits_for_end),
                default=0,
            )
            self._work(node.forward_peak_bytes, node.workspace_bytes, beside)
            done.add(node.name)
            for storage in stage.produced_by(node):
                self.live.hold(
                    (stage.index, microbatch, run, storage), stage.graph.storages[storage]
                )
            self._encode_at_end(
                stage,
                microbatch,
                run,
                [(key, encoding) for key, encoding in made if encoding.waits_for_end],
                done,
            )
            self._free_unread(stage, microbatch, run, done)
            self.live.need(0)
            for index, region in enumerate(stage.regions):
                if region[-1] == node.name and not stage.is_recomputed(index):
                    self.live.drop(stage.index, microbatch, "region's copies", index)
        for key, size in stage.sent_copies.items():
            self.live.hold((stage.index, microbatch, run, *key), size)
        self.live.need(0)
        self._free_unread(stage, microbatch, run, set(stage.order))

    def _free_unread(self, stage: NaiveStage, microbatch: int, run: str, done: set[str]) -> None:
        for storage in stage.own_storages():
            if stage.is_freed(storage, done):
                self.live.drop(stage.index, microbatch, run, storage)
        for copy in stage.strided_copies:
            if not copy.holders and not copy.is_sent and copy.until <= done:
                self.live.drop(stage.index, microbatch, run, *copy.key)

    def _encode_at_end(
        self,
        stage: NaiveStage,
        microbatch: int,
        kind: str,
        made: Sequence[tuple[Key, EncodedStorage]],
        done: set[str],
    ) -> None:
        """Encode at the end of a run, one after the other.

        A storage is freed with its last encoding, unless the run did not produce it.
        """
        if not made:
            return
        end = made[0][1].encoded_at
        run = stage.run_of(end)
        gone = [storage for storage in stage.own_storages() if stage.is_freed(storage, done)]
        given = [storage for storage in gone if run in stage.runs_reading(storage)]
        waiting = [encoding.storage for _, encoding in made]
        for storage in gone:
            if storage not in given and storage not in waiting:
                self.live.drop(stage.index, microbatch, kind, storage)
        self.live.need(0)
        for key, encoding in sorted(
            made, key=lambda pair: min(run.index(n) for n in pair[1].savers if n in run)
        ):
            self.live.hold((stage.index, microbatch, "encoding", *key), encoding.size)
            self.live.need(encoding.workspace)
            waiting.remove(encoding.storage)
            if encoding.storage in gone and encoding.storage not in (*given, *waiting):
                self.live.drop(stage.index, microbatch, kind, encoding.storage)

    def keep_outputs_only(self, stage: NaiveStage, microbatch: int) -> None:
        """Keep only the outputs of a forward."""
        for storage in stage.own_storages():
            if not stage.is_sent(storage):
                self.live.drop(stage.index, microbatch, "kept", storage)
        for copy in stage.strided_copies:
            self.live.drop(stage.index, microbatch, "kept", *copy.key)
        for key, size in stage.messages.items():
            self.live.drop(stage.index, microbatch, "kept", *key)
            self.live.hold((stage.index, microbatch, "outputs only", *key), size)
