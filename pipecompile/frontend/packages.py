"""Whose code a Python module has: the user's, that of an installed package, torch's or Python's."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

__all__ = [
    "INSTALLED",
    "NAMESPACES",
    "has_own_attributes",
    "is_foreign",
    "is_installed",
    "is_of_all_models",
    "is_of_others",
    "names_foreign_module",
    "package_of",
]

FOREIGN = frozenset({"torch", "numpy"})
"""Packages whose code and objects are not followed, besides the standard library, and what is
installed but has no module of the model (a test runner, a progress bar).
"""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages."""
NAMESPACES = frozenset({"types", "argparse", "_thread"})
"""Parts of the standard library whose objects hold what a user gives them."""
OF_SETTINGS = ("torch.optim.", "torch.distributions.")
"""Parts of torch whose objects hold what a user sets: a learning rate, a mean."""


def is_foreign(module: str | None) -> bool:
    """Return whether a Python module is torch's, numpy's or Python's own."""
    package = package_of(module)
    return package in FOREIGN or package in sys.stdlib_module_names


def names_foreign_module(names: Mapping[str, Any], path: str) -> bool:
    """Return whether a dotted path, which begins with one of these names, is a Python module of
    torch, numpy or Python, such as `torch.nn.functional`.
    """
    first, *others = path.split(".")
    value = names.get(first)
    for name in others:
        # Only modules are asked: what an object says may depend on when it is asked.
        value = getattr(value, name, None) if isinstance(value, ModuleType) else None
    return isinstance(value, ModuleType) and is_foreign(value.__name__)


def package_of(module: Any) -> str:
    """Return the package of the `__module__` of an object, which may be any value."""
    return module.partition(".")[0] if isinstance(module, str) and module else "builtins"


@cache
def is_installed(package: str) -> bool:
    """Return whether a package is among those that were installed, and is not the user's code."""
    module = sys.modules.get(package)
    # A package without an __init__.py has no file, only folders.
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(not INSTALLED.isdisjoint(Path(place).parts) for place in places if place)


def is_of_others(module: str | None, packages: Collection[str] = ()) -> bool:
    """Return whether a Python module is not the user's: foreign, or installed and in none of the
    `packages` that have modules of the model.
    """
    package = package_of(module)
    return is_foreign(module) or (is_installed(package) and package not in packages)


def is_of_all_models(item: Any) -> bool:
    """Return whether a function or class in a table is likely there for other models too."""
    if isinstance(item, type) and issubclass(item, nn.Module):
        return True  # no forward makes modules
    if isinstance(item, FunctionType) and is_foreign(item.__module__):
        return False  # it leads to nothing, but may ask for a global flag
    return isinstance(item, (FunctionType, type)) and is_installed(package_of(item.__module__))


def has_own_attributes(value: Any, packages: Collection[str]) -> bool:
    """Return whether `value` is an object or a Python module whose attributes the user sets; for
    `packages` see `is_of_others`.
    """
    if isinstance(value, ModuleType):
        return not is_of_others(getattr(value, "__name__", None), packages)
    module = type(value).__module__
    if isinstance(value, nn.Module):
        return True
    is_of_settings = module in NAMESPACES or module.startswith(OF_SETTINGS)
    return is_of_settings or not is_of_others(module, packages)
