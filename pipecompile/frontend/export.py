"""torch.export as the last way to capture a module: for one batch size, as aten operators."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    pop_dynamic_layer_stack_and_undo_to_depth,
)
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree

from pipecompile.errors import CaptureError, reason_of
from pipecompile.frontend.captured_graph import Capture, CaptureNote, aliases_of
from pipecompile.frontend.guards import Guards
from pipecompile.frontend.randomness import require_torch_randomness
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.signature import Arguments, InputStructure, OutputStructure
from pipecompile.frontend.source import is_user_file, line_text
from pipecompile.frontend.torch_patches import (
    redirect_autograd_functions,
    refuse_own_saving_hooks,
    silence_torch,
)
from pipecompile.graph.attributes import ModuleAttributes
from pipecompile.graph.data_answers import is_data_dependent
from pipecompile.graph.hook_frames import forward_hooks, hook_name
from pipecompile.graph.model_state import distinct_tensors, named_state
from pipecompile.ir.plurals import counted

__all__ = ["export_capture"]

# The module of the calls that enter and leave a level of torch.func.
FUNCTIONAL_LEVELS = "torch._functorch.predispatch"


@contextmanager
def _functional_levels_closed() -> Iterator[None]:
    """Close the levels of torch.func that are open after the block: torch.export leaves some where
    it fails within a transform, and then all that follows in the process fails.
    """
    depth = get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        pop_dynamic_layer_stack_and_undo_to_depth(depth)


@_functional_levels_closed()
@torch.enable_grad()
def export_capture(
    model: nn.Module, call: Arguments, recapture: Callable[[Arguments], Capture]
) -> Capture:
    """Return `model` as torch.export sees it, in the mode that it is in: non-strict, sizes fixed.

    UnsupportedError if torch.export fails, CaptureError if its result is known to be silently
    wrong: it drops the backward of custom autograd functions and hooks on tensors, takes attributes
    that the forward sets for constants, and makes graphs of their own of some regions.
    """
    _refuse_hooks(model)
    inputs = InputStructure.of(model, call)
    tensors = inputs.flatten(call)
    # Each input gets a fake of its own, also where two are one tensor.
    program = _exported_program(model, inputs.unflatten(list(distinct_tensors(tensors))))
    with _failing_as_unsupported():
        module = _flat_module(program)
    batch = inputs.batch_size(tensors)
    graph = _annotated_graph(module, inputs)
    return Capture(
        model=model,
        graph=graph,
        constants=_constants(module, graph, known=[name for name, _ in named_state(model)]),
        inputs=inputs,
        outputs=_take_outputs(graph, program.call_spec.out_spec),
        aliases=aliases_of(model),
        guards=Guards(batch, None),
        method="torch.export",
        notes=(
            CaptureNote(
                f"a graph of aten operators for microbatches of {counted(batch, 'sample')} alone: "
                "the forward could not be recorded"
            ),
        ),
        assigned_attributes={},
        read_attributes=None,
        data_dependent=frozenset(),
        taken_apart=frozenset(path for path, _ in model.named_modules()),
        training={path: part.training for path, part in model.named_modules()},
        recapture=recapture,
        asks_layout="operators of torch.export",
    )


def _refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError if modules have hooks: of them an export keeps the operators alone, and no
    step would run them.
    """
    of_all = (*_global_forward_pre_hooks.values(), *_global_forward_hooks.values())
    hooks = [("all modules", hook) for hook in of_all]
    for path, part in model.named_modules():
        backward = (*part._backward_pre_hooks.values(), *part._backward_hooks.values())
        own = (*forward_hooks(part), *backward)
        hooks += [(path or type(model).__name__, hook) for hook in own]
    for where, hook in hooks:
        raise CaptureError(
            f"{where}: the hook {hook_name(hook)} would run in no step, since torch.export keeps "
            "the operators in it alone; remove it, or make the part that could not be recorded "
            "one that can, see why"
        )


def _exported_program(model: nn.Module, sample: Arguments) -> torch.export.ExportedProgram:
    """Export `model`, with all that torch.export would drop or freeze refused."""
    with (
        _failing_as_unsupported(),
        silence_torch(),
        _refuse_assignments(model),
        require_torch_randomness(model),
        refuse_own_saving_hooks(),
        redirect_autograd_functions(_refuse_autograd_function),
        _refuse_tensor_hooks(),
    ):
        return torch.export.export(model, sample.args, sample.kwargs, strict=False)


