"""A board, on which ranks write some whole numbers, and read what all of them have written.

Ranks of one host share memory for it, which takes microseconds. A collective over gloo, the way
between hosts, takes half a millisecond of each step: it wakes two threads on every rank.

    word = [ 2 bits: 0 | 15 bits: the round | 47 bits: the number ]

A word is written at once, and says of which round it is, so that whoever reads it needs no lock.
Two rounds lie there by turns. A rank reads all others in a round before it writes the next one, so
none is overwritten before all have read it. Behind them each rank notes what it does now, which
others read if it has ended without a word.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from pipecompile.runtime import world
from pipecompile.runtime.deadline import Deadline

__all__ = ["NUMBER_BITS", "WIDTH", "Board", "GroupBoard", "HostBoard", "board_of"]

WIDTH = 3
"""How many numbers a rank tells in a round."""
NUMBER_BITS = 47
NUMBERS = 2**NUMBER_BITS - 1
ROUNDS = 2**15
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
        """Write the `WIDTH` numbers of this rank, of which the low `NUMBER_BITS` are told."""
        ...

    def note(self, number: int) -> None:
        """Note what this rank does now."""
        ...

    def noted(self, rank: int) -> int:
        """Return what a global rank has noted last, 0 if that is not known here."""
        ...


def board_of(group: dist.ProcessGroup | None) -> Board:
    """Return the board of the ranks of `group`, which exchanges tensors on the host; None stands
    for all processes. All of its ranks must call this.

    All who use a group have one board, so that ranks which begin different things meet there.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if group not in _HOST_BOARDS:
        _HOST_BOARDS[group] = HostBoard.shared_by(group)
    return _HOST_BOARDS[group] or GroupBoard(group)


class GroupBoard:
    """A board of ranks on several hosts: what they tell is gathered by their process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
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

    def note(self, number: int) -> None:
        """Notes do not leave a host."""

    def noted(self, rank: int) -> int:
        """Return 0."""
        return 0


class HostBoard:
    """A board of `ranks` on one host, in the file at `path`, which lies in memory. A rank waits for
    another at most `seconds`.

    Each rank holds a lock on a byte of the file, which the system releases when its process ends.
    It is one of POSIX, which a forked child does not hold.
    """

    def __init__(self, path: Path, ranks: Sequence[int], seconds: float) -> None:
        self._ranks = ranks  # global ones, in the order of the group
        self._own = ranks.index(dist.get_rank())
        self._seconds = seconds
        self._round = 0
        self._last_read = 0
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        self._words = memoryview(mmap.mmap(self._file, self.size(ranks))).cast("q")
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._own)

    @staticmethod
    def size(ranks: Sequence[int]) -> int:
        """Return the bytes of its file."""
        return (2 * WIDTH + 1) * len(ranks) * WORD_BYTES

    @classmethod
    def shared_by(cls, group: dist.ProcessGroup) -> HostBoard | None:
        """Return the board of the ranks of `group`; None if they do not share memory."""
        ranks = dist.get_process_group_ranks(group)
        seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        # Nobody waits for a rank that is late while the file is there.
        world.gather(None, group)
        made = _made_file(cls.size(ranks)) if dist.get_rank() == ranks[0] else None
        own = None
        try:
            path = world.gather(made, group)[0]
            if path is not None:
                with suppress(OSError):  # on another host it is not there
                    own = cls(path, ranks, seconds)
            # After this exchange all have opened it and hold their locks.
            are_there = world.gather(own is not None, group)
        finally:
            if made is not None:
                made.unlink()
        return own if all(are_there) else None

    def tell(self, numbers: Sequence[int], deadline: Deadline) -> Reading:
        """Write the numbers of this rank into the memory that all read."""
        assert len(numbers) == WIDTH
        if self._last_read < self._round:
            # A step failed before it read what the others told. They may not have read it either.
            self._read_all(self._round, deadline)
        self._round += 1
        number = self._round
        start = self._start(self._own, number)
        for place, value in enumerate(numbers, start):
            self._words[place] = number % ROUNDS << NUMBER_BITS | value & NUMBERS
        return lambda: self._read_all(number, deadline)

    def note(self, number: int) -> None:
        """Note what this rank does now."""
        self._words[self._own - len(self._ranks)] = number

    def noted(self, rank: int) -> int:
        """Return what a global rank has noted last."""
        return self._words[self._ranks.index(rank) - len(self._ranks)]

    def _start(self, index: int, number: int) -> int:
        return (number % 2 * len(self._ranks) + index) * WIDTH

    def _read_all(self, number: int, deadline: Deadline) -> list[list[int]]:
        """Return what all ranks have told in a round, once they have."""
        end = time.monotonic() + self._seconds
        told = [self._read(index, number, deadline, end) for index in range(len(self._ranks))]
        self._last_read = number
        return told

    def _read(self, index: int, number: int, deadline: Deadline, end: float) -> list[int]:
        """Return what a rank has told in a round, once it has; torch's error of a peer that cannot
        be reached if it ends without that, or time is over.
        """
        naps, has_ended = 0, False
        while (told := self._told(index, number)) is None:
            # It may have told its numbers and then ended: it was asked before they were looked for.
            if has_ended:
                raise dist.DistBackendError(f"the process of rank {self._ranks[index]} has ended")
            if deadline.is_over() or time.monotonic() > end:
                raise dist.DistBackendError(f"rank {self._ranks[index]} has told nothing in time")
            naps += 1
            if naps > SHORT_NAPS:  # the rank is late: it may be gone, or load its batch for long
                has_ended = self._has_ended(index)
            time.sleep(SHORT_NAP_SECONDS if naps < SHORT_NAPS else NAP_SECONDS)
        return told

    def _told(self, index: int, number: int) -> list[int] | None:
        start = self._start(index, number)
        words = self._words[start : start + WIDTH].tolist()
        if any(word >> NUMBER_BITS != number % ROUNDS for word in words):
            return None
        return [word & NUMBERS for word in words]

    def _has_ended(self, index: int) -> bool:
        """Return whether nobody holds the lock of a rank."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, index)
        return True


# Not of `GroupBoard`, which refers to its group and would keep it alive.
_HOST_BOARDS: weakref.WeakKeyDictionary[dist.ProcessGroup, HostBoard | None] = (
    weakref.WeakKeyDictionary()
)


def _made_file(size: int) -> Path | None:
    """Return a new file of zeros in shared memory; None where the system has no room for it."""
    try:
        handle, name = tempfile.mkstemp(prefix="pipecompile-", dir=SHARED_MEMORY)
    except OSError:
        return None
    try:
        # Not left to the first write, which would end the process by SIGBUS if there is no room.
        os.posix_fallocate(handle, 0, size)
    except OSError:
        os.unlink(name)
        return None
    finally:
        os.close(handle)
    return Path(name)
