"""A board, on which ranks write some whole numbers, and read what all of them have written.

Ranks of one host share memory for it, which takes microseconds. A collective over gloo, the way
between hosts, takes half a millisecond of each step: it wakes two threads on every rank.

    word = [ 15 bits: the round | 47 bits: the number ]

A word says of which round it is, so that whoever reads it needs no lock. A rank is at most one
round ahead of another, since it reads all others before it goes on; so it writes two rounds by
turns, and leaves the last one for those who have not read it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from pipecompile.runtime import world
from pipecompile.runtime.deadline import Deadline

__all__ = ["NUMBER_BITS", "Board", "GroupBoard", "HostBoard", "board_of"]

NUMBER_BITS = 47
NUMBERS = 2**NUMBER_BITS - 1
ROUNDS = 2**15
WIDTH = 4  # words of a rank in a round
WORD_BYTES = 8
SHARED_MEMORY = Path("/dev/shm")
SHORT_NAPS = 1000  # a tenth of a second
SHORT_NAP_SECONDS = 2e-5
NAP_SECONDS = 1e-3

Reading = Callable[[], list[list[int]]]
"""Waits for all ranks, and returns the numbers of each."""


class Board(Protocol):
    """Where the ranks of a group tell each other numbers, in rounds in which all take part."""

    def tell(self, numbers: Sequence[int], deadline: Deadline) -> Reading:
        """Write the numbers of this rank, `WIDTH` at most; only `NUMBER_BITS` of each are told."""
        ...


def board_of(group: dist.ProcessGroup | None) -> Board:
    """Return a board of the ranks of `group`, which exchanges tensors on the host; None stands for
    all processes. All of its ranks must call this.
    """
    return HostBoard.shared_by(group) or GroupBoard(group)


class GroupBoard:
    """A board of ranks on several hosts: what they tell is gathered by their process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def tell(self, numbers: Sequence[int], deadline: Deadline) -> Reading:
        """Begin to gather the numbers of all ranks."""
        # A default device that the user has set is not for what goes through the host.
        own = torch.tensor(numbers, device="cpu")
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        work = deadline.start_all_gather(every, own, self._group)

        def read() -> list[list[int]]:
            deadline.wait(work)
            return [each.tolist() for each in every]

        return read


class HostBoard:
    """A board of ranks on one host, in the file at `path`, which lies in memory.

    Each rank holds the lock of its own byte of the file, which ends with its process.
    """

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self._file = path.open("r+b", buffering=0)
        self._rank = rank
        self._ranks = ranks
        self._round = 0
        memory = mmap.mmap(self._file.fileno(), self.size(ranks))
        self._words = memoryview(memory).cast("q")
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes of its file."""
        return 2 * ranks * WIDTH * WORD_BYTES

    @classmethod
    def shared_by(cls, group: dist.ProcessGroup | None) -> HostBoard | None:
        """Return the board of the ranks of `group`; None if they do not share memory."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        made = _made_file(cls.size(ranks)) if rank == 0 else None
        paths = world.gather(made, group)
        own = None
        if paths[0] is not None:
            with suppress(OSError):  # on another host it is not there
                own = cls(paths[0], rank, ranks)
        # After this exchange all have opened it and hold their locks.
        are_there = world.gather(own is not None, group)
        if made is not None:
            made.unlink()
        return own if all(are_there) else None

    def tell(self, numbers: Sequence[int], deadline: Deadline) -> Reading:
        """Write the numbers of this rank into the memory that all read."""
        self._round += 1
        number = self._round
        start = self._start(self._rank, number)
        for place, value in enumerate(numbers, start):
            self._words[place] = number % ROUNDS << NUMBER_BITS | value & NUMBERS
        return lambda: [
            self._read(rank, number, len(numbers), deadline) for rank in range(self._ranks)
        ]

    def _start(self, rank: int, number: int) -> int:
        return (number % 2 * self._ranks + rank) * WIDTH

    def _read(self, rank: int, number: int, count: int, deadline: Deadline) -> list[int]:
        """Return what `rank` has told in this round, once it has."""
        start, naps = self._start(rank, number), 0
        while True:
            words = self._words[start : start + count].tolist()
            if all(word >> NUMBER_BITS == number % ROUNDS for word in words):
                return [word & NUMBERS for word in words]
            naps += 1
            if naps < SHORT_NAPS:
                time.sleep(SHORT_NAP_SECONDS)
            else:  # the rank is late: it may be gone, or load its batch for long
                self._check_reachable(rank, deadline)
                time.sleep(NAP_SECONDS)

    def _check_reachable(self, rank: int, deadline: Deadline) -> None:
        """Raise torch's error of a peer that cannot be reached if time is over or it has ended."""
        if deadline.is_over():
            raise dist.DistBackendError(f"rank {rank} has told nothing in time")
        with suppress(OSError):  # it is locked
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
            raise dist.DistBackendError(f"the process of rank {rank} has ended")


def _made_file(size: int) -> Path | None:
    """Return a new file of zeros in shared memory; None where the system has no room for it."""
    try:
        handle, name = tempfile.mkstemp(prefix="pipecompile-", dir=SHARED_MEMORY)
    except OSError:
        return None
    try:
        # Not left to the first write, which would end the process if there is no room.
        os.posix_fallocate(handle, 0, size)
    except OSError:
        os.unlink(name)
        return None
    finally:
        os.close(handle)
    return Path(name)
