"""The processes that run together: joining them, counting them, and letting the first one decide."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipecompile.errors import PipecompileError

__all__ = ["broadcast", "gathered", "join", "on_first", "rank", "shared", "size"]

T = TypeVar("T")


def join() -> None:
    """Under torchrun, joins the other ranks: NCCL where there are GPUs, gloo elsewhere. Otherwise does nothing."""
    if not (dist.is_available() and dist.is_torchelastic_launched()) or dist.is_initialized():
        return
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    dist.init_process_group("nccl" if gpu else "gloo")
    # Left to the interpreter's end, a group can abort the ranks that are not done yet.
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def size() -> int:
    """How many processes run together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if size() > 1 else 0


def on_first(function: Callable[[], T]) -> T | None:
    """What `function` returns on rank 0; None elsewhere. If it fails, it fails on every rank with one message."""
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
    """Raises rank 0's error on every rank: the others would wait for it for ever."""
    kind = type(error) if isinstance(error, PipecompileError) else PipecompileError
    message: list[Any] = [None if error is None else (kind, f"rank 0: {error}")]
    if size() > 1:
        dist.broadcast_object_list(message, src=0)
    if error is not None:
        raise error
    if message[0] is not None:
        raise message[0][0](message[0][1])


def shared(function: Callable[[], bytes]) -> bytes:
    """What `function` returns on rank 0, on every rank."""
    return broadcast(on_first(function) or b"")


def broadcast(message: bytes) -> bytes:
    """The message of rank 0, on every rank."""
    messages = [message]
    if size() > 1:
        dist.broadcast_object_list(messages, src=0)
    return messages[0]


def gathered(value: T) -> Sequence[T]:
    """`value` of every rank, in their order, on every rank."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values
