"""Which attributes of its modules a forward reads: their values are in a graph of it.

They are noted while the forward runs, so names that it computes are among them:

    getattr(self, f"scale_{i}")     scale_0, scale_1, ...
    hasattr(self, "scale")          scale, though there may be none
    vars(self), copy(self)          all that the module has
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from torch import nn

from pipecompile.frontend.source import HIDDEN

__all__ = ["ALL", "AttributeReads"]

ALL = "__dict__"
"""Stands for all attributes of a module."""
COPYING = "__getstate__"
"""What a copy is made by: it reads all attributes too."""
# Code in these files gets the dict of a module to look one name up, or the module's own tables.
OF_ONE_NAME = (*HIDDEN, functools.__file__)


@dataclass(frozen=True)
class AttributeReads:
    """The attributes that are read in the blocks of `noted`, each with the id of its module."""

    _read: set[tuple[int, str]] = field(default_factory=set)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is read of modules in the block."""

        def get_attribute(module: nn.Module, name: str) -> object:
            if name != ALL or _reads_all(sys._getframe(1)):
                self._read.add((id(module), ALL if name == COPYING else name))
            return super(nn.Module, module).__getattribute__(name)

        nn.Module.__getattribute__ = get_attribute  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__

    def of(self, model: nn.Module) -> frozenset[tuple[str, str]]:
        """Return what was read of the modules of `model`, by path and name. Of a class that looks
        its attributes up itself all count as read, since nothing is seen of that.
        """
        paths = {id(module): path for path, module in model.named_modules()}
        unseen = {
            (path, ALL)
            for path, module in model.named_modules()
            if any("__getattribute__" in vars(base) for base in type(module).__mro__[:-1])
        }
        return frozenset({(paths[key], name) for key, name in self._read if key in paths} | unseen)


def _reads_all(reader: FrameType) -> bool:
    """Return whether code that gets the dict of a module may read anything in it."""
    code = reader.f_code
    return code is nn.Module.__dir__.__code__ or not code.co_filename.startswith(OF_ONE_NAME)
