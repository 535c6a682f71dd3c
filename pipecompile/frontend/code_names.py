"""The names that code reads, found in its instructions without running it."""

from __future__ import annotations

import dis
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache, reduce
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "ANY",
    "FORMATTING",
    "MATCHED",
    "OF_TENSORS",
    "CodeNames",
    "names_in",
    "stored_globals",
    "strings_in",
]

OF_TENSORS = frozenset(dir(Tensor))
ANY = "*"
"""Stands for what has an attribute where code reads it of something without a name."""
FORMATTING = "__format__"
"""What f-strings call, besides those for the message of an error."""
MATCHED = "__match_args__"
"""Where a class has the names of what `case Stats(value)` reads of its objects."""
MOST_TEXTS = 256
"""Of a larger collection nothing is taken for names."""
ATTRIBUTE_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
GLOBAL_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
BY_TEXT = frozenset(
    {
        *("getattr", "hasattr", "attrgetter", "methodcaller", "vars", "globals", "__dict__"),
        *("__getattribute__", "getattr_static", "getmembers", "asdict", "astuple", "eval", "exec"),
    }
)
"""A function that names one of these may name attributes and globals by its strings."""
BY_NAME = frozenset({"getattr", "hasattr"})
"""Of these, what is given a name as its second argument."""
FORMATS = frozenset({"format", "format_map"})
IN_FORMAT = re.compile(r"(?<=\.)[^\W\d]\w*(?=[^{}]*})")
"""Finds the attributes in strings that these format."""
WITHOUT_EFFECT = frozenset({"CACHE", "EXTENDED_ARG", "KW_NAMES", "PRECALL"})


class CodeNames(NamedTuple):
    """What code reads by name, with the functions in it: all names, those of globals, and those of
    what may not be there.

    `imports` are the Python modules that it imports when it runs. `qualified` are the names that
    tensors have too, each with the variable or attribute that it is read of: ("config", "dtype").
    Where that is `self`, the class of the method stands there as well. `computing` are the names by
    which it may read attributes whose names are no constants, each with the global that it reads
    them of: ("getattr", "nn.functional"), or ("getattr", "*") for anything. Its strings are names
    of attributes then.
    """

    names: frozenset[str]
    globals: frozenset[str]
    may_be_absent: frozenset[str]
    imports: frozenset[str]
    qualified: frozenset[tuple[str, str]]
    computing: frozenset[tuple[str, str]]

    def joined(self, other: CodeNames) -> CodeNames:
        """Return the names of both."""
        return CodeNames(
            self.names | other.names,
            self.globals | other.globals,
            self.may_be_absent | other.may_be_absent,
            self.imports | other.imports,
            self.qualified | other.qualified,
            self.computing | other.computing,
        )


@cache
def names_in(code: CodeType) -> CodeNames:
    """Return the names that code reads, and those that functions in it read."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return reduce(CodeNames.joined, inner, _own_names(code))


@cache
def stored_globals(code: CodeType) -> frozenset[str]:
    """Return the globals that code sets or deletes, and those that functions in it do."""
    inner = (stored_globals(each) for each in code.co_consts if isinstance(each, CodeType))
    found = dis.get_instructions(code)
    return frozenset(e.argval for e in found if e.opname in GLOBAL_WRITES).union(*inner)


def _own_names(code: CodeType) -> CodeNames:
    """Return the names that code reads itself."""
    instructions = [e for e in dis.get_instructions(code) if e.opname not in WITHOUT_EFFECT]
    found = [(each.opname, each.argval) for each in instructions]
    loads = {name for operation, name in found if operation.startswith(("LOAD", "IMPORT_FROM"))}
    names = loads.intersection(code.co_names)
    unnamed = strings_in(_matched(found)) | _formatted(found, names)
    names |= unnamed
    imports = {name for operation, name in found if operation == "IMPORT_NAME"}
    of_globals = {name for operation, name in found if operation in GLOBAL_LOADS}
    # In `getattr(self, "scale")` the name of the attribute is a constant of the code, not a name.
    by_text = BY_TEXT.intersection(names)
    texts, computing = _constant_names(instructions), frozenset(_computing(instructions, by_text))
    if computing:
        texts |= strings_in(_loaded_constants(found))
    # Strings are read of anything: which object getattr is given, code does not show.
    qualified = {*_qualified(found, code), *((ANY, text) for text in texts | unnamed)}
    if "globals" in names:
        of_globals.update(texts)
    # Code that catches AttributeError goes on without what it did not find.
    may_be_absent = names.union(texts) if "AttributeError" in names else texts
    return CodeNames(
        frozenset(names.union(texts)),
        frozenset(of_globals),
        frozenset(may_be_absent),
        frozenset(imports),
        frozenset(qualified),
        computing,
    )


def _constant_names(instructions: list[dis.Instruction]) -> frozenset[str]:
    """Return the constants that getattr and hasattr are given as names."""
    calls = (index for index, each in enumerate(instructions) if each.argval in BY_NAME)
    return strings_in({_constant_name(instructions[index:]) for index in calls})


def _computing(
    instructions: list[dis.Instruction], by_text: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Yield those of the names `by_text` by which code may read a name that it computes, each with
    what it reads that of.
    """
    for name in by_text:
        for index, each in enumerate(instructions):
            if each.argval == name and name not in BY_NAME:
                yield name, ANY
            elif each.argval == name and _constant_name(instructions[index:]) is None:
                yield name, _global_owner(instructions[index + 1 :])


