"""Ranks that share the GPU over NCCL, started by torchrun: gradients, streams, and waits of hosts.

NCCL's messages go through sockets here (tests/device.py), and ranks take turns on the GPU. So no
times are measured. What rank_worker.py finds is read from a file that rank 0 writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import Case
from benchmarks.gpu.rows import Row

__all__ = ["ranks_cases"]

SECONDS = 120.0


def ranks_cases(bench: Bench) -> Iterator[Case]:
    """Yield pipelines of two ranks, and two of them as replicas."""
    for ranks in (2, 4):
        yield Case(f"{ranks} ranks", partial(_rows, bench, ranks))


def _rows(bench: Bench, ranks: int) -> list[Row]:
    path, scale = bench.folder / f"ranks-{ranks}.json", bench.scale
    # Nothing is timed, so a small model shows as much.
    scale = scale._replace(
        width=min(256, scale.width), layers=min(4, scale.layers), tokens=min(256, scale.tokens)
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "--module", "benchmarks.gpu.rank_worker", str(path)),
        *map(str, scale),
    ]
    environment = {**os.environ, "PIPECOMPILE_TEST_DEVICE": bench.device.type}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as torchrun:
        try:
            _, errors = torchrun.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            torchrun.terminate()  # It ends its ranks, which a kill would leave on the device.
            print(torchrun.communicate()[1], file=sys.stderr)
            raise
    if torchrun.returncode:
        print(errors, file=sys.stderr)
        raise RuntimeError(f"torchrun ended with {torchrun.returncode}: {_reason(errors)}")
    return [Row(*row) for row in json.loads(path.read_text())]


def _reason(text: str) -> str:
    """Return the first line in what ranks have printed that names an error."""
    found = [line for line in text.splitlines() if "Error: " in line]
    return found[0] if found else "no error was printed"
