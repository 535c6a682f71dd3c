"""The Python attributes of modules: what a forward leaves on them besides parameters and buffers.

The frontend compares the attributes before and after a forward, and refuses a model whose forward
leaves state that a graph cannot keep. Fake and probing runs restore the attributes.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.graph.table_writes import AskedAfterWrites

__all__ = [
    "ABSENT",
    "CONTAINERS",
    "HOOKS",
    "INTERNAL",
    "ITSELF",
    "PLAIN",
    "REGISTERED_TABLES",
    "TABLES",
    "AttributeItems",
    "ContainerItems",
    "ModuleAttributes",
    "attributes_restored",
    "deep_copy",
    "getter_of",
    "hook_codes",
    "is_collecting",
    "is_same_constant",
    "is_same_value",
    "plain_container",
    "restore_items",
    "settings_of",
]

# Of these tables only the names with an entry are compared: other entries are noticed elsewhere
# (`swapped_state`, and version counters of tensors). People call an entry by the word here.
REGISTERED_TABLES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
TABLES = (*REGISTERED_TABLES, *HOOKS)
INTERNAL = frozenset(vars(nn.Module()))
CONTAINERS = (list, dict, set, deque)
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
ABSENT = object()
"""Stands for an attribute or item that is not there."""
ITSELF = object()
"""Stands for a container in its own items."""


@dataclass(frozen=True)
class ModuleAttributes:
    """The attributes of every module at one moment, with the items of containers at any depth.

    `values` are the attributes themselves, by module and name. `copies` hold, of those that are
    containers, a deep copy to compare with. `contents` hold each container with a copy of its own
    items, to restore it. Changes within objects of other kinds are not noticed.
    """

    values: Mapping[nn.Module, Mapping[str, Any]]
    copies: Mapping[nn.Module, Mapping[str, Any]]
    contents: tuple[tuple[Any, Any], ...]

    @staticmethod
    def of(model: nn.Module) -> ModuleAttributes:
        """Return the current attributes of `model` and its submodules."""
        values = {module: dict(vars(module)) for module in model.modules()}
        copies: dict[nn.Module, dict[str, Any]] = {}
        contents: dict[int, tuple[Any, Any]] = {}
        for module, attributes in values.items():
            copies[module] = {
                name: deep_copy(value)
                for name, value in attributes.items()
                if isinstance(value, (*CONTAINERS, tuple))
            }
            for value in attributes.values():
                _collect_containers(value, contents)
        return ModuleAttributes(values, copies, tuple(contents.values()))

    def restore(self) -> None:
        """Restore the modules, their tables of parameters and buffers included."""
        for module, attributes in self.values.items():
            current = vars(module)
            if not _has_same_entries(current, attributes):
                current.clear()
                current.update(attributes)
        # Containers are refilled in place, since other objects may refer to them.
        for container, items in self.contents:
            restore_items(container, items)

    def changed(self, later: ModuleAttributes) -> list[tuple[nn.Module, str]]:
        """Return the attributes, as (module, name), that differ at a later moment."""
        changes: list[tuple[nn.Module, str]] = []
        for module, attributes in self.values.items():
            if module not in later.values:
                continue
            for name in sorted(attributes.keys() | later.values[module].keys()):
                if not is_same_value(self.comparable(module, name), later.comparable(module, name)):
                    changes.append((module, name))
        return changes

    def described(self, module: nn.Module, name: str) -> str:
        """Return an attribute as text: tensors by their shape, other objects by their type."""
        return _described(self.comparable(module, name))

    def comparable(self, module: nn.Module, name: str) -> Any:
        """Return an attribute, with containers copied; `ABSENT` for one that is not there."""
        if name in REGISTERED_TABLES:
            return self.registered(module, name)
        # The copies, since a container may have changed in the meantime.
        return self.copies[module].get(name, self.values[module].get(name, ABSENT))

    def ids(self) -> frozenset[int]:
        """Return the ids of all that the attributes and their containers hold."""
        held = chain(
            *(attributes.values() for attributes in self.values.values()),
            *(each.values() if isinstance(each, dict) else each for _, each in self.contents),
        )
        return frozenset(map(id, held))

    def registered(self, module: nn.Module, table: str) -> list[str]:
        """Return the names of one of the `REGISTERED_TABLES` that have a tensor or a module."""
        return [name for name, entry in self.copies[module][table].items() if entry is not None]


def settings_of(module: nn.Module) -> list[str]:
    """Return the names of what a forward may read of a module besides the values of tensors.

    These are its own attributes and its tables of submodules, parameters, buffers and hooks.
    """
    return [name for name in vars(module) if name in TABLES or name not in INTERNAL]


def is_collecting(hook: Any) -> bool:
    """Return whether a hook is one of transformers that does nothing unless a call asks for hidden
    states, whose forward installs it.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def hook_codes(hooks: Iterable[Any]) -> frozenset[Any]:
    """Return what tells hooks apart that a forward installs anew: their code, if they have any."""
    return frozenset(getattr(hook, "__code__", hook) for hook in hooks)


