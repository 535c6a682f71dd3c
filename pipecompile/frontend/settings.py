"""Settings of modules and functions as text: the same in every process, without addresses.

The digest of a graph and the conditions of measured costs are made of these texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DescribeUnknown", "describe", "layout_text", "qualified_name"]

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    EllipsisType,
    torch.dtype,
    torch.memory_format,
)
INTERNAL = frozenset(vars(nn.Module()))  # what every module keeps about itself

DescribeUnknown = Callable[[object], str]
"""Describes an object of a kind that is not known here; it may raise."""


def qualified_name(thing: Any) -> str:
    """Return the full name of a function or a type."""
    module = getattr(thing, "__module__", None) or ""
    name = getattr(thing, "__qualname__", getattr(thing, "__name__", type(thing).__name__))
    return f"{module}.{name}"


def layout_text(value: Tensor) -> str:
    """Return shape, strides, type and whether a gradient is required.

    A dimension of one element has the stride 0 here, since its stride means nothing.
    """
    strides = tuple(
        stride if size > 1 else 0 for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return f"{tuple(value.shape)}:{strides}:{value.dtype}:{value.requires_grad}"


def describe(value: object, unknown: DescribeUnknown, *, code: bool) -> str:
    """Return `value` as text: a module with the settings of its parts, a function by its name.

    With `code`, a function that is not torch's is described with its bytecode, which differs
    between Python versions, and with what it encloses; so are the methods of a module. Tensors
    are described by their layout, all devices as "device", and an object that is neither plain nor
    a container by `unknown`.
    """
    return _Describer(unknown, code).text(value)


class _Describer:
    """Describes each function once, since functions may call each other, and each module: what a
    module holds may lead back to it.
    """

    def __init__(self, unknown: DescribeUnknown, code: bool) -> None:
        self.unknown = unknown
        self.code = code
        self.seen: set[int] = set()
        self.modules: dict[int, int] = {}  # which one in the order in which they were described

    def text(self, value: object) -> str:
        """Return what a setting is, as text that is equal on all machines for equal settings."""
        match value:
            case torch.device():
                return "device"
            case Enum():
                return f"{qualified_name(type(value))}.{value.name}"
            case _ if isinstance(value, PLAIN):
                return repr(value)
            case tuple() | list():
                return f"{type(value).__name__}({', '.join(map(self.text, value))})"
            case set() | frozenset():
                # The order of a set differs between processes.
                return f"set({', '.join(sorted(map(self.text, value)))})"
            case Mapping():
                items = [f"{self.text(key)}: {self.text(item)}" for key, item in value.items()]
                return f"{{{', '.join(items)}}}"
            case Tensor():
                return layout_text(value)
            case nn.Module():
                return self._module(value)
            case ModuleType():
                return value.__name__
        return self._callable(value)

    def _callable(self, value: object) -> str:
        match value:
            case FunctionType():
                return self._function(value)
            case MethodType():
                return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
            case partial():
                parts = ", ".join(map(self.text, (value.func, value.args, value.keywords)))
                return f"partial({parts})"
            case type() | BuiltinFunctionType() | MethodDescriptorType():
                return qualified_name(value)
            case CodeType():
                constants = self.text(value.co_consts)
                return f"code({value.co_code.hex()}, {value.co_names}, {constants})"
        return self.unknown(value)

    def _module(self, module: nn.Module) -> str:
        return "; ".join(f"{name}={self._layer(part)}" for name, part in module.named_modules())

    def _layer(self, module: nn.Module) -> str:
        """Describe a module without its submodules."""
        if id(module) in self.modules:
            return f"module {self.modules[id(module)]}"
        self.modules[id(module)] = len(self.modules)
        # Two versions of a class may have the same name and settings, but other code.
        methods = list(map(self.text, _methods(type(module)))) if self.code else []
        state = [
            f"{name}:{layout_text(value)}"
            for table in (module._parameters, module._buffers)
            for name, value in table.items()
            if value is not None
        ]
        settings = {name: value for name, value in vars(module).items() if name not in INTERNAL}
        # `extra_repr` may print a function with its address.
        extra = re.sub(r" at 0x[0-9a-f]+", "", module.extra_repr())
        name = qualified_name(type(module))
        return f"{name}({extra}) {methods} training={module.training} {state} {self.text(settings)}"

    def _function(self, function: FunctionType) -> str:
        if not self.code or _is_of_torch(function) or id(function) in self.seen:
            return qualified_name(function)
        # Before what it encloses is described, which may be the function itself.
        self.seen.add(id(function))
        enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
        parts = (
            function.__code__,
            function.__defaults__,
            function.__kwdefaults__,
            enclosed,
            dict(_globals(function)),
        )
        return f"{qualified_name(function)}{self.text(parts)}"


def _is_of_torch(thing: Any) -> bool:
    return qualified_name(thing).partition(".")[0] == "torch"


def _methods(kind: type) -> Iterator[FunctionType]:
    """Yield the methods of a class and its bases, without torch's."""
    for base in kind.__mro__:
        if not _is_of_torch(base):
            yield from (value for value in vars(base).values() if isinstance(value, FunctionType))


def _globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the globals that a function may read: plain values, and functions of its own module."""
    for name in function.__code__.co_names:
        # `co_names` holds names of attributes too; most are no globals, and so None here.
        value = function.__globals__.get(name)
        if isinstance(value, PLAIN) or getattr(value, "__globals__", None) is function.__globals__:
            yield name, value
