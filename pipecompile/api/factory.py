"""What the command line calls a TARGET: a factory in a module or a file. Needs no PyTorch before it
is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from pipecompile.errors import InputError, unknown

__all__ = ["Factory"]


@dataclass(frozen=True)
class Factory:
    """The function `name` in `place`, a module or a file; `text` is what the user wrote."""

    text: str
    place: str
    name: str

    @classmethod
    def of(cls, text: str) -> Factory:
        """Read `package.module:factory` or `path/file.py:factory`; InputError if there is no such
        module or file.

        Nothing is imported for it, so that a misspelt name is answered at once.
        """
        # From the right: a path may have a colon of its own.
        place, _, name = text.rpartition(":")
        if not place or not name.isidentifier():
            raise InputError(
                f"{text!r} is not a target; write package.module:factory or path/file.py:factory"
            )
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise InputError(f"{text}: there is no file {place}")
        else:
            _check_package(place, text)
        return cls(text, place, name)

    def call(self) -> Any:
        """Import the module and call the factory; InputError says what went wrong in it."""
        module = self._module()
        function = getattr(module, self.name, None)
        if not callable(function):
            names = _functions_of(module)
            if not names:
                raise InputError(f"{self.text}: {self.place} defines no function")
            raise InputError(f"{self.text}: {unknown('factory', self.name, names)}")
        try:
            return function()
        except Exception as error:
            raise InputError(
                f"{self.text}: the factory failed: {type(error).__name__}: {error}"
            ) from error

    def _module(self) -> ModuleType:
        try:
            return (
                _of_file(Path(self.place)) if self.place.endswith(".py") else _of_name(self.place)
            )
        except Exception as error:
            raise InputError(
                f"{self.text}: {self.place} cannot be imported: {type(error).__name__}: {error}"
            ) from error


def _check_package(place: str, text: str) -> None:
    """Raise InputError if the outermost package of a dotted name is not there: that alone needs no
    import.
    """
    package = place.partition(".")[0]
    sys.path.insert(0, str(Path.cwd()))
    try:
        # Only the package: to look for the module within it would import the package, and a
        # model's package imports PyTorch.
        is_there = package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # an empty name, as in ".module"
        is_there = False
    finally:
        sys.path.pop(0)
    if not is_there:
        raise InputError(
            f"{text}: {place} cannot be imported: there is no module {package!r} here; "
            "run the command where it lies, or write path/file.py:factory"
        )


def _functions_of(module: ModuleType) -> list[str]:
    """Return the public functions that the module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _of_name(place: str) -> ModuleType:
    """Return the module of that name, also if it lies in the working directory."""
    # As `python -m` does. A console script has its own folder at the front instead.
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    finally:
        sys.path.pop(0)


def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # torch and pickling look functions up by the name of their module.
    # A file may have the name of a library, such as json.py, which stays where it is.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
