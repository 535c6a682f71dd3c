"""A captured module: an fx graph whose batch size stays open, and how it is instantiated for one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.data_probe import hear
from pipecompile.frontend.guards import Guards
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.signature import Arguments, Inputs, Outputs
from pipecompile.frontend.tape import Symbolic
from pipecompile.graph.propagation import named_state, propagate
from pipecompile.graph.storages import storage_key

__all__ = ["Capture", "Note", "aliases_of", "batch_size", "eliminate_dead_code"]


@dataclass(frozen=True)
class Note:
    """Something to know about a capture, and the line of the model that it is about, if there is one."""

    text: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.line})" if self.line else self.text


@dataclass(frozen=True)
class Capture:
    """A module as a graph. Sizes in it are symbolic in the batch: `instantiate` makes it runnable.

    `aliases` maps each parameter's and buffer's first name to its other names. `method` is how it was captured,
    `notes` say what is special about it: modules that became one node, attributes that are no longer set. `training`
    tells by path in which mode each module was, `sets` are the attributes that the forward sets for itself, and `again`
    captures the same model for another call.
    """

    model: nn.Module
    graph: fx.Graph
    constants: dict[str, Tensor]
    inputs: Inputs
    outputs: Outputs
    aliases: dict[str, tuple[str, ...]]
    guards: Guards
    method: str
    notes: tuple[Note, ...]
    training: dict[str, bool]
    sets: frozenset[str]
    again: Callable[[Arguments], Capture]

    @property
    def first_names(self) -> dict[str, str]:
        """Every name of every parameter and buffer → the first name of the same tensor."""
        return {name: first for first, others in self.aliases.items() for name in (first, *others)}

    def instantiate(self, call: Arguments) -> fx.GraphModule:
        """The graph for the batch size of `call`: no symbolic sizes, fake values on every node.

        It shares the parameters and leaf modules of the model, under their original names. Where the model takes
        other branches at this size than those that were recorded, it is captured again.
        """
        tensors = self.inputs.flatten(call)
        batch = batch_size(tensors)
        self._check_modes()
        if self.guards.broken(batch):
            return self._other(call).instantiate(call)
        graph = _substituted(self.graph, self.guards.symbol, batch)
        self._answer(graph, call)
        module = fx.GraphModule(self._attributes(), graph)
        module.training = (
            self.model.training
        )  # of this module alone: the rest are the model's own, each in its mode
        try:
            propagate(module, tensors)
        except Exception as error:
            reason = str(error).split("\n")[0]
            raise UnsupportedError(
                f"the graph cannot run on fake tensors: {type(error).__name__}: {reason}"
            ) from error
        self._refuse_foreign_writes(module)
        return module

    def _other(self, call: Arguments) -> Capture:
        other = self.again(call)
        if not other.outputs.alike(self.outputs):
            raise CaptureError(
                f"at batch {other.guards.batch} the model returns another structure, or other constants in it, than at "
                f"{self.guards.batch}, where it was captured; return the same, or capture it there"
            )
        return other

    def _check_modes(self) -> None:
        for path, module in self.model.named_modules():
            if module.training != self.training[path]:
                raise CaptureError(
                    f"{path or type(self.model).__name__} was captured in {'train' if self.training[path] else 'eval'} "
                    "mode, which is part of the graph; capture the model again after .train() or .eval()"
                )

    def _answer(self, graph: fx.Graph, call: Arguments) -> None:
        """Gives the modules that ask data the answers of a run on `call`, for whenever they run on fake tensors."""
        asking = [node for node in graph.nodes if node.meta.get("number") is not None]
        heard = hear(self.model, call) if asking else {}
        for node in asking:
            node.meta["answers"] = heard[str(node.target), node.meta["number"]]

    def _refuse_foreign_writes(self, module: fx.GraphModule) -> None:
        """CaptureError if the forward writes to its inputs, or to tensors that the model does not own as buffers."""
        foreign = {
            storage_key(node.meta["val"]): f"its input {node.name}"
            if node.op == "placeholder"
            else "a tensor attribute"
            for node in module.graph.nodes
            if node.op == "placeholder" or (node.op == "get_attr" and node.target in self.constants)
        }
        for node in module.graph.nodes:
            for key in {storage_key(tensor) for tensor in node.meta["mutates"]} & foreign.keys():
                where = (
                    f"{node.meta['module'] or type(self.model).__name__} ({node.meta['source']})"
                )
                raise CaptureError(
                    f"{where}: the forward writes to {foreign[key]} in place; write to a copy, or make it a buffer "
                    "with register_buffer"
                )

    def _attributes(self) -> dict[str, Any]:
        """Everything that the graph names: modules, parameters, buffers, constants."""
        targets = {
            str(node.target) for node in self.graph.nodes if node.op in ("call_module", "get_attr")
        }
        return {
            t: self.constants[t] if t in self.constants else operator.attrgetter(t)(self.model)
            for t in targets
        }


def batch_size(tensors: Sequence[Tensor]) -> int:
    """Dimension 0 of all tensors that have one; InputError if they disagree."""
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InputError(
            f"dimension 0 of every input is the batch, but the inputs have shapes {shapes or 'none'}"
        )
    return sizes.pop()


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Per parameter and buffer: its first name → the other names of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in named_state(model):
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return {name: tuple(rest[1:]) for name, rest in names.items()}


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Drops nodes that nobody reads and that do nothing else; random ones stay, so that others draw the same."""
    for node in reversed(list(graph.nodes)):
        impure = (
            node.meta["random"]
            or node.meta["mutates"]
            or node.meta.get("hook")
            or node.meta.get("kept")
        )
        if not node.users and not impure and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def _substituted(graph: fx.Graph, symbol: sympy.Symbol | None, batch: int) -> fx.Graph:
    """A copy of `graph` in which every symbolic number has its value at this batch size."""
    values = {} if symbol is None else {symbol: sympy.Integer(batch)}

    def concrete(argument: Any) -> Any:
        return argument.at(values) if isinstance(argument, Symbolic) else argument

    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = copies[node] = copy.node_copy(node, copies.__getitem__)
        new.args = map_aggregate(new.args, concrete)
        new.kwargs = map_aggregate(new.kwargs, concrete)
    return copy
