"""Caches of functions (functools.lru_cache) that a forward calls: they must not keep fake tensors.

The capture makes a `CacheUse` before it runs a forward on fake tensors, and clears it afterwards.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from pipecompile.frontend.nested_values import contains_tensor

__all__ = ["CacheUse"]

if TYPE_CHECKING:
    Cache = functools._lru_cache_wrapper[Any]

Entry = tuple[Any, Any]
RESULT = "the result"
"""What stands for the result in the code of a function that only returns one."""
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
        self._emptied: list[tuple[Cache, list[Entry]]] = []
        # `cache_info` counts hits and misses: if it changed, the cache was used.
        self._before = [
            (cache, cache.cache_info(), _holds_tensors(cache)) for cache in _all_caches()
        ]

    @property
    def codes(self) -> frozenset[CodeType]:
        """The code of the functions that have these caches."""
        functions = (cache.__wrapped__ for cache, *_ in self._before)
        return frozenset(f.__code__ for f in functions if isinstance(f, FunctionType))

    def clear(self) -> bool:
        """Clear the used caches that hold tensors; return whether one held some before its use."""
        held_before = False
        for cache, info, held_tensors in self._before:
            is_used = cache.cache_info() != info
            if is_used and (held_tensors or _holds_tensors(cache)):
                if held_tensors:
                    self._emptied.append((cache, _entries(cache)))
                cache.cache_clear()
                # A cache that was empty before holds fakes only, and what was recorded is their
                # computation.
                held_before = held_before or held_tensors
        return held_before

    def refill(self) -> None:
        """Give caches back what they held before their use: the next forward finds it there."""
        for cache, entries in self._emptied:
            for key, result in entries:
                _put(cache, key, result)


def _entries(cache: Cache) -> list[Entry]:
    """Return the keys and results of a cache, the oldest first; none if they cannot be told."""
    table, referents = _table(cache), gc.get_referents(cache)
    if cache.cache_parameters()["maxsize"] is None:
        return list(table.items())
    # A cache with a limit has a list of keys, results and the type of the list's items.
    keys = set(map(id, table))
    first = next((i for i, each in enumerate(referents) if id(each) in keys), 0)
    items = referents[first : first + 3 * len(keys)]
    entries = list(zip(items[::3], items[1::3], strict=False))
    return entries if {id(key) for key, _ in entries} == keys else []


def _put(cache: Cache, key: Any, result: Any) -> None:
    """Make a cache hold a result."""
    function = cache.__wrapped__
    if cache.cache_parameters()["maxsize"] is None:
        _table(cache)[key] = result
    elif isinstance(function, FunctionType):
        # Only a call puts something there: for once the function returns what is known.
        args, kwargs = _arguments(cache, key)
        code = function.__code__
        constants = [result if each == RESULT else each for each in _returning.__code__.co_consts]
        try:
            function.__code__ = _returning.__code__.replace(
                co_consts=tuple(constants), co_freevars=code.co_freevars
            )
            cache(*args, **kwargs)
        finally:
            function.__code__ = code


def _arguments(cache: Cache, key: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the call that has this key."""
    if not isinstance(key, tuple):
        return (key,), {}
    # Between arguments and keywords there is an object that the cache has; types are at the end.
    marks = {id(each) for each in gc.get_referents(cache) if type(each) is object}
    typed, size = cache.cache_parameters()["typed"], len(key)
    count = next((i for i, each in enumerate(key) if id(each) in marks), None)
    if count is None:
        return key[: size // 2 if typed else size], {}
    keywords = (size - 2 * count - 1) // 3 if typed else (size - count - 1) // 2
    items = key[count + 1 : count + 1 + 2 * keywords]
    return key[:count], dict(zip(items[::2], items[1::2], strict=True))


def _returning(*_: Any, **__: Any) -> Any:
    return "the result"


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


def _table(cache: Cache) -> dict[Any, Any]:
    """Return the table of a cache, which has its keys."""
    # A result may be a dict too, and comes before it.
    tables = [each for each in gc.get_referents(cache) if isinstance(each, dict)]
    return next(each for each in reversed(tables) if each is not vars(cache))


def _referents(cache: Cache) -> Iterator[Any]:
    """Yield what a cache refers to: arguments and results, directly or in its table."""
    for value in gc.get_referents(cache):
        if isinstance(value, dict) and value is not vars(cache):
            yield from value.values()
        else:
            yield value
