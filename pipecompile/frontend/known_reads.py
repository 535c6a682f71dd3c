"""What is known of the values that a forward reads, for the search for more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["NOTHING_KNOWN", "KnownReads"]


class KnownReads(NamedTuple):
    """What a forward reads of modules, and of objects that they hold, by path and name.

    `may_read` tells which attributes of modules lead to values that it may read, and `must_stay`
    which of these it does not set itself. `has_read` tells which attributes of objects it was seen
    to read. `runs_itself` tells by path which modules call their hooks in each step, and
    `has_noted` for which classes all reads of the objects that modules hold were seen.
    """

    may_read: Callable[[str, str], bool] = lambda *_: True
    must_stay: Callable[[str, str], bool] = lambda *_: True
    has_read: Callable[[str, str], bool] = lambda *_: False
    runs_itself: Callable[[str], bool] = lambda _: False
    has_noted: Callable[[type], bool] = lambda _: False


NOTHING_KNOWN = KnownReads()
