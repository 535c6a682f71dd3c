"""A recording: the graph as it grows while a forward runs, and which node returned which tensor.

The recorder drives it: it enters and leaves modules, creates a node for each call, and binds the
tensors that the call returned to this node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.errors import CaptureError
from pipecompile.frontend.nested_values import contains_tensor, hides_tensors, items_of
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.source import current_line
from pipecompile.graph.autograd_context import current_context
from pipecompile.graph.hook_frames import hook_codes_of, running_hook

__all__ = ["SYMBOLS", "Recording", "RecordingMark", "SymbolicNumber"]

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class SymbolicNumber:
    """A number in a node's arguments that depends on the batch size, or on lengths."""

    expression: sympy.Basic
    type: type[int] | type[float] | type[bool]

    def value_for(self, values: dict[sympy.Symbol, sympy.Integer]) -> int | float | bool:
        """Return the number for these values of the symbols."""
        return self.type(self.expression.xreplace(values))

    def with_sizes(
        self, values: dict[sympy.Symbol, sympy.Integer]
    ) -> SymbolicNumber | int | float | bool:
        """Return the number for these values, or what is open where it depends on others."""
        expression = self.expression.xreplace(values)
        is_open = expression.free_symbols
        return replace(self, expression=expression) if is_open else self.type(expression)


@dataclass(frozen=True)
class RecordingMark:
    """A moment of a recording: its last node, and the lengths of its tables."""

    last: fx.Node | None
    bindings: int
    reads: int
    constants: int
    calls: int
    taken_apart: int


