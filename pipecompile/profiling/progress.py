"""The progress of long work, reported to the log.

The command line shows a bar instead, from the same records: each carries its `Progress` as
`record.progress`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Progress", "progress"]

logger = logging.getLogger("pipecompile.profiling")
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Progress:
    """How many of `total` steps are done; `label` says of what."""

    label: str
    done: int
    total: int

    def __str__(self) -> str:
        return f"{self.label}: {self.done} of {self.total}"


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `total` steps.

    Every step is logged at level DEBUG, and one every few seconds at level INFO, so that a log file
    stays short.
    """
    done, last_line = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, last_line
        done += 1
        is_due = time.monotonic() - last_line >= SECONDS_BETWEEN_LINES
        if is_due:
            last_line = time.monotonic()
        # The record carries numbers and not only a text, so
        # that the command line can draw a bar of them.
        state = Progress(label, done, total)
        level = logging.INFO if is_due else logging.DEBUG
        logger.log(level, "%s", state, extra={"progress": state})

    yield advance