@contextmanager
def _failing_as_unsupported() -> Iterator[None]:
    """Raise UnsupportedError in one line for what torch raises in the block."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        reason = reason_of(error)
        raise UnsupportedError(f"torch.export: {type(error).__name__}: {reason}") from error


def _refuse_autograd_function(apply: Any, function: Any, args: Any, kwargs: Any) -> None:
    raise CaptureError(
        f"{function.__qualname__} is a custom autograd function, whose backward torch.export would "
        "drop; write the model so that it can be recorded (no torch.func transforms, no code that "
        "torch cannot see)"
    )


@contextmanager
def _refuse_assignments(model: nn.Module) -> Iterator[None]:
    """Raise CaptureError if the block sets attributes of modules: torch.export freezes them."""
    changed: list[tuple[nn.Module, str]] = []

    def note_changes(*_: Any) -> None:
        changed.extend(before.changed(ModuleAttributes.of(model)))

    # torch.export restores attributes itself, so changes are noted when the forward ends.
    hook = model.register_forward_hook(note_changes)
    # After the hook is registered, so that it is in the state that is compared.
    before = ModuleAttributes.of(model)
    try:
        yield
    finally:
        before.restore()
        hook.remove()
    if changed:
        module, name = changed[0]
        path = next(path for path, other in model.named_modules() if other is module)
        attribute = f"{path}.{name}".lstrip(".")
        raise CaptureError(
            f"{attribute} is set by the forward, which could not be recorded; torch.export would "
            "take it for a constant: keep such state in buffers"
        )


@contextmanager
def _refuse_tensor_hooks() -> Iterator[None]:
    """Raise CaptureError if the block registers a hook on a tensor: torch.export drops it."""
    register = Tensor.register_hook

    def refuse(tensor: Tensor, hook: Any) -> None:
        raise CaptureError(
            "a hook on a tensor is dropped by torch.export, and the forward could not be recorded; "
            "see why"
        )

    Tensor.register_hook = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = register  # type: ignore[method-assign]


def _flat_module(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """Return the program as one graph; UnsupportedError if it holds graphs of regions."""
    if any(isinstance(part, fx.GraphModule) for part in program.graph_module.children()):
        raise UnsupportedError(
            "torch.export makes graphs of their own of regions in the forward, which cannot be cut"
        )
    # Levels of torch.func are entered and left by calls that no data connects, so nothing would
    # keep their order. Decompositions remove them.
    modules = {getattr(node.target, "__module__", "") for node in program.graph.nodes}
    if FUNCTIONAL_LEVELS in modules:
        program = program.run_decompositions({})
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def _annotated_graph(module: fx.GraphModule, inputs: InputStructure) -> fx.Graph:
    """Return the graph of `module` with our names of inputs and our notes on nodes."""
    graph = fx.Graph()
    names = iter(inputs.tensor_names)
    # Our graphs begin with their inputs.
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    others = [node for node in module.graph.nodes if node.op != "placeholder"]
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*placeholders, *others):
        # The exported graph reads all parameters, unused ones included.
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
            "source": _model_line(node.meta.get("stack_trace") or ""),
            "autograd_context": None,
            "random": torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()),
            "mutates": _is_mutable(node.target),
        }
        copies[node] = new
    return graph


def _is_mutable(target: Any) -> bool:
    """Return whether an operator writes to an argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _model_line(stack: str) -> str:
    """Return `file:line` of the innermost frame of a printed stack that is the model's."""
    frames = re.findall(r'File "(.*)", line (\d+)', stack)
    lines = [line_text(file, int(line)) for file, line in frames if is_user_file(file)]
    return lines[-1] if lines else ""


def _constants(module: fx.GraphModule, graph: fx.Graph, known: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors that the graph reads and the model does not own.

    UnsupportedError if an operator of the graph reads data.
    """
    for node in graph.nodes:
        if is_data_dependent(node.target):
            raise UnsupportedError(
                f"torch.export leaves {node.target} in the graph, which depends on data"
            )
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"} - set(known)
    return {name: operator.attrgetter(name)(module) for name in sorted(read)}


def _take_outputs(graph: fx.Graph, spec: pytree.TreeSpec) -> OutputStructure:
    """Leave only tensors among the graph's outputs; return the structure of the model's result."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    leaves = output.args[0]
    is_tensor = tuple(isinstance(leaf, fx.Node) for leaf in leaves)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node))
    # Constants are put back by `OutputStructure.unflatten`; only tensors leave a stage.
    output.args = (tensors,)
    constants = tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    return OutputStructure(spec, is_tensor, constants, (None,) * len(tensors))
