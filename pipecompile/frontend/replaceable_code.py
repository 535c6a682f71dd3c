"""Code that a forward runs and that may be replaced from outside: functions of torch, operators of
tensors, and what runs when a module is called.

    torch.nn.functional.gelu = my_gelu         the graph would still call the one before
    Block.__call__ = logged_call
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from pipecompile.frontend.code_names import OF_TENSORS
from pipecompile.frontend.compared_value import GONE, Read

__all__ = ["CodeRead", "PlaceText", "functions_among", "operators_of_tensors", "run_by_a_call"]

PlaceText = str | Callable[[], str]
CodeRead = tuple[PlaceText, Read, Any]
"""A place, what reads it now, and what was there."""
OPERATORS = sorted(
    OF_TENSORS & {f"__{r}{n.strip('_')}__" for n in dir(operator) for r in ("", "r")}
)
"""What `x * 2` and `2 * x` call of a tensor."""
CALLING = ("__call__", "forward")
"""What runs if code calls a module."""


def operators_of_tensors() -> CodeRead:
    """Return the read of what operators call of tensors, which no code names."""
    own = vars(Tensor)
    return _all_at_once("torch.Tensor", own.get, {name: own.get(name) for name in OPERATORS})


def functions_among(module: ModuleType, names: Iterable[str]) -> CodeRead:
    """Return the read of the functions of a Python module that have these names."""
    attributes = vars(module)
    found = {name: attributes[name] for name in names}
    functions = {
        name: value
        for name, value in found.items()
        if callable(value) and not isinstance(value, (type, ModuleType))
    }
    return _all_at_once(module.__name__, attributes.get, functions)


def run_by_a_call(kind: type) -> Iterator[CodeRead]:
    """Yield the reads of what runs when a module of this class is called."""
    for name in CALLING:
        value = getattr(kind, name, None)
        # Another descriptor may give another object each time.
        if isinstance(value, FunctionType):
            yield f"{kind.__qualname__}.{name}", partial(getattr, kind, name, GONE), value


def _all_at_once(where: str, get: Callable[[str], Any], values: Mapping[str, Any]) -> CodeRead:
    """Return one read of all `values` at a place by name: whether they are the same objects."""
    read = partial(_are_all, get, list(values), list(values.values()))
    return partial(_replaced, where, get, values), read, True


def _are_all(get: Callable[[str], Any], names: Iterable[str], values: Iterable[Any]) -> bool:
    """Return whether `get` returns these `values` for these `names`."""
    return all(map(is_, map(get, names), values))


def _replaced(where: str, get: Callable[[str], Any], values: Mapping[str, Any]) -> str:
    """Return the place of the first of these `values` that was replaced."""
    return f"{where}.{next(name for name, value in values.items() if get(name) is not value)}"
