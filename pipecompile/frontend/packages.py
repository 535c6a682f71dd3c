"""Whose code a Python module has: the user's, that of an installed package, torch's or Python's."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["is_foreign", "is_installed", "package_of"]

FOREIGN = frozenset({"torch", "numpy"})
"""Packages whose code and objects are not followed, besides the standard library, and what is
installed but has no module of the model (a test runner, a progress bar).
"""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages."""


def is_foreign(module: str | None) -> bool:
    """Return whether a Python module is torch's, numpy's or Python's own."""
    package = package_of(module)
    return package in FOREIGN or package in sys.stdlib_module_names


def package_of(module: Any) -> str:
    """Return the package of what an object says is its module, which may be anything."""
    return module.partition(".")[0] if isinstance(module, str) and module else "builtins"


@cache
def is_installed(package: str) -> bool:
    """Return whether a package is among those that were installed, and is not the user's code."""
    module = sys.modules.get(package)
    # A package without an __init__.py has no file, only folders.
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(not INSTALLED.isdisjoint(Path(place).parts) for place in places if place)
