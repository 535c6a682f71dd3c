"""Which attributes of objects, classes and Python modules code may read, by the names in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from pipecompile.frontend.code_names import ANY
from pipecompile.frontend.found_attributes import data_names, may_be_hidden, own_names
from pipecompile.frontend.found_names import FoundNames
from pipecompile.frontend.implicit_reads import operators
from pipecompile.frontend.known_reads import KnownReads
from pipecompile.frontend.packages import NAMESPACES, is_installed, is_of_others, package_of

__all__ = ["ReadableNames"]


class ReadableNames:
    """The `names` that a search has found so far, as those of attributes of what it finds.

    `noted` are the ids of objects of which all that was read is known. For `packages` see
    `is_of_others`.
    """

    def __init__(self, names: FoundNames, known: KnownReads, packages: Collection[str]) -> None:
        self.names = names
        self.noted: set[int] = set()
        self._known = known
        self._packages = packages
        self._foreign: dict[str, bool] = {}

    def inherited(self, bases: Iterable[type]) -> Iterator[str]:
        """Yield the attributes of these `bases` that code names: an object or a class below them
        that gets one of that name has it in their place.
        """
        for base in bases:
            if not self.is_foreign(base.__module__):
                named = {*self.names.among(vars(base)), *operators(base, self.names.names)}
                yield from filter(partial(may_be_hidden, base), named)

    def computed(self, owner: Any, attributes: Mapping[str, Any]) -> list[str]:
        """Return those attributes of `owner`, an object, a class or a Python module, that code of
        the user may read by a name that it computes.
        """
        if not self.is_read_by_text(owner):
            return []
        # A Python module may hold all of a program, and a module of the model its training.
        is_model = isinstance(owner, type) and issubclass(owner, nn.Module)
        if isinstance(owner, ModuleType) or is_model:
            return data_names(attributes)
        return own_names(attributes)

    def is_read_by_text(self, owner: Any) -> bool:
        """Return whether code of the user may read what the user's `owner` has by names that it
        computes; what is read of modules of the model, and of some objects, is known.
        """
        if not self.names.computing or id(owner) in self.noted:
            return False
        kind = owner if isinstance(owner, type) else type(owner)
        module = owner.__name__ if isinstance(owner, ModuleType) else kind.__module__
        return module in NAMESPACES or not is_of_others(module)

    def named_of(self, where: str, value: Any, attributes: Iterable[str]) -> list[str]:
        """Return those of the attributes of an object that some code names. Of an installed class,
        and where it is known what was read, names that tensors have too count only if the code
        reads them of something with the object's name.
        """
        # An object of the user's may be passed on, and then has any name.
        if id(value) not in self.noted and not is_installed(package_of(type(value).__module__)):
            read = partial(self._known.has_read, where)
            return [name for name in attributes if name in self.names.names or read(name)]
        # "config" of "layers.0.config" and of "config in forward", and the classes for `self`.
        called = {ANY, where.partition(" ")[0].rpartition(".")[2]}
        called.update(base.__qualname__ for base in type(value).__mro__)
        return [
            name
            for name in attributes
            if self._known.has_read(where, name) or self.names.have(name, called)
        ]

    def is_foreign(self, module: str | None) -> bool:
        """Return whether a Python module is not the user's, nor of a package of the model's."""
        # There are few packages, and many functions and classes in them.
        package = package_of(module)
        if package not in self._foreign:
            self._foreign[package] = is_of_others(package, self._packages)
        return self._foreign[package]
