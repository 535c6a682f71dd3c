"""Cases: what a part consists of. A case that fails is a row, and does not stop the others."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.rows import Row, error_row

__all__ = ["Case", "Part", "rows_of"]


class Case(NamedTuple):
    """One thing to measure: its name for messages, and what returns its rows."""

    what: str
    run: Callable[[], Iterable[Row]]


class Part(NamedTuple):
    """A part of the benchmark: its cases on a bench, and the seconds that it may take.

    One that is not timed may run beside others, and its cases in as many processes as `shares`.
    """

    cases: Callable[[Bench], Iterable[Case]]
    seconds: int
    is_timed: bool = True
    shares: int = 1


def rows_of(name: str, part: Part, bench: Bench) -> Iterator[Row]:
    """Yield the rows of a part, as each case gives them; where errors come from is printed."""
    try:
        for case in part.cases(bench):
            try:
                for row in case.run():
                    yield row._replace(part=name)
            except Exception as error:
                traceback.print_exc()
                yield error_row(case.what, error)._replace(part=name)
            # The next case must not find what this one left, after an error either.
            gc.collect()
            if bench.is_cuda:
                torch.cuda.empty_cache()
    except Exception as error:
        traceback.print_exc()
        yield error_row("all of it", error)._replace(part=name)
