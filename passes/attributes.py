"""The Python attributes of modules: what a forward leaves on them besides parameters and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Attributes", "unchanged"]

STATE = ("_parameters", "_buffers", "_modules")  # tables whose entries have watchers of their own
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
ABSENT = object()


@dataclass(frozen=True)
class Attributes:
    """The attributes of every module at one moment, with copies of the lists, dicts and sets among them.

    What changes inside an object of another kind is not seen.
    """

    values: Mapping[nn.Module, Mapping[str, Any]]
    copies: Mapping[nn.Module, Mapping[str, Any]]

    @staticmethod
    def of(model: nn.Module) -> Attributes:
        """Those of `model` now."""
        values = {module: dict(vars(module)) for module in model.modules()}
        copies = {module: {n: v.copy() for n, v in own.items() if _holds(v)} for module, own in values.items()}
        return Attributes(values, copies)

    def restore(self) -> None:
        """Makes the modules as they were at this moment, their tables of parameters and buffers included."""
        for module, attributes in self.values.items():
            now = vars(module)
            if not _same_entries(now, attributes):
                now.clear()
                now.update(attributes)
            for name, copy in self.copies[module].items():
                _refill(attributes[name], copy)

    def changed(self, later: Attributes) -> list[tuple[nn.Module, str]]:
        """Which attributes are not what they were at this moment."""
        return [
            (module, name)
            for module, own in self.values.items()
            for name in sorted(own.keys() | later.values[module].keys())
            if not _same(self._seen(module, name), later._seen(module, name))
        ]

    def described(self, module: nn.Module, name: str) -> str:
        """An attribute at this moment as text: of tensors the shape, of objects the type."""
        return _described(self._seen(module, name))

    def _seen(self, module: nn.Module, name: str) -> Any:
        value = self.copies[module].get(name, self.values[module].get(name, ABSENT))
        return list(value) if name in STATE else value


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """After the block the modules have the attributes that they had before."""
    before = Attributes.of(model)
    try:
        yield
    finally:
        before.restore()


def _holds(value: Any) -> bool:
    return isinstance(value, (list, dict, set))


def _same_entries(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return len(left) == len(right) and all(right.get(name, ABSENT) is value for name, value in left.items())


def _same(left: Any, right: Any) -> bool:
    """Whether nothing was put in its place: the same object, an equal plain value, or a container of such."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(_same, left.values(), right.values()))
    return isinstance(left, (*PLAIN, set)) and bool(left == right)


def _refill(container: Any, copy: Any) -> None:
    if _same(container, copy):
        return
    container.clear()
    if isinstance(container, list):
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
    return str(value) if isinstance(value, (*PLAIN, *SYMBOLIC, set)) else f"a {type(value).__name__}"
