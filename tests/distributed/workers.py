"""A group of workers for all tests: to start one for a case takes longer than the case.

They are gloo ranks, or NCCL ranks that share one GPU (tests/device.py).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as multiprocessing

Job = Callable[..., Any]

# Processes are forked from one that has imported these and started no thread: an import of torch
# and of what most jobs need takes longer than a job. What cannot be imported there is left out.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded", "tests.distributed.jobs"])


class Workers:
    """At most `size` processes; a job runs on the first `ranks` of them as one process group."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._jobs = 0

    def run(self, ranks: int, job: Job, *args: Any, folder: str, **options: Any) -> list[Any]:
        """What `job(*args, **options)` returned on each rank; its traceback if it failed."""
        assert ranks <= self._size
        while len(self._processes) < ranks:
            self._start()
        self._jobs += 1
        store = os.path.join(folder, f"store-{self._jobs}")
        for rank, pipe in enumerate(self._pipes[:ranks]):
            pipe.send((rank, ranks, store, job, args, options))
        try:
            results = [pipe.recv() for pipe in self._pipes[:ranks]]
        except BaseException:  # of a timeout too: the next job must not read these answers
            self._kill()
            raise
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def _start(self) -> None:
        own, theirs = FORKS.Pipe()
        process = FORKS.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        self._pipes.append(own)
        self._processes.append(process)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._pipes, self._processes = [], []

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)


def _work(pipe: Connection) -> None:
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from tests.device import prepare_rank

    while (message := pipe.recv()) is not None:
        rank, ranks, store, job, args, options = message
        try:
            prepare_rank(rank)
            with _group(rank, ranks, store):
                # Memory of a GPU cannot be sent to a process that does not use it.
                answer = True, tree_map_only(Tensor, Tensor.cpu, job(*args, **options))
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


@contextmanager
def _group(rank: int, ranks: int, store: str) -> Iterator[None]:
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from tests.device import BACKEND

    meeting = dist.FileStore(store, ranks)
    dist.init_process_group(BACKEND, store=meeting, rank=rank, world_size=ranks)
    try:
        yield
        if dist.is_initialized():  # a job whose step has failed leaves the group itself
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # What DTensors remember of meshes has the names of groups that are gone.
        _clear_sharding_prop_cache()