class ContainerItems:
    """The items of the containers in some values, at any depth, to find out cheaply that nothing
    has changed in them.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        nested: dict[int, tuple[Any, Any]] = {}
        for value in values:
            _collect_containers(value, nested)
        containers = [container for container, _ in nested.values()]
        # Most are tables of hooks, and empty. Of these it is enough to know that they still are.
        self._empty = [each for each in containers if not each]
        tables = [each for each in containers if each and type(each) is dict]
        self._in_tables = AskedAfterWrites(_Items(tables).are_the_same, tables)
        self._others = _Items([each for each in containers if each and type(each) is not dict])

    def are_the_same(self) -> bool:
        """Return whether each item is the same object. If not, it may still be an equal one."""
        return not any(self._empty) and self._others.are_the_same() and self._in_tables.holds()


class _Items:
    """The items that these containers had, none of which is empty."""

    def __init__(self, containers: Sequence[Any]) -> None:
        self._containers = containers
        # Names may be compared as a whole, and so faster.
        self._named = [each for each in containers if _has_names(each)]
        self._others = [each for each in containers if not _has_names(each)]
        self._mappings = [each for each in containers if isinstance(each, dict)]
        self._lengths, self._names = list(map(len, containers)), self._current_names()
        self._items = list(self._current_items())

    def are_the_same(self) -> bool:
        # Without loops in Python: a step of a small model takes a millisecond.
        return (
            list(map(len, self._containers)) == self._lengths
            and self._current_names() == self._names
            and all(map(is_, self._current_items(), self._items))
        )

    def _current_names(self) -> list[str]:
        return list(chain.from_iterable(self._named))

    def _current_items(self) -> Iterator[Any]:
        values = map(dict.values, self._mappings)
        return chain.from_iterable(chain(self._others, values))


class AttributeItems:
    """The values of some attributes of modules, given by name, to find out cheaply later that none
    of them has changed.

    The attributes are compared, and the items of containers among them.
    """

    def __init__(self, names: Iterable[tuple[nn.Module, Sequence[str]]]) -> None:
        watched = list(names)
        self._modules = [module for module, _ in watched]
        self._attributes = list(map(vars, self._modules))
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for attributes, (_, of_module) in zip(self._attributes, watched, strict=True):
            if of_module:
                alike.setdefault(tuple(of_module), []).append(attributes)
        # Modules of one kind have the same names, and are asked by one getter.
        self._alike = [(getter_of(names), modules) for names, modules in alike.items()]
        self._lengths, self._settings = self._current_lengths(), list(self._current_settings())
        self._values = AskedAfterWrites(self._have_the_same, self._attributes)
        self._containers = ContainerItems(self._settings)

    def are_the_same(self) -> bool:
        """Return whether each item is the same object. If not, it may still be an equal one."""
        return (
            all(map(is_, map(_attributes_of, self._modules), self._attributes))
            and self._values.holds()
            and self._containers.are_the_same()
        )

    def _have_the_same(self) -> bool:
        try:
            return self._current_lengths() == self._lengths and all(
                map(is_, self._current_settings(), self._settings)
            )
        except KeyError:  # an attribute has another name
            return False

    def _current_lengths(self) -> list[int]:
        return list(map(len, self._attributes))

    def _current_settings(self) -> Iterator[Any]:
        return chain.from_iterable(
            chain.from_iterable(map(getter, modules)) for getter, modules in self._alike
        )


# In C, since each step asks all modules.
_attributes_of = attrgetter("__dict__")


def getter_of(names: Iterable[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what gets the items with these names, of which there are some, as a tuple."""
    first, *others = names
    # The first one twice, since a getter of a single item returns no tuple.
    return itemgetter(first, first, *others)


