"""Where the log goes on the command line: to standard error, with a bar for long work on a
terminal.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from pipecompile.cli.ranks import is_first_rank

__all__ = ["logging_to_stderr"]

SECONDS = re.compile(r" \(\d+\.\d s\)$")


@contextmanager
def logging_to_stderr(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Show the log in the block: warnings only if `quiet`, everything if `verbose`.

    Of several ranks only the first one speaks; the others would say the same.
    """
    logger = logging.getLogger("pipecompile")
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    # A bar follows every step of long work, which is logged for debugging.
    has_bar = sys.stderr.isatty() and not quiet
    handler = _TerminalHandler(level) if has_bar else _LineHandler(level)
    # On the handler and not on the logger: a logger's filter does not see the records of its
    # children, and each room logs under a name of its own.
    handler.addFilter(_NotSaidBefore())
    before = logger.level, logger.propagate
    logger.setLevel((logging.DEBUG if has_bar else level) if is_first_rank() else logging.CRITICAL)
    # Otherwise a root logger that the user's model configures would print each line once more.
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _line(record: logging.LogRecord) -> str:
    prefix = "warning: " if record.levelno >= logging.WARNING else ""
    return prefix + record.getMessage()


class _NotSaidBefore(logging.Filter):
    """Lets each line through once. A command may capture a model several times, to plan it and to
    compare it, and would repeat all that there is to say of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is new, whatever seconds it ends with."""
        # "captured the model (3.4 s)" and "captured the model (3.1 s)" are the same news. Records
        # of progress pass always, as each moves the bar on.
        line = SECONDS.sub("", record.getMessage())
        is_new = hasattr(record, "progress") or line not in self._said
        self._said.add(line)
        return is_new


class _LineHandler(logging.Handler):
    """One line for each record."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= self.level:
            click.echo(_line(record), err=True)


class _TerminalHandler(logging.Handler):
    """Lines in colour, and a bar for records that carry their progress
    (pipecompile/profiling/progress.py).
    """

    def __init__(self, level: int) -> None:
        # Imported here: a command whose output goes to a file does not need it.
        from rich.console import Console

        # Progress is logged at DEBUG and must come through; `_shown_level` is for other records.
        super().__init__(logging.DEBUG)
        self._shown_level = level
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Any = None
        self._task: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        progress = getattr(record, "progress", None)
        if progress is not None:
            self._show(progress)
        elif record.levelno >= self._shown_level:
            style = "yellow" if record.levelno >= logging.WARNING else "dim"
            self._console.print(_line(record), style=style, markup=False)

    def _show(self, progress: Any) -> None:
        # Imported when the first bar is shown: most commands end before they need one.
        from rich.progress import Progress

        if self._bar is None:
            # Transient: a bar that is full says nothing, and the line that follows says what was
            # done.
            self._bar = Progress(console=self._console, transient=True)
            self._task = self._bar.add_task(progress.label, total=progress.total)
            self._bar.start()
        self._bar.update(self._task, completed=progress.done)
        if progress.done >= progress.total:
            self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def close(self) -> None:
        self._stop()
        super().close()
