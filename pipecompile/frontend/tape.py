"""The graph as it grows while a forward runs, and which node made which tensor."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.errors import CaptureError
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.source import source
from pipecompile.graph.autograd_context import observed

__all__ = ["Mark", "Symbolic", "Tape", "contains_tensor", "tensors_in"]

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Symbolic:
    """A number in a node's arguments that depends on the batch."""

    expression: sympy.Basic
    type: type[int] | type[float] | type[bool]

    def at(self, values: dict[sympy.Symbol, sympy.Integer]) -> int | float | bool:
        """The number, once the batch is known."""
        return self.type(self.expression.xreplace(values))


@dataclass(frozen=True)
class Mark:
    """How far a tape was at some moment."""

    last: fx.Node | None
    bindings: int
    reads: int
    constants: int
    calls: int


class Tape:
    """What was recorded so far: nodes, the tensors that they made, the modules that are being called."""

    def __init__(self, root: nn.Module, state: dict[int, Tensor]) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.calls: Counter[str] = Counter()  # how often each module was called
        self._root = root
        self._state = state
        self._names = self._name_state()
        self._slots = list(self._find_slots())
        self._reads: dict[str, fx.Node] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._bindings: list[tuple[int, fx.Node | None]] = []  # what each binding took the place of
        self._called: list[str] = []
        self._stack: list[str] = []
        self._alive: list[Tensor] = []  # ids stay unique while the tensors live
        self._outside = observed()
        self._cleared = 0

    def _name_state(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for path, module in self._root.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        names.setdefault(id(self._state[id(tensor)]), f"{path}.{key}".lstrip("."))
        return names

    def _find_slots(self) -> Iterator[_Slot]:
        for path, module in self._root.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    table = cast("dict[str, Tensor]", module._buffers)
                    yield _Slot(table, key, f"{path}.{key}".lstrip("."), self._state[id(tensor)])

    # -- the modules that run

    @property
    def path(self) -> str:
        """The module whose forward runs now."""
        return self._stack[-1] if self._stack else ""

    def enter(self, path: str) -> None:
        """The forward of the module at `path` begins."""
        self._stack.append(path)

    def leave(self) -> None:
        """It has ended."""
        self._stack.pop()

    def clear(self) -> None:
        """Autocast forgets what it cast: an outermost region of it is left."""
        self._cleared += 1

    def count(self, path: str) -> int:
        """Notes a call of the module at `path`; returns how many there were before."""
        self.calls[path] += 1
        self._called.append(path)
        return self.calls[path] - 1

    def where(self) -> str:
        """The module and the line that run now."""
        return f"{self.path or type(self._root).__name__} ({source() or 'unknown line'})"

    # -- nodes

    def placeholder(self, name: str, value: Tensor) -> None:
        """Adds an input of the graph."""
        node = self.graph.placeholder(name)
        node.meta.update(module="", source="", ambient=None, random=False, mutates=False)
        self.bind(value, node)

    def output(self, values: Sequence[Any]) -> None:
        """Ends the graph with the flat outputs."""
        self.create("output", "output", (tuple(map(self.argument, values)),), {})

    def create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        """Adds a node that runs under what holds now."""
        node = self.graph.create_node(op, target, args, kwargs)
        ambient = observed()
        region = None if ambient == self._outside else replace(ambient, number=self._cleared)
        node.meta.update(
            module=self.path, source=source(), ambient=region, random=False, mutates=False
        )
        return node

    def bind(self, value: Any, node: fx.Node) -> None:
        """Makes `node` the source of the tensors in `value`; items of a collection get a node each."""
        node.meta["val"] = value
        if isinstance(value, Tensor):
            self._bindings.append((id(value), self._nodes.get(id(value))))
            self._nodes[id(value)] = node
            self._alive.append(value)
            return
        for reader, key, item in _items(value):
            if contains_tensor(item):
                self.bind(item, self.create("call_function", reader, (node, key), {}))

    def argument(self, value: Any) -> Any:
        """`value` as a node argument: tensors become nodes, symbolic sizes stay."""
        match value:
            case Tensor():
                return self._node_of(value)
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self.argument, value))
            case tuple() | list():
                kind = tuple if isinstance(value, tuple) else list
                return kind(map(self.argument, value))
            case dict():
                return {key: self.argument(item) for key, item in value.items()}
            case slice():
                return slice(*map(self.argument, (value.start, value.stop, value.step)))
            case torch.Generator():
                raise CaptureError(
                    f"{self.where()}: the forward draws from a torch.Generator of its own; use the default generator, "
                    "which every random node of a pipeline seeds for itself"
                )
            case _ if isinstance(value, SYMBOLS):
                return Symbolic(value.node.expr, value.node.pytype)
            case _ if _hides_tensors(value):
                raise UnsupportedError(
                    f"{self.where()}: a {type(value).__name__} that holds tensors is passed to what becomes one node; "
                    "pass the tensors themselves, in tuples, lists or dicts"
                )
        return value

    def _node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        if id(tensor) in self._names:
            return self._read(self._names[id(tensor)], tensor)
        if isinstance(tensor, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(
            tensor
        ):
            raise UnsupportedError(
                f"{self.where()}: a tensor of shape {tuple(tensor.shape)} comes from a call that cannot be seen "
                "(C++ or numpy code, torch.func, or a tensor kept from elsewhere); make it with torch functions in the "
                "forward"
            )
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = tensor
        node = self._read(name, tensor)
        self.bind(tensor, node)
        return node

    def _read(self, name: str, tensor: Tensor) -> fx.Node:
        if name not in self._reads:
            node = self._reads[name] = self.create("get_attr", name, (), {})
            node.meta["val"] = tensor
            self._alive.append(tensor)
        return self._reads[name]

    def is_used(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the model's, or what made it is still part of the graph."""
        node = self._nodes.get(id(tensor))
        return id(tensor) in self._names or (node is not None and not node._erased)

    # -- going back

    def mark(self) -> Mark:
        """This moment, to come back to."""
        last = next(iter(reversed(self.graph.nodes)), None)
        return Mark(
            last, len(self._bindings), len(self._reads), len(self.constants), len(self._called)
        )

    def undo(self, mark: Mark) -> None:
        """Forgets what was recorded since `mark`."""
        for tensor, node in reversed(self._bindings[mark.bindings :]):
            if node is None:
                del self._nodes[tensor]
            else:
                self._nodes[tensor] = node
        del self._bindings[mark.bindings :]
        self.calls.subtract(self._called[mark.calls :])
        del self._called[mark.calls :]
        while len(self._reads) > mark.reads:
            self._reads.popitem()
        while len(self.constants) > mark.constants:
            self.constants.popitem()
        for node in reversed(self.graph.nodes):
            if node is mark.last:
                break
            self.graph.erase_node(node)

    # -- buffers that the forward replaced

    def write_back(self) -> None:
        """Records that each buffer takes the value of the tensor that the forward put in its place.

        What the forward read of such a buffer it reads from a copy, since it would have kept the old tensor. The
        model's table gets its own tensor back; a buffer that cannot be written to so stays replaced.
        """
        written = [
            self._write(slot, slot.table[slot.key]) for slot in self._slots if self._can_write(slot)
        ]
        for read, write in written:
            readers = [user for user in read.users if user is not write]
            if readers:
                with self.graph.inserting_after(read):
                    copy = self.create("call_method", "clone", (read,), {})
                read.replace_all_uses_with(copy, readers.__contains__)

    def _can_write(self, slot: _Slot) -> bool:
        new = slot.table.get(slot.key)
        if new is slot.tensor or not isinstance(new, Tensor):
            return False
        known = id(new) in self._nodes or id(new) in self._names
        tied = sum(other.tensor is slot.tensor for other in self._slots) > 1
        return (
            known and not tied and (new.shape, new.dtype) == (slot.tensor.shape, slot.tensor.dtype)
        )

    def _write(self, slot: _Slot, new: Tensor) -> tuple[fx.Node, fx.Node]:
        slot.table[slot.key] = slot.tensor
        value = self.create("call_method", "detach", (self.argument(new),), {})
        read = self._read(slot.name, slot.tensor)
        write = self.create("call_method", "copy_", (read, value), {})
        write.meta["mutates"] = True
        return read, write


@dataclass(frozen=True)
class _Slot:
    """Where a module keeps a buffer: the entry `key` of `table`, which holds the fake `tensor`."""

    table: dict[str, Tensor]
    key: str
    name: str
    tensor: Tensor


def contains_tensor(value: Any) -> bool:
    """Whether a tensor lies anywhere in nested tuples, lists, dicts and dataclasses."""
    return isinstance(value, Tensor) or any(contains_tensor(item) for _, _, item in _items(value))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts, dataclasses and slices."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))
    else:
        for _, _, item in _items(value):
            yield from tensors_in(item)


def _items(value: Any) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """The items of a collection: with what they are read, under which key, and each itself."""
    if isinstance(value, (tuple, list)):
        yield from ((operator.getitem, index, item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((operator.getitem, key, item) for key, item in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        yield from ((getattr, name, getattr(value, name, None)) for name in names)


def _hides_tensors(value: Any) -> bool:
    """Whether `value` is an object whose attributes hold tensors that no node could hand it."""
    return contains_tensor(value) or any(
        map(contains_tensor, getattr(value, "__dict__", {}).values())
    )