class Recording:
    """The nodes, the tensors that they returned, and the modules that are being called.

    Tensors are known by their id. Parameters and buffers are read by `get_attr` nodes, one for
    each; `constants` are tensors that the model owns in no table. `taken_apart` are the
    paths of the modules that were recorded inside.
    """

    def __init__(self, root: nn.Module, state: dict[int, Tensor]) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.call_counts: Counter[str] = Counter()  # by path of a module
        self.taken_apart: list[str] = []
        self._root = root
        self._state = state
        self._names = self._name_state()
        self._slots = list(self._find_slots())
        self._reads: dict[str, fx.Node] = {}
        self._nodes: dict[int, fx.Node] = {}
        # For `undo`: the id of each tensor that was bound, and the node it was bound to before.
        self._bindings: list[tuple[int, fx.Node | None]] = []
        self._called: list[str] = []
        self._stack: list[str] = []
        self._alive: list[Tensor] = []  # an id is unique only while its tensor lives
        self._outside = current_context()
        self._autocast_clears = 0
        self._checkpoint = self._checkpoints = 0

    def _refuse_kept(self, tensor: Tensor) -> None:
        """Raise UnsupportedError if a module that is one node has left `tensor` on itself."""
        for path, module in self._root.named_modules():
            for name, value in vars(module).items():
                if value is tensor:
                    raise UnsupportedError(
                        f"{self.where()}: {path}.{name} is used, which the forward of {path}, that "
                        f"is one node, sets; return it from the forward of {path}"
                    )

    def _name_state(self) -> dict[int, str]:
        """Return the first name of each parameter and buffer, by the id of its fake."""
        names: dict[int, str] = {}
        for path, module in self._root.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        # Tied tensors go by the name under which `named_modules` meets them first.
                        names.setdefault(id(self._state[id(tensor)]), f"{path}.{key}".lstrip("."))
        return names

    def _find_slots(self) -> Iterator[_BufferSlot]:
        for path, module in self._root.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    table = cast("dict[str, Tensor]", module._buffers)
                    name = f"{path}.{key}".lstrip(".")
                    yield _BufferSlot(table, key, name, self._state[id(tensor)])

    # -- the modules that run

    @property
    def path(self) -> str:
        """The module whose forward runs now."""
        return self._stack[-1] if self._stack else ""

    def enter_module(self, path: str) -> None:
        """Note that the forward of the module at `path` begins."""
        self._stack.append(path)

    def leave_module(self) -> None:
        """Note that the forward of the innermost module has ended."""
        self._stack.pop()

    def note_autocast_clear(self) -> None:
        """Note that autocast drops its casts, as it does at the end of an outermost region."""
        self._autocast_clears += 1

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Note on the nodes of the block that they are of one region, which the model recomputes in
        a backward of its own.
        """
        outer, self._checkpoints = self._checkpoint, self._checkpoints + 1
        self._checkpoint = self._checkpoints
        try:
            yield
        finally:
            self._checkpoint = outer

    def count_call(self, path: str) -> int:
        """Note a call of the module at `path`; return how many there were before."""
        self.call_counts[path] += 1
        self._called.append(path)
        return self.call_counts[path] - 1

    def where(self) -> str:
        """Return the module and the line that run now, for messages."""
        return f"{self.path or type(self._root).__name__} ({current_line() or 'unknown line'})"

    def running_hook(self) -> str:
        """Return the name of the forward hook whose code runs now; "" without one."""
        return running_hook(hook_codes_of(self._root))

    # -- nodes

    def placeholder(self, name: str, value: Tensor) -> None:
        """Add an input to the graph."""
        node = self.graph.placeholder(name)
        node.meta.update(module="", source="", autograd_context=None, random=False, mutates=False)
        self.bind(value, node)

    @property
    def inputs(self) -> list[Tensor]:
        """The fakes of the inputs."""
        nodes = self.graph.nodes
        return [node.meta["val"] for node in nodes if node.op == "placeholder"]

    def output(self, values: Sequence[Any]) -> None:
        """End the graph with the flat outputs."""
        self.create("output", "output", (tuple(map(self.argument, values)),), {})

    def create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        """Add a node that runs under the current autograd context."""
        node = self.graph.create_node(op, target, args, kwargs)
        current = current_context()
        context = None
        if current != self._outside:
            # The count of clears tells outermost autocast regions apart.
            context = replace(current, region_number=self._autocast_clears)
        node.meta.update(module=self.path, source=current_line(), autograd_context=context)
        node.meta.update(random=False, mutates=False)
        if self._checkpoint:
            node.meta["checkpoint"] = self._checkpoint
        return node

    def bind(self, value: Any, node: fx.Node) -> None:
        """Make `node` the origin of the tensors in `value`.

        Each item of a collection that holds tensors is bound to a node of its own, which reads it.
        """
        node.meta["val"] = value
        # An in-place call returns its argument: the tensor is now bound to the later node.
        if isinstance(value, Tensor):
            self._bindings.append((id(value), self._nodes.get(id(value))))
            self._nodes[id(value)] = node
            self._alive.append(value)
            return
        for reader, key, item in items_of(value):
            if contains_tensor(item):
                self.bind(item, self.create("call_function", reader, (node, key), {}))

    def argument(self, value: Any) -> Any:
        """Return `value` as an argument of a node.

        Tensors become nodes and symbolic sizes a `SymbolicNumber`, at any depth. CaptureError for a
        generator, UnsupportedError for other objects that hold tensors.
        """
        match value:
            case Tensor():
                return self._node_of(value)
            # A named tuple takes its items as separate arguments.
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
                    f"{self.where()}: the forward draws from a torch.Generator of its own; use the "
                    "default generator, which is seeded for every random node of a pipeline"
                )
            case np.generic():
                # As torch takes it: a number of Python.
                return value.item()
            case _ if isinstance(value, SYMBOLS):
                return SymbolicNumber(value.node.expr, value.node.pytype)
            case _ if hides_tensors(value):
                raise UnsupportedError(
                    f"{self.where()}: a {type(value).__name__} that holds tensors is passed to a "
                    "call that becomes one node; pass the tensors themselves, in tuples, lists or "
                    "dicts"
                )
        return value

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        """Return the node that returned `tensor`, None if there is none yet."""
        return self._nodes.get(id(tensor))

    def _node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor; a tensor that is not the recording's becomes a constant."""
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        # A list or a closure may have a parameter itself, in whose place no fake is put.
        tensor = self._state.get(id(tensor), tensor)
        if id(tensor) in self._names:
            return self._read(self._names[id(tensor)], tensor)
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise UnsupportedError(
                f"{self.where()}: the forward transforms a function (grad, vjp, jacrev and others "
                "of torch.func), which no graph of a stage can do; write out what that computes"
            )
        if isinstance(tensor, FakeTensor):
            self._refuse_kept(tensor)
            sizes = ["N" if isinstance(size, torch.SymInt) else size for size in tensor.shape]
            raise UnsupportedError(
                f"{self.where()}: a tensor of {' x '.join(map(str, sizes))} elements comes from a "
                "call that cannot be seen (C++ or numpy code, or a tensor kept from an earlier "
                "call); make it with torch functions in the forward"
            )
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = tensor
        node = self._read(name, tensor)
        self.bind(tensor, node)
        return node

    def _read(self, name: str, tensor: Tensor) -> fx.Node:
        """Return the one node that reads the parameter, buffer or constant of this name."""
        if name not in self._reads:
            node = self._reads[name] = self.create("get_attr", name, (), {})
            node.meta["val"] = tensor
            self._alive.append(tensor)
        return self._reads[name]

    def is_state(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a parameter or buffer of the model."""
        return id(tensor) in self._names

    def state_name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter or buffer of the model, None for another tensor."""
        return self._names.get(id(tensor))

    def is_used(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the model's, or its node is still part of the graph."""
        node = self._nodes.get(id(tensor))
        return id(tensor) in self._names or (node is not None and not node._erased)

    # -- undoing

    def mark(self) -> RecordingMark:
        """Return the current moment, for `undo`."""
        last = next(iter(reversed(self.graph.nodes)), None)
        tables = self._bindings, self._reads, self.constants, self._called, self.taken_apart
        return RecordingMark(last, *map(len, tables))

    def undo(self, mark: RecordingMark) -> None:
        """Undo what was recorded since `mark`: nodes, bindings, reads, constants and calls."""
        # Backwards, since a tensor may have been bound several times.
        for tensor, node in reversed(self._bindings[mark.bindings :]):
            if node is None:
                del self._nodes[tensor]
            else:
                self._nodes[tensor] = node
        del self._bindings[mark.bindings :]
        # The module is called once more, as one node, and the calls inside it are counted then.
        self.call_counts.subtract(self._called[mark.calls :])
        del self._called[mark.calls :]
        del self.taken_apart[mark.taken_apart :]
        while len(self._reads) > mark.reads:
            self._reads.popitem()
        while len(self.constants) > mark.constants:
            self.constants.popitem()
        # Backwards, since fx erases only nodes without users.
        for node in reversed(self.graph.nodes):
            if node is mark.last:
                break
            self.graph.erase_node(node)

    # -- buffers that the forward replaced

    def write_back(self) -> None:
        """Record a write to each buffer that the forward replaced by a new tensor.

        The model's table gets its own tensor back. A buffer whose new tensor has another shape or
        type, or is not the recording's, stays replaced.

            the forward                  the graph
            old = self.count             old = get_attr(count).clone()
            self.count = old + 1         get_attr(count).copy_((old + 1).detach())
            return x * old               x * old

        All reads come from a copy, since in the forward they kept the old tensor.
        """
        writes = [
            self._write(slot, slot.table[slot.key]) for slot in self._slots if self._can_write(slot)
        ]
        for read, write in writes:
            readers = [user for user in read.users if user is not write]
            if readers:
                with self.graph.inserting_after(read):
                    copy = self.create("call_method", "clone", (read,), {})
                read.replace_all_uses_with(copy, readers.__contains__)

    def _can_write(self, slot: _BufferSlot) -> bool:
        """Return whether a slot holds a new tensor that can be copied to the buffer."""
        new = slot.table.get(slot.key)
        if new is slot.tensor or not isinstance(new, Tensor):
            return False
        is_recorded = id(new) in self._nodes or id(new) in self._names
        # Other holders of a tied buffer would see a write, but the forward replaced it in one only.
        is_tied = sum(other.tensor is slot.tensor for other in self._slots) > 1
        is_alike = (new.shape, new.dtype) == (slot.tensor.shape, slot.tensor.dtype)
        return is_recorded and not is_tied and is_alike

    def _write(self, slot: _BufferSlot, new: Tensor) -> tuple[fx.Node, fx.Node]:
        """Record the write of `new`; return the nodes that read and write the buffer."""
        slot.table[slot.key] = slot.tensor
        # The buffer must not carry this step's autograd graph into the next step.
        value = self.create("call_method", "detach", (self.argument(new),), {})
        read = self._read(slot.name, slot.tensor)
        write = self.create("call_method", "copy_", (read, value), {})
        write.meta["mutates"] = True
        return read, write


@dataclass(frozen=True)
class _BufferSlot:
    """Where a module keeps a buffer: the entry `key` of `table`, which holds the fake `tensor`."""

    table: dict[str, Tensor]
    key: str
    name: str
    tensor: Tensor
