"""Reads of objects of installed packages that modules hold, such as configs, by code of the user:
`self.config.scale`, `self.config["scale"]`.

Only its package knows how such an object finds a value, so each step repeats these reads.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn

from pipecompile.frontend.compared_value import COMPARED, ComparedValue, comparable
from pipecompile.frontend.packages import INSTALLED, is_foreign, is_installed, package_of
from pipecompile.frontend.places import GONE
from pipecompile.frontend.source import is_user_file

__all__ = ["LibraryReads"]

Reader = Callable[[Any, Any], Any]
READERS: tuple[tuple[str, Reader], ...] = (
    ("__getattribute__", getattr),
    ("__getitem__", operator.getitem),
)


@dataclass(frozen=True)
class LibraryReads:
    """What is read in the blocks of `noted`: the object, which is kept alive, by its id, what
    reads it, and the name or key.
    """

    _owners: dict[tuple[int, Reader, Any], Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def noted(self, held: Iterable[Any]) -> Iterator[None]:
        """Note what code of the user reads in the block of objects of the classes of `held`."""
        kinds = {type(value) for value in held if _is_of_library(type(value))}
        with contextlib.ExitStack() as patches:
            for kind in kinds:
                for method, reader in READERS:
                    if hasattr(kind, method):
                        self._note(kind, method, reader, patches)
            yield

    def joined(self, other: LibraryReads) -> LibraryReads:
        """Return the reads of both."""
        return LibraryReads(self._owners | other._owners)

    def values(self) -> list[ComparedValue]:
        """Return the values and objects that these reads give now, and what gives them later."""
        found = []
        for (_, reader, key), owner in self._owners.items():
            read = partial(_read, reader, owner, key)
            value = read()
            where = f"{key!r} in a {type(owner).__name__}"
            compared = ComparedValue(where, read, value, comparable(value))
            is_data = isinstance(value, COMPARED) or value is GONE or _is_of_library(type(value))
            # A value that differs at each read, such as a time, tells nothing.
            if is_data and compared.is_the_same:
                found.append(compared)
        return found

    def _note(self, kind: type, method: str, reader: Reader, patches: contextlib.ExitStack) -> None:
        original, before = getattr(kind, method), vars(kind).get(method)

        def noting(owner: Any, key: Any) -> Any:
            if isinstance(key, (str, int)) and _is_own_code(sys._getframe(1)):
                self._owners[id(owner), reader, key] = owner
            return original(owner, key)

        with contextlib.suppress(TypeError, AttributeError):  # classes that nobody may change
            setattr(kind, method, noting)
            undo = (delattr, kind, method) if before is None else (setattr, kind, method, before)
            patches.callback(*undo)


def _is_of_library(kind: type) -> bool:
    package = package_of(kind.__module__)
    is_library = is_installed(package) and not is_foreign(package)
    return is_library and not issubclass(kind, (nn.Module, Tensor, type))


def _is_own_code(frame: FrameType) -> bool:
    return _is_own_file(frame.f_code.co_filename)


@cache
def _is_own_file(file: str) -> bool:
    return is_user_file(file) and INSTALLED.isdisjoint(Path(file).parts)


def _read(reader: Reader, owner: Any, key: Any) -> Any:
    """Return what is read, `GONE` if there is nothing: each package has errors of its own."""
    with contextlib.suppress(Exception):
        return reader(owner, key)
    return GONE
