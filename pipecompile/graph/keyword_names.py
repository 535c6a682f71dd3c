"""Modules and parameters whose names are keywords of Python, in the code that fx prints.

    nn.ModuleDict({"class": …})       self.class.weight     no Python
                                      getattr(self, "class").weight

fx does so for names that are no identifiers, such as "0", but takes keywords for identifiers.
"""

from __future__ import annotations

from functools import reduce
from keyword import iskeyword

from torch.fx import graph as fx_graph

__all__ = ["print_keywords_legally"]


def print_keywords_legally() -> None:
    """Let fx print names of attributes that are keywords as strings, from now on."""
    fx_graph._format_target = _format_target


def _format_target(base: str, target: str) -> str:
    """Return the code for the attribute `target`, a path with dots, of `base`.

    >>> _format_target("self", "layers.0.class.weight")
    'getattr(getattr(self.layers, "0"), "class").weight'
    """
    return reduce(_attribute, target.split("."), base)


def _attribute(base: str, name: str) -> str:
    if name.isidentifier() and not iskeyword(name):
        return f"{base}.{name}"
    return f'getattr({base}, "{name}")'
