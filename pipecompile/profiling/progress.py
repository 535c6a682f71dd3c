"""Long work says how far it is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

QUIET_SECONDS = 5.0


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of `total` steps; everything goes to standard error."""
    if not sys.stderr.isatty():
        yield _lines(label, total)
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _lines(label, total)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def _lines(label: str, total: int) -> Callable[[], None]:
    done, spoken = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, spoken
        done += 1
        if time.monotonic() - spoken >= QUIET_SECONDS:
            spoken = time.monotonic()
            print(f"{label}: {done} of {total}", file=sys.stderr, flush=True)

    return advance
