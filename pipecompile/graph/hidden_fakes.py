"""Hidden fakes: code that sees that its tensors are fake may take another path."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["hide_fake_tensors"]


class _OnlyForTorch(type):
    """The type of a class that stands for `FakeTensor`: only torch itself finds instances of it."""

    def __instancecheck__(cls, value: Any) -> bool:
        # Frame 1 is the code that asks `isinstance`. torch asks by this name too, and must find
        # its fakes.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.partition(".")[0] == "torch" and isinstance(value, FakeTensor)


class _HiddenFakeTensor(metaclass=_OnlyForTorch):
    pass


@contextlib.contextmanager
def hide_fake_tensors(on: bool) -> Iterator[None]:
    """Let models, if `on`, not learn that tensors are fake, for which they may take another path.

    Libraries look the class up where torch documents it, as `torch._subclasses.FakeTensor`.
    """
    names = vars(torch._subclasses)
    before = names["FakeTensor"]
    names["FakeTensor"] = _HiddenFakeTensor if on else FakeTensor
    try:
        yield
    finally:
        names["FakeTensor"] = before
