"""The names that code reads, found in its instructions without running it."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["ANY", "OF_TENSORS", "CodeNames", "names_in", "strings_in"]

OF_TENSORS = frozenset(dir(Tensor))
ANY = "*"
"""Stands for what has an attribute where code reads it of something without a name."""
ATTRIBUTE_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
BY_TEXT = frozenset({"getattr", "hasattr", "attrgetter", "vars", "globals", "__dict__"})
"""A function that names one of these may name attributes and globals by its strings."""


class CodeNames(NamedTuple):
    """What code reads by name, with the functions in it: all names, those of globals, and those of
    what may not be there.

    `imports` are the Python modules that it imports when it runs. `of_owners` are the attributes
    that a tensor may have, each with the name of the variable or attribute that it is read of:
    ("config", "dtype"). Where that is `self`, it is the class of the method.
    """

    names: frozenset[str]
    globals: frozenset[str]
    may_be_absent: frozenset[str]
    imports: frozenset[str]
    of_owners: frozenset[tuple[str, str]]


@cache
def names_in(code: CodeType) -> CodeNames:
    """Return the names that code reads."""
    found = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    loads = {name for operation, name in found if operation.startswith(("LOAD", "IMPORT_FROM"))}
    names = loads.intersection(code.co_names)
    imports = {name for operation, name in found if operation == "IMPORT_NAME"}
    of_globals = {name for operation, name in found if operation in GLOBAL_LOADS}
    texts = strings_in(code) if names & BY_TEXT else []
    of_owners = {*_of_owners(found, code), *((ANY, text) for text in texts)}
    if "globals" in names:
        of_globals.update(texts)
    may_be_absent = names.union(texts) if "AttributeError" in names else texts
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return CodeNames(
        frozenset(names.union(texts, *(each.names for each in inner))),
        frozenset(of_globals.union(*(each.globals for each in inner))),
        frozenset(may_be_absent).union(*(each.may_be_absent for each in inner)),
        frozenset(imports.union(*(each.imports for each in inner))),
        frozenset(of_owners.union(*(each.of_owners for each in inner))),
    )


def _of_owners(found: list[tuple[str, Any]], code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield the names that tensors have too, each behind that of what it is read of."""
    loads = [each for each in found if each[0] != "EXTENDED_ARG"]
    for (_, owner), (operation, name) in pairwise(loads):
        if operation in ATTRIBUTE_LOADS and name in OF_TENSORS:
            yield _owner(owner, code), name


def _owner(loaded: Any, code: CodeType) -> str:
    """Return the name of what an instruction loads, `self` being a class; "" if it has none."""
    # From Python 3.13 on an instruction may load two variables.
    name = loaded[-1] if isinstance(loaded, tuple) else loaded
    return code.co_qualname.rpartition(".")[0] if name == "self" else str(name or "")


def strings_in(code: CodeType) -> list[str]:
    """Return the strings in `code` that may name a variable of the environment."""
    return [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