def _has_names(container: Any) -> bool:
    """Return whether this is a dict whose keys are all strings."""
    return isinstance(container, dict) and all(isinstance(key, str) for key in container)


@contextlib.contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules after the block."""
    before = ModuleAttributes.of(model)
    try:
        yield
    finally:
        before.restore()


def deep_copy(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return `value` with all containers in it copied, but not the objects that these hold.

    `around` are the containers that it is in; of one that holds itself only that is kept.
    """
    if not isinstance(value, (*CONTAINERS, tuple)):
        return value
    if id(value) in around:
        return ITSELF
    around = (*around, id(value))
    value = plain_container(value)
    if isinstance(value, dict):
        return {key: deep_copy(item, around) for key, item in value.items()}
    # A list stands for every sequence: it is only compared with another copy.
    return value if isinstance(value, set) else [deep_copy(item, around) for item in value]


def plain_container(value: Any) -> Any:
    """Return a copy of a container that is one of Python's own; a tuple is returned as it is.

    It is made by the methods of Python's own class. One below it may need more to be made, or have
    items that are loaded when somebody asks for them.
    """
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return dict(kind.items(value))
    own = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
    return value if own is None else own(own.__iter__(value))


def _collect_containers(value: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Add every container in `value`, by its id, with a copy of its own items."""
    items = value
    if isinstance(value, CONTAINERS) and id(value) not in contents:
        items = plain_container(value)
        contents[id(value)] = (value, items)
    elif not isinstance(value, tuple):
        return
    for item in items.values() if isinstance(items, dict) else items:
        if isinstance(item, (*CONTAINERS, tuple)):
            _collect_containers(item, contents)


def _has_same_entries(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return len(left) == len(right) and all(
        right.get(name, ABSENT) is value for name, value in left.items()
    )


def is_same_value(left: Any, right: Any) -> bool:
    """Return whether an attribute was not replaced.

    That is so if both are one object, equal plain values, or containers of such. Two tensors are
    never the same, even if they are equal.
    """
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same_value, left, right))
    if isinstance(left, dict):
        # The order of keys counts: a forward may iterate over them.
        return list(left) == list(right) and all(map(is_same_value, left.values(), right.values()))
    return isinstance(left, (*PLAIN, set)) and is_same_constant(left, right)


def is_same_constant(left: Any, right: Any) -> bool:
    """Return whether code computes the same with two plain values: of floats NaN is like NaN, but
    0.0 not like -0.0.
    """
    if type(left) is not type(right):
        return False  # True equals 1
    # Their text tells -0.0 from 0.0, and not NaN from NaN.
    is_float = isinstance(left, (float, complex))
    return repr(left) == repr(right) if is_float else bool(left == right)


def restore_items(container: Any, items: Any) -> None:
    """Make `container` hold `items` again; a container that still holds them is not written to."""
    now = plain_container(container)
    current, before = list(now), list(items)
    if isinstance(now, dict):
        current, before = [*current, *now.values()], [*before, *items.values()]
    if len(current) == len(before) and all(
        left is right for left, right in zip(current, before, strict=True)
    ):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)


def _described(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype} {value.requires_grad}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_described(item)}' for key, item in value.items())}}}"
    is_text = isinstance(value, (*PLAIN, *SYMBOLIC, set))
    return str(value) if is_text else f"a {type(value).__name__}"
