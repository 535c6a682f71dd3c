"""Whether somebody has written to dictionaries, told by the versions that Python keeps of them.

A version is the number of a write, and each write has a higher one than all before it (PEP 509).
One number so tells whether a thousand dictionaries have what they had, whoever may write to them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch._C._dynamo.guards import dict_version

__all__ = ["HAS_VERSIONS", "AskedAfterWrites", "table_of"]


def _has_versions() -> bool:
    module: Any = nn.Module()
    module.number = 0
    before = dict_version(vars(module))
    module.number = 1
    return bool(dict_version(vars(module)) != before)


# Python 3.13.0 does not notice that an attribute of an object is set (python/cpython#125608).
HAS_VERSIONS = _has_versions()


class AskedAfterWrites:
    """A question about the items of dictionaries, which is asked again only after a write to one.

    That their order is another is no write where an OrderedDict moves an item. Without versions
    the question is asked each time.
    """

    def __init__(self, is_so: Callable[[], bool], tables: Iterable[dict[str, Any]]) -> None:
        self._is_so = is_so
        self._tables = list(tables)
        self._remember()

    def holds(self) -> bool:
        """Return whether it is still so, as it was when this was made."""
        if not HAS_VERSIONS:
            return self._is_so()
        if any(self._empty) or self._latest_write() != self._written:
            if not self._is_so():
                return False
            self._remember()
        return True

    def _remember(self) -> None:
        self._written = self._latest_write()
        # An empty one may become a copy of another (`update`), which is no write for torch.
        self._empty = [each for each in self._tables if not each]

    def _latest_write(self) -> int:
        return max(map(dict_version, self._tables), default=0)


def table_of(items: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the plain dictionary that these items are in, maybe behind a proxy, as those of a
    class are; None for another mapping, which may make its items when it is asked for them.
    """
    if type(items) is MappingProxyType:
        (items,) = gc.get_referents(items)
    return items if type(items) is dict else None
