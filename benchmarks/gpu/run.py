"""Runs parts, each in a process of its own, within its time and within that of the whole run.

After some errors of CUDA a process can do nothing more on the device, and a part may hang. So a
part is a process that sends its rows, and that is ended when its time is over:

    here    start ─▶ operators    rows, None ─▶ here    start ─▶ rank    rows, None ─▶ here …

Parts that time something run alone. Those that do not share the device afterwards, the longest of
them in several processes:

    here    start ─▶ memory, memory, memory, ranks, capture    rows of all ─▶ here
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.bench import Bench, CudaMeter, device_costs
from benchmarks.gpu.cases import Part, rows_of
from benchmarks.gpu.models import GPU
from benchmarks.gpu.operators import CALIBRATED, calibrated_device
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.rows import Row, error_row

__all__ = ["TOTAL_SECONDS", "WHOLE", "Launch", "Share", "in_process", "run_parts", "share_of"]

TOTAL_SECONDS = 510  # below the nine minutes that the command may take, with its start and its end
LEAST_SECONDS = 10  # A part that has less left is not begun.


class Share(NamedTuple):
    """Which cases of a part a process has: every `count`-th one from `index` on."""

    index: int
    count: int


WHOLE = Share(0, 1)

Launch = Callable[[str, Share, Path, float], Iterator[Row]]
"""From a part's name, a share of it, the folder of this run and the seconds that it may take to its
rows.
"""


def run_parts(
    names: Sequence[str],
    folder: Path,
    launch: Launch,
    *,
    parts: Mapping[str, Part] = PARTS,
    total_seconds: float = TOTAL_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, list[Row]]]:
    """Yield the name and rows of each part as it is done; skip those with no time left."""
    end = clock() + total_seconds
    note = f"skipped: the {total_seconds:.0f} s of the run are over"
    skipped = Row("all of it", None, None, "", note=note)
    alone = [name for name in names if parts[name].is_timed]
    for name in alone:
        left = end - clock()
        if left < LEAST_SECONDS:
            yield name, [skipped._replace(part=name)]
            continue
        yield name, list(launch(name, WHOLE, folder, min(left, parts[name].seconds)))
    together, left = [name for name in names if name not in alone], end - clock()
    if left < LEAST_SECONDS:
        yield from ((name, [skipped._replace(part=name)]) for name in together)
        return

    def rows(name: str, share: Share) -> list[Row]:
        return list(launch(name, share, folder, min(left, parts[name].seconds)))

    with ThreadPoolExecutor(max_workers=sum(part.shares for part in parts.values())) as pool:
        running = {
            name: [
                pool.submit(rows, name, Share(index, parts[name].shares))
                for index in range(parts[name].shares)
            ]
            for name in together
        }
        for name, shares in running.items():
            yield name, list(chain.from_iterable(share.result() for share in shares))


def in_process(name: str, share: Share, folder: Path, seconds: float) -> Iterator[Row]:
    """Yield the rows of a part that runs in a process of its own, which has so many seconds."""
    context = multiprocessing.get_context("spawn")  # A forked process could not use CUDA.
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_rows, args=(name, share, folder, sender), daemon=True)
    process.start()
    sender.close()  # So that the end of the process is the end of the pipe.
    try:
        yield from _received(receiver, name, time.monotonic() + seconds, seconds)
    finally:
        process.kill()
        process.join()


def _received(receiver: Connection, name: str, end: float, seconds: float) -> Iterator[Row]:
    """Yield rows until the part is done, until its time is over, or until its process is gone."""
    last = "nothing"
    while receiver.poll(max(0.0, end - time.monotonic())):
        try:
            row = receiver.recv()
        except EOFError:
            note = f"ERROR: the process ended without a word after {last}"
            yield Row("the rest", None, None, "", note=note, part=name)
            return
        if row is None:
            return
        last = row.what
        yield row
    note = f"stopped: its {seconds:.0f} s were over, after {last}"
    yield Row("the rest", None, None, "", note=note, part=name)


def _send_rows(name: str, share: Share, folder: Path, sender: Connection) -> None:
    """In the process of a part: send its rows, and None at the end."""
    warnings.simplefilter("ignore")  # of models and of PyTorch, about what is meant to be as it is
    try:
        for row in rows_of(name, share_of(PARTS[name], share), _gpu_bench(folder)):
            sender.send(row)
    except Exception as error:
        traceback.print_exc()
        sender.send(error_row("the device", error)._replace(part=name))
    sender.send(None)


def share_of(part: Part, share: Share) -> Part:
    """Return a part with the cases of this share."""
    return part._replace(
        cases=lambda bench: islice(part.cases(bench), share.index, None, share.count)
    )


def _gpu_bench(folder: Path) -> Bench:
    """Return the bench of this machine's GPU.

    A GPU that devices.json does not have is calibrated, unless that is done already.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    calibrated = folder / CALIBRATED
    bench = Bench(device, CudaMeter(device), device_costs(device, calibrated), GPU, folder)
    if bench.costs == f"roofline:{calibrated}" and not calibrated.exists():
        calibrated_device(bench)
    return bench
