"""Caches of functions (functools.lru_cache) that a forward calls: they must not keep fake tensors.

The capture makes a `CacheUse` before it runs a forward on fake tensors, and clears it afterwards.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipecompile.frontend.nested_values import contains_tensor

__all__ = ["CacheUse"]

if TYPE_CHECKING:
    Cache = functools._lru_cache_wrapper[Any]

# The caches of these packages hold no tensors, and they are too many to look into.
IGNORED_PACKAGES = frozenset(
    {"torch", "sympy", "mpmath", "functools", "typing", "re", "numpy", "networkx", "pipecompile"}
)


class CacheUse:
    """The caches that are used from now on.

    A model that takes a tensor out of a filled cache would be recorded with this tensor as a
    constant; with an empty cache the computation of the tensor is recorded. The recording therefore
    is repeated if `clear` finds that a used cache held tensors before.
    """

    def __init__(self) -> None:
        # `cache_info` counts hits and misses: if it changed, the cache was used.
        self._before = [
            (cache, cache.cache_info(), _holds_tensors(cache)) for cache in _all_caches()
        ]

    def clear(self) -> bool:
        """Clear the used caches that hold tensors; return whether one held some before its use."""
        held_before = False
        for cache, info, held_tensors in self._before:
            is_used = cache.cache_info() != info
            if is_used and (held_tensors or _holds_tensors(cache)):
                cache.cache_clear()
                # A cache that was empty before holds fakes only, and what was recorded is their
                # computation.
                held_before = held_before or held_tensors
        return held_before


def _all_caches() -> list[Cache]:
    """Return all caches in this process whose package may keep tensors in them."""
    # Each cache refers to its type: one search in C over all objects that the collector tracks.
    referrers = gc.get_referrers(functools._lru_cache_wrapper)
    caches = [value for value in referrers if type(value) is functools._lru_cache_wrapper]
    return [cache for cache in caches if _package_of(cache) not in IGNORED_PACKAGES]


def _package_of(cache: Any) -> str:
    return str(getattr(cache, "__module__", "")).partition(".")[0]


def _holds_tensors(cache: Cache) -> bool:
    return cache.cache_info().currsize > 0 and any(map(contains_tensor, _referents(cache)))


def _referents(cache: Cache) -> Iterator[Any]:
    """Yield what a cache refers to: arguments and results, directly or in its table."""
    for value in gc.get_referents(cache):
        if isinstance(value, dict) and value is not vars(cache):
            yield from value.values()
        else:
            yield value
