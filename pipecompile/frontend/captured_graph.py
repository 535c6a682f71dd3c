"""A captured module: an fx graph whose batch size is open, to be instantiated for one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pipecompile.errors import CaptureError, reason_of
from pipecompile.frontend.assigned_value import AssignedValue, PlacedValue
from pipecompile.frontend.attribute_reads import ALL, is_own
from pipecompile.frontend.batch_dims import output_dim
from pipecompile.frontend.caches import fakes_out_of_caches
from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.constant_answers import ConstantAnswer
from pipecompile.frontend.data_probe import probe_data
from pipecompile.frontend.found_names import FIRST_NAMES, FoundNames
from pipecompile.frontend.guards import Guards, ValueRead
from pipecompile.frontend.kept_state import hooks_of_user, mark_once
from pipecompile.frontend.known_reads import KnownReads
from pipecompile.frontend.library_reads import LibraryReads
from pipecompile.frontend.outside_values import OutsideValues
from pipecompile.frontend.recording import SymbolicNumber
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.signature import Arguments, InputStructure, OutputStructure
from pipecompile.frontend.unfit_models import refuse_names_of_graphs
from pipecompile.graph.attributes import INTERNAL, attributes_restored
from pipecompile.graph.data_answers import OtherPathError
from pipecompile.graph.model_state import named_state
from pipecompile.graph.propagation import propagate
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import is_irregular, layout_name, storage_key
from pipecompile.passes.buffer_versions import KeepVersions
from pipecompile.passes.contract import apply_passes

__all__ = [
    "KEYS_IN_ORDER",
    "Capture",
    "CaptureNote",
    "aliases_of",
    "eliminate_dead_code",
    "substituted",
]

KEYS_IN_ORDER = ", keys in order"
"""Ends the method of a capture whose forward goes by the order of keys in its arguments."""


@dataclass(frozen=True)
class CaptureNote:
    """A remark about a capture, and the line of the model that it is about, if there is one."""

    text: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.line})" if self.line else self.text


@dataclass(frozen=True)
class Capture:
    """A module as a graph; sizes in it are symbolic in the batch size.

    `constants` are the tensors, by name, that the graph reads and the model does not own. `aliases`
    maps the first name of each parameter and buffer to its other names. `method` tells how the
    model was captured; `notes` tell what is special about it: modules that became one node, and
    attributes that are no longer set. `training` tells, by path, in which mode each module was.
    `assigned_attributes` are the attributes that the forward sets for itself, by path and name,
    with what they were before it and what it left, `left_hooks` the code
    of the hooks that it installs, by path and table, and `read_attributes`
    those that it reads, by path and name, and those of objects in attributes; None if that is not
    known; `library_reads` are what it reads of objects of installed packages. `taken_apart` are the
    paths of the modules that it was recorded inside, `data_dependent` those of the modules that are
    one node since they ask for values of tensors. `recapture`
    captures the same model for another call. `asks_layout` is where the forward asks how a tensor
    lies in memory, "" if it does not: then inputs may lie in any way. `value_reads` are tensors
    whose values are numbers in the graph, and `constant_answers` what was read out of tensors that
    are computed from sizes, or from inputs of whole numbers. `masks_nothing` tells of each input
    whether it may have been a mask that masks nothing. `keeps_state` says that code of the user
    computes with what it keeps of earlier microbatches, so that it may not be recomputed.
    """

    model: nn.Module
    graph: fx.Graph
    constants: dict[str, Tensor]
    inputs: InputStructure
    outputs: OutputStructure
    aliases: dict[str, tuple[str, ...]]
    guards: Guards
    method: str
    notes: tuple[CaptureNote, ...]
    training: dict[str, bool]
    assigned_attributes: Mapping[tuple[str, str], AssignedValue]
    read_attributes: frozenset[tuple[str, str]] | None
    taken_apart: frozenset[str]
    data_dependent: frozenset[str]
    recapture: Callable[[Arguments], Capture]
    library_reads: LibraryReads = field(default_factory=LibraryReads)
    asks_layout: str = ""
    left_hooks: Mapping[tuple[str, str], frozenset[Any]] = field(default_factory=dict)
    value_reads: tuple[ValueRead, ...] = ()
    constant_answers: tuple[ConstantAnswer, ...] = ()
    masks_nothing: tuple[bool, ...] = ()
    keeps_state: bool = False
    # By what is known to be read: the names in the code that the forward may run.
    _found_names: dict[Any, FoundNames] = field(default_factory=dict, repr=False, compare=False)

    @property
    def first_names(self) -> dict[str, str]:
        """Every name of every parameter and buffer, mapped to the first name of the tensor."""
        return {name: first for first, others in self.aliases.items() for name in (first, *others)}

    def may_read(self, path: str, name: str) -> bool:
        """Return whether the graph may have in it what the attribute `name` of the module at `path`
        was before the forward.
        """
        assigned = self.assigned_attributes.get((path, name))
        if assigned is not None:
            # What it reads itself in each step is in no graph.
            is_read_first = assigned.is_read_first or self.read_attributes is None
            return is_read_first and not self.runs_itself(path)
        return self.read_attributes is None or self._has_read(path, name)

    def must_stay(self, path: str, name: str) -> bool:
        """Return whether the graph may have an attribute in it that no forward changes."""
        return (path, name) not in self.assigned_attributes and self.may_read(path, name)

    def set_names(self) -> Iterator[tuple[str, str]]:
        """Yield the attributes that the forward sets, by the paths of their modules and names."""
        # Tables, such as those of hooks, are no values of the user's.
        yield from (place for place in self.assigned_attributes if place[1] not in INTERNAL)

    def assigned_values(self) -> Iterator[PlacedValue]:
        """Yield the attributes that the forward may read before it sets them."""
        for (path, name), value in self.assigned_attributes.items():
            # Tables, such as those of hooks, are compared whatever the forward does.
            if name not in INTERNAL and self.may_read(path, name):
                attributes = vars(self.model.get_submodule(path))
                yield PlacedValue(f"{path}.{name}".lstrip("."), attributes, name, value)

    def runs_itself(self, path: str) -> bool:
        """Return whether the module at `path` is never taken apart: as one node, or in one, it runs
        in each step, with its hooks.
        """
        return path not in self.taken_apart

    def _has_read(self, path: str, name: str) -> bool:
        """Return whether the forward has read an attribute of the module or object at `path`."""
        read = self.read_attributes or frozenset()
        return (path, name) in read or (path, ALL) in read

    def _has_noted(self, kind: type) -> bool:
        """Return whether it is known what the forward reads of objects of a class."""
        return self.read_attributes is not None and is_own(kind)

    def outside_values(self) -> OutsideValues:
        """Return what the forward may read now, besides what its modules hold themselves."""
        known = KnownReads(
            self.may_read, self.must_stay, self._has_read, self.runs_itself, self._has_noted
        )
        # The same search as after the proof finds the same names, which takes many passes.
        names = self._found_names.get(self.read_attributes, FIRST_NAMES)
        values = OutsideValues(self.model, known, names, self.library_reads.values())
        self._found_names[self.read_attributes] = values.found_names
        return values

    def with_keys_in_order(self) -> Capture:
        """Return the capture for arguments with their keys in the order of these."""
        inputs = replace(self.inputs, is_ordered=True)
        return replace(self, inputs=inputs, method=self.method + KEYS_IN_ORDER)

    def instantiate(self, call: Arguments) -> fx.GraphModule:
        """Return the graph for the batch size of `call`.

        It has no symbolic sizes and a fake value on every node. It shares the parameters and leaf
        modules of the model, under their original names. If the model takes other branches at this
        size than those that were recorded, it is captured again.

        UnsupportedError if the graph cannot run on fake tensors, CaptureError if the forward writes
        to what the model does not own or a module has changed between training and evaluation.
        """
        tensors = self.inputs.flatten(call)
        batch = self.inputs.batch_size(tensors)
        self._check_modes()
        # The graph may be wrong here: the forward would have taken another branch.
        if not self.holds_for(call):
            return self.recaptured(call).instantiate(call)
        symbol = self.guards.symbol
        graph = substituted(self.graph, {} if symbol is None else {symbol: sympy.Integer(batch)})
        self._set_answers(graph, call)
        # Of a dict fx puts each object under its path as it is: parameters are the model's own,
        # under their own names. (torch's `split_module` would rename them.)
        module = fx.GraphModule(self._attributes(), graph)
        # The mode of this module itself; the modules in it are the model's, each in its own mode.
        module.training = self.model.training
        # Also as they were recorded: torch fails on some of them where sizes are numbers.
        _refuse_irregular_values(module.graph)
        self._propagate(module, tensors)
        _refuse_irregular_values(module.graph)
        self._refuse_foreign_writes(module)
        nodes = len(module.graph.nodes)
        # After the fake run, which tells what writes to what; and then once more, since copies
        # that it adds need values as well.
        apply_passes(module.graph, [KeepVersions()])
        if len(module.graph.nodes) > nodes:
            module.recompile()
            self._propagate(module, tensors)
        if self.keeps_state:
            mark_once(module)
        return module

    def _propagate(self, module: fx.GraphModule, tensors: Sequence[Tensor]) -> None:
        """Put fake values on the nodes; what hooks of leaf modules do with them is undone."""
        kept = callable_restored(*hooks_of_user(self.model))
        with attributes_restored(self.model), kept, fakes_out_of_caches():
            _propagate(module, tensors)

    def holds_for(self, call: Arguments) -> bool:
        """Return whether the forward takes the branches that were recorded, for all that is known
        of `call`.
        """
        tensors = self.inputs.flatten(call)
        is_other = self.guards.violation(self.inputs.batch_size(tensors)) is not None
        return not is_other and self.other_answer(tensors) is None

    def output_dims(self, values: Sequence[Tensor]) -> Sequence[int | None]:
        """Return where the output tensors of one microbatch have the batch, see `output_dim`."""
        if not self.guards.is_fixed:
            return self.outputs.batch_dims
        # A graph for one size has no symbol that would tell which dimensions grow with it.
        dims, batch = self.inputs.batch_dims, self.guards.batch
        return [output_dim(value, dims, batch) for value in values]

    def recaptured(self, call: Arguments) -> Capture:
        """Return a capture for `call`; CaptureError if it returns another structure."""
        other = self.recapture(call)
        if not other.outputs.is_like(self.outputs):
            raise CaptureError(
                f"at batch {other.guards.batch} the model returns another structure, or other "
                f"constants in it, than at {self.guards.batch}, where it was captured; return the "
                "same, or capture it there"
            )
        return replace(other, keeps_state=self.keeps_state)

    def other_answer(self, tensors: Sequence[Tensor]) -> ConstantAnswer | None:
        """Return an answer that would differ for these inputs; None if all stay the same."""
        batch = self.inputs.batch_size(tensors)
        sizes = {} if self.guards.symbol is None else {self.guards.symbol: sympy.Integer(batch)}
        inputs = dict(zip(self.inputs.tensor_names, tensors, strict=True))
        for answer in self.constant_answers:
            # At the size that was recorded an answer out of sizes alone is what it was.
            may_differ = batch != self.guards.batch or answer.inputs
            if may_differ and not answer.holds(sizes, inputs):
                return answer
        return None

    def _check_modes(self) -> None:
        for path, module in self.model.named_modules():
            if module.training != self.training[path]:
                mode = "train" if self.training[path] else "eval"
                raise CaptureError(
                    f"{path or type(self.model).__name__} was captured in {mode} mode, which is "
                    "part of the graph; capture the model again after .train() or .eval()"
                )

    def _set_answers(self, graph: fx.Graph, call: Arguments) -> None:
        """Give data-dependent modules the answers of a run on `call`, for their fake runs."""
        nodes = [node for node in graph.nodes if node.meta.get("call_number") is not None]
        # A probe runs the whole model on real tensors, so it is left out if no node needs it.
        answers = probe_data(self.model, call) if nodes else {}
        for node in nodes:
            node.meta["data_answers"] = answers[str(node.target), node.meta["call_number"]]
            node.meta["asks_layout"] = bool(self.asks_layout)

    def _refuse_foreign_writes(self, module: fx.GraphModule) -> None:
        """Raise CaptureError if the forward writes to its inputs, to parameters, or to tensors that
        are no buffers.

        Stages would each write to a copy of their own, and a write to a parameter comes before
        backwards that need it as it was. Modules of torch.nn that write to their own parameters, as
        `Embedding(max_norm=…)` does, know what their backward needs.
        """
        foreign: dict[int, str] = {}
        parameters: dict[int, str] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                foreign[storage_key(node.meta["val"])] = f"its input {node.name}"
            elif node.op == "get_attr" and node.target in self.constants:
                foreign[storage_key(node.meta["val"])] = "a tensor attribute"
            elif node.op == "get_attr" and _is_parameter(module, node):
                parameters[storage_key(node.meta["val"])] = str(node.target)
        for node in module.graph.nodes:
            # By storage, since a write to a view is one to what it is a view of: `x[0].add_(1)`
            # writes to x.
            written = {storage_key(tensor) for tensor in node.meta["mutates"]}
            for key in written & parameters.keys() if node.op != "call_module" else ():
                raise CaptureError(
                    f"{node.meta['module'] or type(self.model).__name__} ({node.meta['source']}): "
                    f"the forward writes to the parameter {parameters[key]} in place, while "
                    "microbatches that came before have their backwards to do; write to it after "
                    "the optimizer's step, or compute with a changed copy"
                )
            for key in written & foreign.keys():
                path = node.meta["module"] or type(self.model).__name__
                raise CaptureError(
                    f"{path} ({node.meta['source']}): the forward writes to {foreign[key]} in "
                    "place; write to a copy, or make it a buffer with register_buffer"
                )

    def _attributes(self) -> dict[str, Any]:
        """Return all that the graph names: modules, parameters, buffers and constants.

        CaptureError if modules of graphs have an attribute of such a name themselves.
        """
        attributes: dict[str, Any] = {}
        for node in self.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                name = str(node.target)
                is_constant = name in self.constants
                attributes[name] = (
                    self.constants[name] if is_constant else operator.attrgetter(name)(self.model)
                )
        refuse_names_of_graphs(attributes)
        return attributes


def _is_parameter(module: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(operator.attrgetter(str(node.target))(module), nn.Parameter)


def _propagate(module: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    try:
        propagate(module, inputs)
    except OtherPathError as error:
        raise UnsupportedError(str(error)) from error
    except Exception as error:
        reason = reason_of(error)
        raise UnsupportedError(
            f"the graph cannot run on fake tensors: {type(error).__name__}: {reason}"
        ) from error


def _refuse_irregular_values(graph: fx.Graph) -> None:
    """Raise UnsupportedError if a node gives a sparse or nested tensor."""
    for node in graph.nodes:
        for value in filter(is_irregular, tensor_leaves(node.meta.get("val"))):
            where = f"{node.meta['module'] or 'the forward'} ({node.meta['source']})"
            raise UnsupportedError(
                f"{where}: {node.name} is {layout_name(value)}, whose bytes no plan counts and no "
                "stage sends; compute with dense tensors (to_dense, to_padded_tensor)"
            )


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, by the first name of each parameter and buffer, the other names of the tensor."""
    first_names: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in named_state(model):
        first = first_names.setdefault(id(tensor), name)
        names.setdefault(first, []).append(name)
    return {first: tuple(same[1:]) for first, same in names.items()}


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase nodes that no node reads and that have no side effect.

    Random nodes are kept even if no node reads them, so that the nodes after them draw the same
    numbers as in the model.
    """
    # Backwards, so that the sources of an erased node become unread in turn.
    for node in reversed(list(graph.nodes)):
        has_side_effect = (
            node.meta["random"]
            or node.meta["mutates"]
            or node.meta.get("hook")
            or node.meta.get("has_effect")
        )
        if not node.users and not has_side_effect and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def substituted(graph: fx.Graph, values: dict[sympy.Symbol, sympy.Integer]) -> fx.Graph:
    """Return a copy of `graph` with these values of symbols in its arguments."""

    # `x.view(s0, 8)` of a recording is `x.view(4, 8)` at a batch of 4.
    def concrete(argument: Any) -> Any:
        return argument.with_sizes(values) if isinstance(argument, SymbolicNumber) else argument

    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = copies[node] = copy.node_copy(node, copies.__getitem__)
        new.args = map_aggregate(new.args, concrete)
        new.kwargs = map_aggregate(new.kwargs, concrete)
    return copy
