"""The heartbeat of a rank: a thread that publishes what the rank does while a step is watched."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from pipecompile.runtime.deadline import SETTLING_SECONDS, Deadline
from pipecompile.runtime.faults import RankState, verdict

__all__ = ["Heartbeat", "own_store"]

logger = logging.getLogger("pipecompile.runtime")
BEAT_SECONDS = 0.1
ANSWER_SECONDS = 2.0  # many times what a store takes that still answers
EXIT_STATUS = 70


def own_store() -> Store:
    """Return the store of the process group by a connection of its own: a step may hold that of the
    group for long. Made before the first step, since nobody can connect to a host that is gone.
    """
    store = _get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    # What this rank said in the steps of an earlier pipeline is not what it does in this one's.
    number = store.add(f"pipecompile-watches/{dist.get_rank()}", 1)
    return PrefixStore(f"pipecompile-watch-{number}", store)


class Heartbeat:
    """The thread that publishes the state of a watched step until it is stopped.

    `last_action` returns what a rank of this host has begun last, "" where that is not known: who
    dies has published what it did up to a beat before.
    """

    def __init__(
        self,
        state: Callable[[int], RankState],
        deadline: Deadline,
        store: Store,
        last_action: Callable[[int], str],
    ) -> None:
        self._state = state
        self._last_action = last_action
        self._deadline = deadline
        self._store = store
        self._is_store_lost = False
        self._over = threading.Event()
        self._publish(0)  # a rank that dies at once has begun the step nevertheless
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish the last state, and end the thread."""
        self._over.set()
        # A thread that asks a store which does not answer never ends.
        self._thread.join(0 if self._is_store_lost else ANSWER_SECONDS)

    def verdict(self, ranks: Sequence[int]) -> str | None:
        """Return which rank is at fault, once the ranks have had time to publish; None if the store
        does not answer.
        """
        found: list[str] = []
        # In a thread: torch's reads have no end if the machine of the store is gone.
        thread = threading.Thread(target=lambda: found.extend(self._find(ranks)), daemon=True)
        thread.start()
        thread.join(SETTLING_SECONDS + ANSWER_SECONDS)
        self._is_store_lost = not found
        return found[0] if found else None

    def _find(self, ranks: Sequence[int]) -> Iterator[str]:
        """Yield the verdict, or nothing if the store is lost."""
        # Whatever torch's stores raise is a RuntimeError.
        with suppress(RuntimeError):
            before = self._states(ranks)
            time.sleep(SETTLING_SECONDS)
            after = self._states(ranks)
            silent = [
                rank
                for rank, state in after.items()
                if state.phase in ("computing", "waiting") and state.beat == before[rank].beat
            ]
            for rank in silent:
                action = self._last_action(rank) or after[rank].action
                after[rank] = msgspec.structs.replace(after[rank], action=action)
            yield verdict(after, silent)

    def _run(self) -> None:
        beat, has_told = 0, False
        # An event instead of a sleep: the end of the step is published at once.
        while not self._over.wait(BEAT_SECONDS):
            beat += 1
            self._publish(beat)
            if self._deadline.is_over(by=SETTLING_SECONDS) and not has_told:
                has_told = True
                self._tell()
        self._publish(beat + 1)

    def _publish(self, beat: int) -> None:
        """Publish the state, unless the store has been lost: it does not come back."""
        if self._is_store_lost:
            return
        state = self._state(beat)
        try:
            self._store.set(str(dist.get_rank()), msgspec.json.encode(state).decode())
        except RuntimeError:
            self._is_store_lost = True

    def _states(self, ranks: Sequence[int]) -> dict[int, RankState]:
        known = [rank for rank in ranks if self._store.check([str(rank)])]
        read = {rank: self._store.get(str(rank)) for rank in known}
        # A rank that never published is in no step: `get` of its key would block.
        states = {rank: msgspec.json.decode(text, type=RankState) for rank, text in read.items()}
        return {rank: states.get(rank, RankState()) for rank in ranks}

    def _tell(self) -> None:
        """Log what the step cannot raise, since it does not come back; under torchrun end it."""
        state = self._state(0)
        if state.phase != "computing":
            return
        logger.critical("rank %d hangs in %s", dist.get_rank(), state.action)
        if dist.is_torchelastic_launched():
            os._exit(EXIT_STATUS)
