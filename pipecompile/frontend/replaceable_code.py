"""Code that a forward runs and that may be replaced from outside: functions of torch, operators of
tensors, and what runs when a module is called.

    torch.nn.functional.gelu = my_gelu         the graph would still call the one before
    Block.__call__ = logged_call
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from pipecompile.frontend.code_names import OF_TENSORS
from pipecompile.frontend.places import Attribute, Item, Read

__all__ = ["CodeRead", "PlaceText", "functions_among", "operators_of_tensors", "run_by_a_call"]

PlaceText = str | Callable[[], str]
"""The name of a place; where there was nothing, what returns it once there is."""
CodeRead = tuple[PlaceText, Read, Any]
"""A place, what reads it now, and what was there."""
OPERATORS = sorted(
    OF_TENSORS & {f"__{r}{n.strip('_')}__" for n in dir(operator) for r in ("", "r")}
)
"""What `x * 2` and `2 * x` call of a tensor."""
CALLING = ("__call__", "forward")
"""What runs if code calls a module."""


def operators_of_tensors() -> Iterator[CodeRead]:
    """Yield the reads of what operators call of tensors, which no code names."""
    own = vars(Tensor)
    for name in OPERATORS:
        read = Item(own, name)
        yield f"torch.Tensor.{name}", read, read()


def functions_among(module: ModuleType, names: Iterable[str]) -> Iterator[CodeRead]:
    """Yield the reads of the functions of a Python module that have these names."""
    for name in names:
        value = vars(module)[name]
        if callable(value) and not isinstance(value, (type, ModuleType)):
            yield f"{module.__name__}.{name}", Item(vars(module), name), value


def run_by_a_call(kind: type) -> Iterator[CodeRead]:
    """Yield the reads of what runs when a module of this class is called."""
    for name in CALLING:
        value = getattr(kind, name, None)
        # Another descriptor may give another object each time.
        if isinstance(value, FunctionType):
            yield f"{kind.__qualname__}.{name}", Attribute(kind, name), value
