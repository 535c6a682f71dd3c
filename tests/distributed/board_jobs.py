"""What ranks do on a board."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipecompile import InputError
from pipecompile.runtime import board
from pipecompile.runtime.board import Board, HostBoard, board_of
from pipecompile.runtime.deadline import Deadline
from tests.device import DEVICE
from tests.distributed.fault_jobs import small_pipeline

Numbers = list[list[int]]


def told(rank: int, number: int) -> list[int]:
    """What a rank tells in a round: some of it is what others tell, or it told before."""
    return [number // 3, rank * number % 5, 2**46 + rank]


def rounds(count: int) -> tuple[str, list[Numbers], int]:
    """The kind of the board, what was read of each of so many rounds, and how many files are left.

    Ranks come late by turns, and read late.
    """
    with tempfile.TemporaryDirectory(dir=board.SHARED_MEMORY) as folder:
        with patch.object(board, "SHARED_MEMORY", Path(folder)):
            own = board_of(None)
        files = len(os.listdir(folder))
    return type(own).__name__, list(read_rounds(own, count)), files


def read_rounds(own: Board, count: int) -> Iterator[Numbers]:
    late = random.Random(dist.get_rank())
    for number in range(count):
        time.sleep(late.choice((0, 0, 0.003)))
        reading = own.tell(told(dist.get_rank(), number), Deadline())
        time.sleep(late.choice((0, 0, 0.003)))
        yield reading()


def rounds_on_two_hosts(count: int) -> tuple[str, list[Numbers], int]:
    """The same where the last rank does not see the file of the first."""
    missing = FileNotFoundError if dist.get_rank() == 2 else None
    with patch.object(HostBoard, "__init__", side_effect=missing, return_value=None):
        return rounds(count)


def rounds_without_room(count: int) -> tuple[str, list[Numbers], int]:
    """The same where the folder is full."""
    with patch.object(os, "posix_fallocate", side_effect=OSError):
        return rounds(count)


def rounds_without_shared_memory(count: int) -> tuple[str, list[Numbers], int]:
    """The same where the system has no folder for shared memory."""
    with patch.object(tempfile, "mkstemp", side_effect=FileNotFoundError):
        return rounds(count)


def rounds_of_a_part(count: int) -> list[Numbers]:
    """What is read by ranks 1 and 2, which are a group of their own; nothing on rank 0."""
    group = dist.new_group([1, 2])
    if not dist.get_rank():
        return []
    own = board_of(group)
    assert isinstance(own, HostBoard)
    return list(read_rounds(own, count))


def board_of_a_rank_that_cannot() -> tuple[str, int]:
    """What a rank says where the last one fails while the board is made, and how many files are
    left.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    error = ValueError("planted") if dist.get_rank() == 2 else None
    with tempfile.TemporaryDirectory(dir=board.SHARED_MEMORY) as folder:
        try:
            with (
                patch.object(board, "SHARED_MEMORY", Path(folder)),
                patch.object(HostBoard, "__init__", side_effect=error, return_value=None),
            ):
                HostBoard.shared_by(group)
        except Exception as caught:
            return type(caught).__name__, len(os.listdir(folder))
    raise AssertionError("it has made one")


def board_after_another(count: int) -> tuple[bool, int]:
    """Whether all who use a group have one board, and how many handles more so many calls need."""
    first = board_of(None)
    before = len(os.listdir("/proc/self/fd"))
    alike = all(board_of(dist.group.WORLD) is first for _ in range(count))
    return alike, len(os.listdir("/proc/self/fd")) - before


def begins(what: Sequence[str]) -> str:
    """What each rank says that begins the step of a pipeline, or an evaluation, in its place in
    `what`.
    """
    mesh = init_device_mesh(DEVICE.type, (1, 2), mesh_dim_names=("dp", "pp"))
    pipelines = {"a": small_pipeline("1f1b", 2, mesh=mesh), "b": small_pipeline("gpipe", 2)}
    own = what[dist.get_rank()]
    pipeline, batch = pipelines[own[0]]
    try:
        if own.endswith("evaluates"):
            pipeline.evaluate(batch)
        else:
            pipeline.step(batch)
    except InputError as error:
        return str(error)
    return ""


def waits_for(fault: str, seconds: float | None) -> tuple[str, float]:
    """What a rank says of another that has told nothing, and after how long. The process group has
    a second.
    """
    own = board_of(dist.new_group(backend="gloo", timeout=timedelta(seconds=1)))
    dist.barrier()
    if dist.get_rank():
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3)
        return "", 0.0
    start = time.monotonic()
    try:
        own.tell([1, 2, 3], Deadline(seconds))()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("it has read what nobody told")
