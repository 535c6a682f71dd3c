"""How far an iterator is: state that a forward changes by `next`, and that no graph keeps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from types import GeneratorType
from typing import Any

from pipecompile.graph.attributes import CONTAINERS, PLAIN

__all__ = ["position"]

MOST_DEEP = 4
"""How deep iterators in an iterator may lie."""


def position(value: Iterator[Any]) -> Any:
    """Return something that differs after `next(value)`; None if only a `next` could tell.

    Of a generator these are the instruction at which it waits and its numbers. Of Python's own
    iterators it is what a copy is made of, such as an index.
    """
    return _position(value, MOST_DEEP)


def _position(value: Any, depth: int) -> Any:
    # From Python 3.12 on the rest of a range is a range too.
    if isinstance(value, (*PLAIN, range)) or depth == 0:
        return repr(value) if isinstance(value, (*PLAIN, range)) else None
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        own = {} if frame is None else frame.f_locals
        return frame and frame.f_lasti, [_position(each, depth - 1) for each in own.values()]
    if isinstance(value, tuple):
        return [_position(each, depth - 1) for each in value]
    if isinstance(value, Iterator) and not isinstance(value, CONTAINERS):
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 says that 3.14 copies no itertools
            return _position(value.__reduce__(), depth)
    return None
