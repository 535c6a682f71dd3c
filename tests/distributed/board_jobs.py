"""What ranks do on a board."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from pipecompile.runtime import board
from pipecompile.runtime.board import HostBoard, board_of
from pipecompile.runtime.deadline import Deadline

Numbers = list[list[int]]


def told(rank: int, number: int) -> list[int]:
    """What a rank tells in a round: some of it is what others tell, or it told before."""
    return [number // 3, rank * number % 5, 2**46 + rank]


def rounds(count: int) -> tuple[str, list[Numbers], int]:
    """The kind of the board, what was read of each of so many rounds, and how many files are left.

    Ranks come late by turns, and read late.
    """
    own, late = board_of(None), random.Random(dist.get_rank())
    read = []
    for number in range(count):
        time.sleep(late.choice((0, 0, 0.003)))
        reading = own.tell(told(dist.get_rank(), number), Deadline())
        time.sleep(late.choice((0, 0, 0.003)))
        read.append(reading())
    return type(own).__name__, read, len(list(board.SHARED_MEMORY.glob("pipecompile-*")))


def rounds_without_shared_memory(count: int) -> tuple[str, list[Numbers], int]:
    """The same where ranks share no memory: each has a folder of its own."""
    with patch.object(board, "SHARED_MEMORY", Path("/nowhere")):
        return rounds(count)


def rounds_on_two_hosts(count: int) -> tuple[str, list[Numbers], int]:
    """The same where the last rank does not see the file of the first."""
    missing = FileNotFoundError if dist.get_rank() == 2 else None
    with patch.object(HostBoard, "__init__", side_effect=missing, return_value=None):
        return rounds(count)


def rounds_without_room(count: int) -> tuple[str, list[Numbers], int]:
    """The same where the folder is full."""
    with patch.object(os, "posix_fallocate", side_effect=OSError):
        return rounds(count)


def waits_for(fault: str, seconds: float | None) -> tuple[str, float]:
    """What a rank says of another that has told nothing, and after how long."""
    own = board_of(None)
    dist.barrier()
    if dist.get_rank():
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2)
        return "", 0.0
    start = time.monotonic()
    try:
        own.tell([1], Deadline(seconds))()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("it has read what nobody told")
