"""Functions with caches (functools.lru_cache) that a forward calls: they must not keep fake tensors."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pipecompile.frontend.tape import contains_tensor

__all__ = ["CacheUse"]

if TYPE_CHECKING:
    Cache = functools._lru_cache_wrapper[Any]

# Their caches hold no tensors, and are too many to look at.
OTHERS = frozenset(
    {"torch", "sympy", "mpmath", "functools", "typing", "re", "numpy", "networkx", "pipecompile"}
)


class CacheUse:
    """Which caches are used from now on; `clear` empties those with tensors in them.

    A model that takes a tensor out of such a cache would be recorded with it as a constant, one whose cache is empty
    with the computation: `clear` tells whether a cache had tensors before, for the recording to be repeated.
    """

    def __init__(self) -> None:
        caches = _caches()
        self._before = [(cache, cache.cache_info(), _keeps_tensors(cache)) for cache in caches]

    def clear(self) -> bool:
        """Empties the caches that were used and keep tensors; whether one of them kept some before."""
        used = [
            (cache, kept) for cache, before, kept in self._before if cache.cache_info() != before
        ]
        keeping = [(cache, kept) for cache, kept in used if kept or _keeps_tensors(cache)]
        for cache, _ in keeping:
            cache.cache_clear()
        return any(kept for _, kept in keeping)


def _caches() -> list[Cache]:
    """All there are, but for those that aged since the last full search without an import or a full collection."""
    old = _old(
        len(sys.modules), gc.get_stats()[1]["collections"] + gc.get_stats()[2]["collections"]
    )
    young = _among([*gc.get_objects(generation=0), *gc.get_objects(generation=1)])
    return list({id(cache): cache for cache in (*old, *young)}.values())


@functools.lru_cache(maxsize=1)
def _old(modules: int, collections: int) -> list[Cache]:
    return _among(gc.get_objects())


def _among(objects: Iterable[Any]) -> list[Cache]:
    caches = [each for each in objects if type(each) is functools._lru_cache_wrapper]
    return [
        each
        for each in caches
        if str(getattr(each, "__module__", "")).partition(".")[0] not in OTHERS
    ]


def _keeps_tensors(cache: Cache) -> bool:
    return cache.cache_info().currsize > 0 and any(map(contains_tensor, _kept(cache)))


def _kept(cache: Cache) -> Iterator[Any]:
    """What a cache refers to: arguments and results, directly or in its table."""
    for each in gc.get_referents(cache):
        if isinstance(each, dict) and each is not vars(cache):
            yield from each.values()
        else:
            yield each
