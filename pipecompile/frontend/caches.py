"""Functions with caches (functools.lru_cache) that a forward calls: what they keep of a recording must not stay."""

from __future__ import annotations

import functools
import gc
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["CacheUse"]

if TYPE_CHECKING:
    Cache = functools._lru_cache_wrapper[Any]

# Their caches hold no tensors, and are too many to look at.
OTHERS = frozenset({"torch", "sympy", "mpmath", "functools", "typing", "re", "numpy", "networkx", "pipecompile"})


class CacheUse:
    """Which caches are used from now on; `clear` empties these, so that no fake tensor stays in them.

    A model that takes a tensor out of such a cache would be recorded with it as a constant, one whose cache is empty
    with the computation: `clear` tells whether a cache had entries before, for the recording to be repeated.
    """

    def __init__(self) -> None:
        self._before = [(cache, cache.cache_info()) for cache in _caches(len(sys.modules))]

    def clear(self) -> bool:
        """Empties the caches that were used; whether one of them had entries before."""
        used = [(cache, before) for cache, before in self._before if cache.cache_info() != before]
        for cache, _ in used:
            cache.cache_clear()
        return any(before.currsize for _, before in used)


@functools.lru_cache(maxsize=1)
def _caches(modules: int) -> list[Cache]:
    """All there are; they are looked for again when the number of imported `modules` has changed."""
    caches = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    return [each for each in caches if str(getattr(each, "__module__", "")).partition(".")[0] not in OTHERS]
