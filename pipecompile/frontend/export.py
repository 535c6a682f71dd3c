"""The last way to capture a module: torch.export, for one batch size."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipecompile.errors import CaptureError
from pipecompile.frontend.captured_graph import Capture, Note, aliases_of, batch_size
from pipecompile.frontend.guards import Guards
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.signature import Arguments, Inputs, Outputs
from pipecompile.frontend.source import is_users, place
from pipecompile.frontend.torch_patches import applied_by, known_saving, quiet, seeded_by_torch
from pipecompile.graph.attributes import Attributes
from pipecompile.graph.data_answers import asks
from pipecompile.graph.propagation import distinct, named_state

__all__ = ["exported"]

LEVELS = (
    "torch._functorch.predispatch"  # where calls that enter and leave a level of torch.func lie
)


@torch.enable_grad()
def exported(model: nn.Module, call: Arguments, again: Callable[[Arguments], Capture]) -> Capture:
    """`model` as torch.export (non-strict, all sizes fixed) sees it: a graph of aten operators, in the mode it is in.

    UnsupportedError where it fails, and where it is known to be silently wrong: custom autograd functions, whose own
    backward it drops, and regions that it turns into graphs of their own.
    """
    inputs = Inputs.of(model, call)
    sample = inputs.unflatten(
        list(distinct(inputs.flatten(call)))
    )  # torch.export makes one input of the same tensor
    try:
        with (
            quiet(),
            _stateless(model),
            seeded_by_torch(),
            known_saving(),
            applied_by(_refuse),
            _no_hooks(),
        ):
            program = torch.export.export(model, sample.args, sample.kwargs, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedError(f"torch.export: {type(error).__name__}: {reason}") from error
    module, batch = _flat(program), batch_size(inputs.flatten(call))
    graph, aliases = _graph(module, inputs), aliases_of(model)
    return Capture(
        model=model,
        graph=graph,
        constants=_constants(module, graph, known=[name for name, _ in named_state(model)]),
        inputs=inputs,
        outputs=_outputs(graph, program.call_spec.out_spec),
        aliases=aliases,
        guards=Guards(batch, None),
        method="torch.export",
        notes=(
            Note(
                f"a graph of aten operators for batches of {batch} alone: the forward could not be recorded"
            ),
        ),
        sets=frozenset(),
        training={path: part.training for path, part in model.named_modules()},
        again=again,
    )


def _refuse(apply: Any, function: Any, args: Any, kwargs: Any) -> None:
    raise CaptureError(
        f"{function.__qualname__} is a custom autograd function, whose backward torch.export would drop; write the "
        "model so that it can be recorded (no torch.func transforms, no code that torch cannot see)"
    )


@contextmanager
def _stateless(model: nn.Module) -> Iterator[None]:
    """CaptureError if the block sets attributes of modules, which torch.export takes for constants."""
    changed: list[tuple[nn.Module, str]] = []

    def look(*_: Any) -> None:
        changed.extend(before.changed(Attributes.of(model)))

    # After the block torch.export has put attributes back itself, so we look when the forward ends.
    hook = model.register_forward_hook(look)
    before = Attributes.of(model)
    try:
        yield
    finally:
        before.restore()
        hook.remove()
    if changed:
        module, name = changed[0]
        path = next(path for path, other in model.named_modules() if other is module)
        raise CaptureError(
            f"{path}.{name}".lstrip(".")
            + " is set by the forward, which could not be recorded; torch.export would take it "
            "for a constant: keep such state in buffers"
        )


@contextmanager
def _no_hooks() -> Iterator[None]:
    """CaptureError where the block hooks a tensor, which torch.export would drop."""
    register = Tensor.register_hook

    def refuse(tensor: Tensor, hook: Any) -> None:
        raise CaptureError(
            "a hook on a tensor is dropped by torch.export, and the forward could not be recorded; see why"
        )

    Tensor.register_hook = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = register  # type: ignore[method-assign]


def _flat(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The program as one graph; levels of torch.func are calls without an order between them until decomposed."""
    if any(isinstance(part, fx.GraphModule) for part in program.graph_module.children()):
        raise UnsupportedError(
            "torch.export makes graphs of their own of regions in the forward, which cannot be cut"
        )
    if any(getattr(node.target, "__module__", "") == LEVELS for node in program.graph.nodes):
        program = program.run_decompositions({})
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def _graph(module: fx.GraphModule, inputs: Inputs) -> fx.Graph:
    """The graph of `module` with our names of inputs and our notes on nodes."""
    graph = fx.Graph()
    names = iter(inputs.tensor_names)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    ordered = [*placeholders, *(node for node in module.graph.nodes if node.op != "placeholder")]
    copies: dict[fx.Node, fx.Node] = {}
    for node in ordered:
        if node.op == "get_attr" and not node.users:
            continue
        new = (
            graph.placeholder(next(names))
            if node.op == "placeholder"
            else graph.node_copy(node, copies.__getitem__)
        )
        stack = list(node.meta.get("nn_module_stack", {}).values())
        new.meta = {
            "module": stack[-1][0] if stack else "",
            "source": _line(node.meta.get("stack_trace") or ""),
            "ambient": None,
            "random": torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()),
            "mutates": _writes(node.target),
        }
        copies[node] = new
    return graph


def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _line(stack: str) -> str:
    """`file:line` of the last frame of a printed stack that is the model's."""
    frames = re.findall(r'File "(.*)", line (\d+)', stack)
    users = [place(file, int(line)) for file, line in frames if is_users(file)]
    return users[-1] if users else ""


def _constants(module: fx.GraphModule, graph: fx.Graph, known: Iterable[str]) -> dict[str, Tensor]:
    """The tensors that the graph reads and the model does not own."""
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"} - set(known)
    found = {name: operator.attrgetter(name)(module) for name in sorted(read)}
    asking = [node for node in graph.nodes if asks(node.target)]
    if asking:
        raise UnsupportedError(
            f"torch.export leaves {asking[0].target} in the graph, which asks for data"
        )
    return found


def _outputs(graph: fx.Graph, spec: pytree.TreeSpec) -> Outputs:
    """Makes the graph's outputs its tensors alone; returns the shape of the model's result."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    leaves = output.args[0]
    is_tensor = tuple(isinstance(leaf, fx.Node) for leaf in leaves)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node))
    output.args = (tensors,)
    constants = tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    return Outputs(spec, is_tensor, constants, tuple(False for _ in tensors))
