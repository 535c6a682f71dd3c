"""The world: the processes that run together under torchrun, and what they tell each other.

Without torchrun there is one process, and every function here returns at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pipecompile.errors import InputError, PipecompileError, RankFaultError

__all__ = [
    "broadcast",
    "calling_together",
    "failing_together",
    "gather",
    "join",
    "rank",
    "run_on_first",
    "share_from_first",
    "size",
]

T = TypeVar("T")
SETTLING_SECONDS = 0.1
"""Enough for threads that wait for the interpreter alone."""


def join() -> None:
    """Join the other ranks under torchrun, with NCCL on GPUs and gloo elsewhere.

    What is logged for information then comes from rank 0 only, unless the user set another level.
    """
    _initialise()
    # That of the package and not of this room: the other ranks would repeat what all rooms say.
    logger = logging.getLogger("pipecompile")
    if rank() and logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)


def _initialise() -> None:
    if not (dist.is_available() and dist.is_torchelastic_launched()) or dist.is_initialized():
        return
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    store, number, processes = next(rendezvous("env://"))
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        # torchrun keeps this store for all its restarts (pytorch/pytorch#135712): under the same
        # names ranks would find the addresses of those that are gone, and wait for them.
        store = PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=processes)
    # A group that is destroyed only by the interpreter's end can abort ranks that still run.
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        # A thread of gloo lets go of the tensors of the last exchange after that is over, for which
        # it needs the interpreter. Amid the interpreter's end this would abort the process, and
        # torchrun take a run that went well for one that failed.
        time.sleep(SETTLING_SECONDS)
        dist.destroy_process_group()


def size() -> int:
    """Return how many processes run together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if size() > 1 else 0


def run_on_first(function: Callable[[], T]) -> T | None:
    """Return what `function` returns on rank 0, and None elsewhere.

    If it raises, every rank raises an error with the same message.
    """
    result: list[T | None] = [None]
    error: Exception | None = None
    if rank() == 0:
        try:
            result = [function()]
        except Exception as caught:
            error = caught
    _raise_alike(error)
    return result[0]


def _raise_alike(error: Exception | None) -> None:
    """Raise rank 0's error on every rank; otherwise the others would wait for rank 0 for ever."""
    kind = type(error) if isinstance(error, PipecompileError) else PipecompileError
    message: list[Any] = [None if error is None else (kind, f"rank 0: {error}")]
    if size() > 1:
        _broadcast_from_first(message)
    if error is not None:
        raise error
    if message[0] is not None:
        raise message[0][0](message[0][1])


def share_from_first(function: Callable[[], bytes]) -> bytes:
    """Return on every rank what `function` returns on rank 0; only rank 0 calls it."""
    return broadcast(run_on_first(function) or b"")


def broadcast(message: bytes) -> bytes:
    """Return on every rank the `message` of rank 0."""
    messages = [message]
    if size() > 1:
        _broadcast_from_first(messages)
    return messages[0]


def _broadcast_from_first(values: list[Any]) -> None:
    with calling_together("a call that all ranks make"):
        dist.broadcast_object_list(values, src=0)


def gather(value: T, group: dist.ProcessGroup | None = None) -> Sequence[T]:
    """Return on every rank of `group`, or of all, the `value` of each, in their order."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with calling_together("a call that all ranks make"):
        dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def calling_together(call: str) -> Iterator[None]:
    """Raise RankFaultError if the block cannot reach a rank, which `call` needs on all of them."""
    try:
        yield
    except RuntimeError as error:
        # The backends raise RuntimeError if a peer is gone. These two are RuntimeErrors as well,
        # and say by themselves what went wrong.
        if isinstance(error, PipecompileError | torch.OutOfMemoryError):
            raise
        reason = str(error).partition("\n")[0]
        raise RankFaultError(
            f"{call} exchanges values with all ranks, and one cannot be reached ({reason}); make "
            "it on every rank, whichever uses what it returns, and after a step that failed midway "
            "start the processes anew"
        ) from error


@contextmanager
def failing_together() -> Iterator[None]:
    """If the block raises on one rank, raise InputError on the others, which would wait for it."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    problems = gather(None if error is None else f"rank {rank()}: {error}")
    if error is not None:
        raise error
    for problem in filter(None, problems):
        raise InputError(problem)
