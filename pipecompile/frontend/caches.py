"""Caches of functions (functools.lru_cache) that a forward calls: they must not keep fake tensors.

The capture makes a `CacheUse` before it runs a forward on fake tensors, and clears it afterwards.
Other runs on fake tensors, of modules and losses that are called as they are, keep
`fakes_out_of_caches`.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.frontend.nested_values import contains_tensor, tensors_in

__all__ = ["CACHES", "CacheUse", "entries_of", "fakes_out_of_caches"]

if TYPE_CHECKING:
    Cache = functools._lru_cache_wrapper[Any]

Entry = tuple[Any, Any]
CACHES = functools._lru_cache_wrapper
"""The class of functions that have a cache."""
RESULT = "the result"
"""What stands for the result in the code of a function that only returns one."""
# The caches that these packages define hold no tensors, and they are too many to look into.
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
            (cache, cache.cache_info(), entries_of(cache)) for cache in _known_caches.of_user()
        ]

    @property
    def codes(self) -> frozenset[CodeType]:
        """The code of the functions that have these caches."""
        functions = (cache.__wrapped__ for cache, *_ in self._before)
        return frozenset(f.__code__ for f in functions if isinstance(f, FunctionType))

    def clear(self) -> bool:
        """Clear the used caches that hold tensors; return whether one held some before its use."""
        held_before = False
        for cache, info, entries in self._before:
            # Only then it is looked for tensors: libraries have large caches of other things.
            if cache.cache_info() == info or not _holds_tensors(cache):
                continue
            cache.cache_clear()
            # A cache that had none before holds fakes only, and what was recorded is their
            # computation.
            if any(map(_has_values, entries)) or len(entries) != info.currsize:
                self._emptied.append((cache, entries))
                held_before = True
        return held_before

    def refill(self) -> None:
        """Give caches back what they held before their use: the next forward finds it there."""
        for cache, entries in self._emptied:
            for key, result in entries:
                _put(cache, key, result)


@contextmanager
def fakes_out_of_caches() -> Iterator[None]:
    """Take what has fake tensors out of caches after the block."""
    before = [(cache, cache.cache_info()) for cache in _known_caches.of_user()]
    try:
        yield
    finally:
        for cache, info in before:
            if cache.cache_info() != info and _holds_tensors(cache):
                _take_out_fakes(cache)


def _take_out_fakes(cache: Cache) -> None:
    entries = entries_of(cache)
    others = [entry for entry in entries if not any(map(_is_fake, tensors_in(entry)))]
    if len(others) < len(entries):
        cache.cache_clear()
        for key, result in others:
            _put(cache, key, result)


def _is_fake(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor)


def _has_values(entry: Entry) -> bool:
    return not all(map(_is_fake, tensors_in(entry)))


def entries_of(cache: Cache) -> list[Entry]:
    """Return the keys and results of a cache, the oldest first; none if they cannot be told."""
    if not cache.cache_info().currsize:
        return []
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


class _KnownCaches:
    """The caches that were found in this process: a search goes through all of its objects."""

    def __init__(self) -> None:
        self._found: list[ref[Cache]] = []
        self._ignored: set[int] = set()
        self._references = 0

    def of_user(self) -> list[Cache]:
        """Return the caches in this process that may hold tensors."""
        caches = [cache for known in self._found if (cache := known()) is not None]
        # Each cache refers to its type: if as many do as did, and all are there, there is no other.
        if len(caches) != len(self._found) or _references() != self._references:
            caches = [each for each in gc.get_referrers(CACHES) if type(each) is CACHES]
            self._found = list(map(ref, caches))
            self._ignored = set(map(id, filter(_is_ignored, caches)))
            self._references = _references()
        return [each for each in caches if id(each) not in self._ignored]


_known_caches = _KnownCaches()


def _references() -> int:
    """Return how many references there are to the type of caches."""
    return sys.getrefcount(CACHES)


def _is_ignored(cache: Any) -> bool:
    """Return whether an ignored package has defined a cache: `lru_cache(torch.eye)`, which says
    that it is torch's, is the user's.
    """
    module, function = str(getattr(cache, "__module__", "")), cache.__wrapped__
    if module.partition(".")[0] not in IGNORED_PACKAGES or not isinstance(function, FunctionType):
        return False
    # Where the package has the bare function under that name, somebody else gave it a cache.
    return getattr(sys.modules.get(module), function.__qualname__, None) is not function


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
