"""Captures a module as an fx graph whose batch size stays open, and instantiates it for a batch size."""

from __future__ import annotations

import logging
import operator
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_aggregate

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.recorder import HIDDEN, Recorder, Symbolic
from pipecompile.frontend.signature import Arguments, Inputs, Outputs
from pipecompile.passes.group import storage_key
from pipecompile.passes.propagate import faked_state, named_state, propagate

__all__ = ["Capture", "batch_size", "capture"]


@dataclass(frozen=True)
class Capture:
    """A module as a graph. Sizes in it are symbolic in the batch: `instantiate` makes it runnable.

    `aliases` maps each parameter's and buffer's first name to its other names.
    """

    model: nn.Module
    graph: fx.Graph
    constants: dict[str, Tensor]
    inputs: Inputs
    outputs: Outputs
    aliases: dict[str, tuple[str, ...]]
    batch: int
    symbol: sympy.Symbol | None
    guards: tuple[tuple[sympy.Basic, str], ...]

    @property
    def first_names(self) -> dict[str, str]:
        """Every name of every parameter and buffer → the first name of the same tensor."""
        return {name: first for first, others in self.aliases.items() for name in (first, *others)}

    def check_batch(self, batch: int) -> None:
        """CaptureError unless the model takes, at this batch size, the branches that were recorded."""
        if self.symbol is None:
            if batch != self.batch:
                raise CaptureError(f"the capture is for batches of {self.batch}, not {batch}; capture it again")
            return
        for expression, place in self.guards:
            if expression.xreplace({self.symbol: sympy.Integer(batch)}) != sympy.true:
                raise CaptureError(
                    f"at batch {batch} the model takes another branch than at {self.batch}, where it was captured: "
                    f"{expression} does not hold ({place}); capture it with a batch of {batch}"
                )

    def instantiate(self, call: Arguments) -> fx.GraphModule:
        """The graph for the batch size of `call`: no symbolic sizes, fake values on every node.

        It shares the parameters and leaf modules of the model, under their original names.
        """
        tensors = self.inputs.flatten(call)
        batch = batch_size(tensors)
        self.check_batch(batch)
        module = fx.GraphModule(self._attributes(), _substituted(self.graph, self.symbol, batch))
        module.training = self.model.training  # of this module alone: the rest are the model's own, each in its mode
        propagate(module, tensors)
        self._refuse_foreign_writes(module)
        return module

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
                where = f"{node.meta['module'] or type(self.model).__name__} ({node.meta['source']})"
                raise CaptureError(
                    f"{where}: the forward writes to {foreign[key]} in place; write to a copy, or make it a buffer "
                    "with register_buffer"
                )

    def _attributes(self) -> dict[str, Any]:
        """Everything that the graph names: modules, parameters, buffers, constants."""
        targets = {str(node.target) for node in self.graph.nodes if node.op in ("call_module", "get_attr")}
        return {t: self.constants[t] if t in self.constants else operator.attrgetter(t)(self.model) for t in targets}


def batch_size(tensors: Sequence[Tensor]) -> int:
    """Dimension 0 of all tensors that have one; InputError if they disagree."""
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InputError(f"dimension 0 of every input is the batch, but the inputs have shapes {shapes or 'none'}")
    return sizes.pop()


def capture(model: nn.Module, call: Arguments) -> Capture:
    """Records one forward of `model` on fakes of `call`; the model and its state stay as they were.

    Raises CaptureError, naming the module and the line, where the forward depends on data or leaves torch.
    """
    inputs = Inputs.of(model, call)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    recorder = Recorder(model, mode, faked_state(model, mode))
    batch = batch_size(inputs.flatten(call))
    fakes = [_fake(tensor, mode) for tensor in inputs.flatten(call)]
    for name, fake in zip(inputs.tensor_names, fakes, strict=True):
        recorder.placeholder(name, fake)
    outputs = _record(recorder, model, inputs.unflatten(fakes))
    _eliminate_dead_code(recorder.graph)
    return Capture(
        model=model,
        graph=recorder.graph,
        constants=recorder.constants,
        inputs=inputs,
        outputs=outputs,
        aliases=aliases_of(model),
        batch=batch,
        symbol=_batch_symbol(fakes),
        guards=_guards(mode.shape_env),
    )


def _record(recorder: Recorder, model: nn.Module, call: Arguments) -> Outputs:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it would print a stack trace above our one line
    try:
        with recorder.recording():
            outputs, tensors = Outputs.of(model(*call.args, **call.kwargs))
            recorder.output(tensors)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_explained(recorder, model, error)) from error
    finally:
        logger.setLevel(level)
    return outputs


def _explained(recorder: Recorder, model: nn.Module, error: Exception) -> str:
    """One line: where in the model, at which line, what happened, and what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{f.filename}:{f.lineno}" for f in frames if not f.filename.startswith(HIDDEN)]
    where = f"{recorder.failed_in or type(model).__name__} ({lines[-1] if lines else 'unknown line'})"
    reason = str(error).strip().split("\n")[0]
    if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
        return (
            f"{where}: the forward branches on the values of a tensor, so one graph cannot stand for it; "
            f"write the branch with torch.where, or decide it outside the model ({reason})"
        )
    return f"{where}: the forward cannot run on fake tensors: {type(error).__name__}: {reason}"


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake of `tensor` whose dimension 0 is the batch symbol."""
    if not tensor.dim():
        return mode.from_tensor(tensor, static_shapes=True)
    if tensor._is_view():  # the fake of a view is a view of a fake, which would bring its own symbols
        tensor = tensor.clone()
    sizes = [DimDynamic.DUCK] + [DimDynamic.STATIC] * (tensor.dim() - 1)
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _batch_symbol(fakes: Sequence[Tensor]) -> sympy.Symbol | None:
    """The symbol of the batch, or None where the model or the size (0, 1) made it a constant."""
    for fake in fakes:
        size = fake.shape[0] if fake.dim() else 0
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            return size.node.expr
    return None


def _guards(environment: ShapeEnv | None) -> tuple[tuple[sympy.Basic, str], ...]:
    """What was assumed of the batch: the branches taken, and the range of its symbol (torch assumes two or more)."""
    assert environment is not None
    branches = [(guard.expr, _place(guard.sloc)) for guard in environment.guards]
    ranges = [
        (sympy.Ge(symbol, interval.lower), "torch treats batches of 0 and 1 apart")
        for symbol, interval in environment.var_to_range.items()
    ]
    return (*branches, *ranges)


def _place(location: Any) -> str:
    """Where a guard comes from, in the user's code."""
    user = getattr(location, "user_stack", None)
    frames = [f for f in user or () if not f.filename.startswith(HIDDEN)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else str(location).split("\n")[0]


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Per parameter and buffer: its first name → the other names of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in named_state(model):
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return {name: tuple(rest[1:]) for name, rest in names.items()}


def _eliminate_dead_code(graph: fx.Graph) -> None:
    """Drops nodes that nobody reads; random ones stay, so that the others draw the same numbers."""
    for node in reversed(list(graph.nodes)):
        impure = node.meta["random"] or node.meta["mutates"]
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
