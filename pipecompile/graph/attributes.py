"""The Python attributes of modules: what a forward leaves on them besides parameters and buffers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["STATE", "Attributes", "same", "settings", "unchanged"]

STATE = (
    "_parameters",
    "_buffers",
    "_modules",
)  # tables whose entries have watchers of their own: names count
TABLES = (*STATE, "_forward_hooks", "_forward_pre_hooks")
INTERNAL = frozenset(vars(nn.Module()))
CONTAINERS = (list, dict, set, deque)
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
ABSENT = object()


@dataclass(frozen=True)
class Attributes:
    """The attributes of every module at one moment, and what the containers among them hold, at any depth.

    What changes inside an object of another kind is not seen.
    """

    values: Mapping[nn.Module, Mapping[str, Any]]
    copies: Mapping[nn.Module, Mapping[str, Any]]
    contents: tuple[tuple[Any, Any], ...]  # each container, and a copy of it

    @staticmethod
    def of(model: nn.Module) -> Attributes:
        """Those of `model` now."""
        values = {module: dict(vars(module)) for module in model.modules()}
        copies = {
            module: {
                name: _copied(value)
                for name, value in own.items()
                if isinstance(value, (*CONTAINERS, tuple))
            }
            for module, own in values.items()
        }
        found: dict[int, tuple[Any, Any]] = {}
        for own in values.values():
            for value in own.values():
                _collect(value, found)
        return Attributes(values, copies, tuple(found.values()))

    def restore(self) -> None:
        """Makes the modules as they were at this moment, their tables of parameters and buffers included."""
        for module, attributes in self.values.items():
            now = vars(module)
            if not _same_entries(now, attributes):
                now.clear()
                now.update(attributes)
        for container, copy in self.contents:
            _refill(container, copy)

    def changed(self, later: Attributes) -> list[tuple[nn.Module, str]]:
        """Which attributes are not what they were at this moment."""
        return [
            (module, name)
            for module, own in self.values.items()
            for name in sorted(own.keys() | later.values.get(module, own).keys())
            if module in later.values
            and not same(self._seen(module, name), later._seen(module, name))
        ]

    def described(self, module: nn.Module, name: str) -> str:
        """An attribute at this moment as text: of tensors the shape, of objects the type."""
        return _described(self._seen(module, name))

    def _seen(self, module: nn.Module, name: str) -> Any:
        value = self.copies[module].get(name, self.values[module].get(name, ABSENT))
        return list(value) if name in STATE else value


def settings(module: nn.Module) -> dict[str, Any]:
    """What a forward may read of a module besides the values of tensors, to be compared by `same` later.

    That is its own attributes, and its tables of submodules, parameters, buffers and hooks.
    """
    own = vars(module)
    return {
        name: _copied(value)
        for name, value in own.items()
        if name in TABLES or name not in INTERNAL
    }


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """After the block the modules have the attributes that they had before."""
    before = Attributes.of(model)
    try:
        yield
    finally:
        before.restore()


def _copied(value: Any) -> Any:
    """`value` with all containers in it copied, down to what they hold."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_copied(item) for item in value]
    return set(value) if isinstance(value, set) else value


def _collect(value: Any, found: dict[int, tuple[Any, Any]]) -> None:
    """Notes every container in `value` with a copy of its own items."""
    if isinstance(value, CONTAINERS) and id(value) not in found:
        found[id(value)] = (value, value.copy())
    elif not isinstance(value, tuple):
        return
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (*CONTAINERS, tuple)):
            _collect(item, found)


def _same_entries(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return len(left) == len(right) and all(
        right.get(name, ABSENT) is value for name, value in left.items()
    )


def same(left: Any, right: Any) -> bool:
    """Whether nothing was put in its place: the same object, an equal plain value, or a container of such."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(same, left.values(), right.values()))
    return isinstance(left, (*PLAIN, set)) and bool(left == right)


def _refill(container: Any, copy: Any) -> None:
    now, before = list(container), list(copy)
    if isinstance(container, dict):
        now, before = [*now, *container.values()], [*before, *copy.values()]
    if len(now) == len(before) and all(
        left is right for left, right in zip(now, before, strict=True)
    ):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(copy)
    else:
        container.update(copy)


def _described(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype} {value.requires_grad}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_described(item)}' for key, item in value.items())}}}"
    return (
        str(value) if isinstance(value, (*PLAIN, *SYMBOLIC, set)) else f"a {type(value).__name__}"
    )