def _global_owner(instructions: list[dis.Instruction]) -> str:
    """Return the global whose attribute a call of getattr reads, whose arguments begin with these
    instructions; `ANY` if that is something else.

        getattr(F.silu, name)       LOAD_GLOBAL F   LOAD_ATTR silu   LOAD_FAST name      F.silu
    """
    path: list[str] = []
    for each in instructions:
        is_first = each.opname in GLOBAL_LOADS and not path
        if is_first or (each.opname == "LOAD_ATTR" and path):
            path.append(str(each.argval))
        else:
            # What is called or chosen between is no name.
            is_next = each.opname.startswith("LOAD") and each.opname not in ATTRIBUTE_LOADS
            return ".".join(path) if path and is_next else ANY
    return ANY


def _constant_name(instructions: list[dis.Instruction]) -> Any:
    """Return the constant that a call of getattr or hasattr, which begins with these instructions,
    is given; None if it is none.

        getattr(object, "name", default)
              2      3       4        5      values on the stack, with the function and a NULL

    The last instruction that leaves 4 of them has made the name.
    """
    depth, last = 0, instructions[0]
    for each in instructions:
        # With that of PRECALL, which Python 3.11 has before it, the effect would be this one too.
        is_call, arguments = each.opname == "CALL", each.arg or 0
        if is_call and depth == 2 + arguments:
            return last.argval if last.opname == "LOAD_CONST" else None
        depth -= arguments + 1 if is_call else -dis.stack_effect(each.opcode, each.arg, jump=False)
        if depth < 2:
            return None
        if depth == 4:
            last = each
    return None


def _matched(found: list[tuple[str, Any]]) -> tuple[Any, ...]:
    """Return the attributes that patterns of classes name.

        case Stats(mean=value)      LOAD_CONST ('mean',)   MATCH_CLASS

    Those without keywords are read by the names that the class has for them.
    """
    named = [one[1] for one, next_ in pairwise(found) if next_[0] == "MATCH_CLASS"]
    return (*named, MATCHED) if named else ()


def _formatted(found: list[tuple[str, Any]], names: Collection[str]) -> frozenset[str]:
    """Return what f-strings and format strings read: "{0.scale}" names an attribute."""
    operations = {operation for operation, _ in found}
    # What raises has its f-strings for messages, most likely.
    makes_text = "RAISE_VARARGS" not in operations and any(
        each.startswith("FORMAT_") for each in operations
    )
    read = frozenset({FORMATTING} if makes_text else ())
    if FORMATS.isdisjoint(names):
        return read
    texts = [value for operation, value in found if operation == "LOAD_CONST"]
    return read.union(*(IN_FORMAT.findall(each) for each in texts if isinstance(each, str)))


def _loaded_constants(found: list[tuple[str, Any]]) -> tuple[Any, ...]:
    """Return the constants that code loads, without the tuples of keywords that it calls with."""
    # Python 3.13 loads these tuples too, right before the call.
    loads = pairwise([*found, ("", None)])
    return tuple(
        value
        for (operation, value), (following, _) in loads
        if operation == "LOAD_CONST" and following != "CALL_KW"
    )


def _qualified(found: list[tuple[str, Any]], code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield the names that tensors have too, each behind the name of what it is read of."""
    # An instruction with a large argument has this one before it, which would stand between a
    # variable and the attribute that is read of it. For `self.config.dtype` the loads are self,
    # config, dtype, and ("config", "dtype") is yielded.
    loads = [each for each in found if each[0] != "EXTENDED_ARG"]
    others = _other_names(loads)
    for (_, owner), (operation, name) in pairwise(loads):
        if operation in ATTRIBUTE_LOADS and name in OF_TENSORS:
            for variable in _names_of(owner, code):
                yield from ((each, name) for each in (variable, *others[variable]))


def _other_names(loads: list[tuple[str, Any]]) -> defaultdict[str, set[str]]:
    """Return the names by which variables were read before they got another one.

    config = self.config          LOAD_ATTR config   STORE_FAST config      {config: {config}}
    c = Table.config              LOAD_ATTR config   STORE_FAST c           {c: {config}}
    """
    others = defaultdict[str, set[str]](set)
    for (operation, read), (storing, stored) in pairwise(loads):
        if storing.startswith("STORE_") and operation.startswith("LOAD_") and isinstance(read, str):
            # From Python 3.13 on an instruction may store one variable and load another.
            others[stored[0] if isinstance(stored, tuple) else str(stored)].add(read)
    return others


def _names_of(loaded: Any, code: CodeType) -> Iterator[str]:
    """Yield the name of the variable that is loaded, and where that is `self` also of its class."""
    # From Python 3.13 on an instruction may load two variables.
    name = loaded[-1] if isinstance(loaded, tuple) else loaded
    yield str(name)
    if name in ("self", *code.co_varnames[: code.co_argcount][:1]):
        method, _, _ = code.co_qualname.partition(".<locals>")
        yield method.rpartition(".")[0]


def strings_in(value: Any) -> frozenset[str]:
    """Return the strings in `value`, and in collections in it, that may name something."""
    if isinstance(value, str):
        return frozenset({value} if value.isidentifier() else ())
    if isinstance(value, (tuple, list, set, frozenset)) and len(value) <= MOST_TEXTS:
        return frozenset[str]().union(*map(strings_in, value))
    return frozenset()
