"""The attributes of modules, and of objects that they hold, that a forward reads: a graph of it has
their values in it.

Reads are noted while the forward runs, so names that it computes are among them:

    getattr(self, f"scale_{i}")     scale_0, scale_1, ...
    hasattr(self, "scale")          scale, though there may be none
    vars(self), copy(self)          all that the module has
    asdict(self.config)             all fields of the config
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType
from typing import Any

from torch import nn

from pipecompile.frontend.callable_state import reached_by
from pipecompile.frontend.library_reads import LibraryReads
from pipecompile.frontend.packages import is_foreign, is_installed, package_of
from pipecompile.frontend.source import HIDDEN

__all__ = ["ALL", "GETTER", "AttributeReads", "getter_patched", "is_own"]

GETTER = "__getattribute__"
Getter = Callable[[Any, str], Any]
ALL = "__dict__"
"""Stands for all attributes of a module."""
COPYING = "__getstate__"
"""What a copy is made by: it reads all attributes too."""
# Code in these files gets the dict of a module to look one name up, or the module's own tables.
OF_ONE_NAME = (*HIDDEN, functools.__file__)


@dataclass(frozen=True)
class AttributeReads:
    """What is read in the blocks of `noted`, by the id of the module or object and the name.

    `_read_first` has those reads before which the block had not set the attribute, and
    `of_libraries` the reads of objects of installed packages.
    """

    _read: set[tuple[int, str]] = field(default_factory=set)
    _read_first: set[tuple[int, str]] = field(default_factory=set)
    of_libraries: LibraryReads = field(default_factory=LibraryReads)

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Note what is read in the block of modules, and of objects of the user's own classes that
        those of `model` hold.
        """
        done = set[tuple[int, str]]()
        held = [value for _, value in _held(model)]
        own = {type(value) for value in held if is_own(type(value))}
        # Also what globals and closures of the forward lead to; before reads of it are noted.
        reached = [*held, *reached_by(model)]
        with contextlib.ExitStack() as patches:
            self._note(nn.Module, _attribute_of_module, done, patches)
            for kind in own:
                self._note(kind, getattr(kind, GETTER), done, patches)
            patches.enter_context(self.of_libraries.noted(reached))
            patches.enter_context(_assignments_noted(done))
            yield

    def of(self, model: nn.Module) -> frozenset[tuple[str, str]]:
        """Return what was read of the modules of `model` and of what they hold, by path and name;
        of a module whose class looks its attributes up itself that may be all of them.
        """
        names = defaultdict[int, set[str]](set)
        for key, name in self._read:
            names[key].add(name)
        # By id, since a read knows its object and not its path: one object that two modules hold
        # is read at both.
        places = chain(model.named_modules(), _held(model))
        seen = {(path, name) for path, owner in places for name in names.get(id(owner), ())}
        unseen = {
            (path, ALL)
            for path, module in model.named_modules()
            # Python asks the first class that has one: where that is not nn.Module, what was put
            # there is not called, or not for all names.
            if any(GETTER in vars(base) for base in type(module).__mro__[:-1])
        }
        return frozenset(seen | unseen)

    def has_read_first(self, module: nn.Module, name: str) -> bool:
        """Return whether an attribute of a module was read in a block that had not set it."""
        return not self._read_first.isdisjoint({(id(module), name), (id(module), ALL)})

    def _note(
        self,
        kind: type,
        getter: Getter,
        done: Collection[tuple[int, str]],
        patches: contextlib.ExitStack,
    ) -> None:
        """Note what is read of objects of a class until `patches` are undone; `done` are the
        assignments until now.
        """

        def get_attribute(owner: Any, name: str) -> Any:
            if name != ALL or _reads_all(sys._getframe(1)):
                read = id(owner), ALL if name == COPYING else name
                self._read.add(read)
                if read not in done:
                    self._read_first.add(read)
            return getter(owner, name)

        with contextlib.suppress(TypeError, AttributeError):  # classes that nobody may change
            patches.enter_context(getter_patched(kind, get_attribute))


@contextlib.contextmanager
def getter_patched(kind: type, getter: Getter) -> Iterator[None]:
    """Let `getter` look up the attributes of objects of a class in the block."""
    before = vars(kind).get(GETTER)
    setattr(kind, GETTER, getter)
    try:
        yield
    finally:
        # A class that had none of its own must have none again, or later changes of its base would
        # not be seen.
        if before is None:
            delattr(kind, GETTER)
        else:
            setattr(kind, GETTER, before)


@contextlib.contextmanager
def _assignments_noted(done: set[tuple[int, str]]) -> Iterator[None]:
    """Add to `done` what is set on modules in the block."""
    assign = nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        assign(module, name, value)
        done.add((id(module), name))

    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]


def _attribute_of_module(module: nn.Module, name: str) -> Any:
    return super(nn.Module, module).__getattribute__(name)


def _held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of all modules with their paths."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            yield f"{path}.{name}".lstrip("."), value


def is_own(kind: type) -> bool:
    """Return whether a class, which is none of modules, is the user's: what is read of its objects
    is noted.
    """
    package = package_of(kind.__module__)
    is_others = is_foreign(package) or is_installed(package)
    return not (is_others or issubclass(kind, nn.Module))


def _reads_all(reader: FrameType) -> bool:
    """Return whether code that gets the dict of a module may read anything in it."""
    code = reader.f_code
    return code is nn.Module.__dir__.__code__ or not code.co_filename.startswith(OF_ONE_NAME)
