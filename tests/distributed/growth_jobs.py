"""What ranks do in tests of long runs: they count what they hold on the way."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile import pipecompile
from pipecompile.runtime.deadline import Deadline
from pipecompile.runtime.messages import Messages

WIDTH, ROWS = 64, 32  # so a message has 8 KB


class Held(NamedTuple):
    """What a process holds: `tensor_bytes` are those of Python's tensors, each storage once, and
    `resident_bytes` all memory that it takes from the system, but for pages of files, which the
    system takes back and reads again as it likes. `works` are operations of a process
    group that are under way or not yet given up, `handles` open files and threads.
    """

    tensor_bytes: int
    resident_bytes: int
    objects: int
    works: int
    handles: int


def held_on_the_way(
    schedule: str, microbatches: int, counts: tuple[int, int], **options: Any
) -> tuple[Held, Held]:
    """Train, and return what this rank holds after so many minibatches, and after more of them."""
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)) for _ in range(6)]
    batch = torch.randn(ROWS * microbatches, WIDTH)
    pipeline = pipecompile(
        nn.Sequential(*(part for layer in layers for part in layer)),
        batch,
        ranks=dist.get_world_size(),
        microbatches=microbatches,
        schedule=schedule,  # type: ignore[arg-type]
        loss_fn=nn.functional.mse_loss,
        costs="flops",
        self_check=False,
        **options,
    )
    works = _Works()
    with (
        patch.object(Messages, "_start", works.noting(Messages._start)),
        patch.object(Deadline, "start_all_reduce", works.noting(Deadline.start_all_reduce)),
    ):
        run = pipeline.train(
            repeat((batch, batch)), lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
        )
        found = []
        for number, _ in enumerate(run, 1):
            if number in counts:
                found.append(_held(works.alive))
            if number == max(counts):
                break
    first, last = found
    return first, last


class _Works:
    """The operations of a process group that still live."""

    def __init__(self) -> None:
        self._begun = weakref.WeakSet[Any]()

    def noting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, **options: Any) -> Any:
            begun = start(*args, **options)
            self._begun.update(begun if isinstance(begun, list) else [begun])
            return begun

        return started

    @property
    def alive(self) -> int:
        return len(self._begun)


def _held(works: int) -> Held:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed may still count
    objects = gc.get_objects()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in objects
        if type(each) in (Tensor, nn.Parameter)
    }
    status = Path("/proc/self/status").read_text().splitlines()
    (resident,) = (line.split()[1] for line in status if line.startswith("RssAnon:"))
    return Held(
        tensor_bytes=sum(storages.values()),
        resident_bytes=int(resident) * 1024,
        objects=len(objects),
        works=works,
        handles=len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task")),
    )
