"""What one microbatch of a captured model costs: its cost graph, under the cost model that the user
names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.api.choices import unknown_costs
from pipecompile.api.measurement_conditions import conditions_of
from pipecompile.cost_models.cache import CachedCost, cached_costs, store_costs
from pipecompile.cost_models.clock import device_name
from pipecompile.cost_models.device import devices_of
from pipecompile.cost_models.flops import Flops
from pipecompile.cost_models.interpolation import interpolated_costs
from pipecompile.cost_models.measured import CachedCosts, Measured
from pipecompile.cost_models.protocol import CallCost, CostModel
from pipecompile.cost_models.roofline import Roofline
from pipecompile.cost_models.table import CostFunction, Function, Table
from pipecompile.errors import FormatError, InputError
from pipecompile.frontend.caches import fakes_out_of_caches
from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured
from pipecompile.frontend.torch_patches import silence_torch
from pipecompile.graph.attributes import attributes_restored
from pipecompile.graph.loss_module import held_loss
from pipecompile.graph.model_state import fake_state, has_values, swapped_state
from pipecompile.graph.recomputability import copied_bytes, recompute_limits
from pipecompile.graph.restored_state import tensors_restored
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plurals import counted
from pipecompile.ir.unequal_costs import UnequalCosts
from pipecompile.profiling.profile import profile
from pipecompile.profiling.workload import Loss

__all__ = [
    "comparable",
    "cost_graph",
    "cost_model",
    "interpolated_graph",
    "kinds_of",
    "measured_on",
    "of_ranks",
    "profiled",
    "regrouped",
]

logger = logging.getLogger("pipecompile.api")
CPU = torch.device("cpu")


def cost_model(
    name: str, function: CostFunction | None = None, device: torch.device = CPU
) -> CostModel:
    """Return the cost model that `--costs NAME` stands for, `function` for "function"; InputError
    if there is none.

    `device` is where the model is: costs are measured there unless the name says where.
    """
    kind, _, place = name.partition(":")
    # The pair tells "roofline:h100" from "roofline" alone, which no case takes: so the error
    # below is raised, which lists the forms.
    match kind, bool(place):
        case "flops", False:
            return Flops()
        case "measured", _:
            return Measured(_device(place) if place else device)
        case "roofline", True:
            return Roofline.of(place)
        case "table", True:
            return Table.of(place)
        case "function", False if function is not None:
            return Function(function)
    raise unknown_costs(name)


def _device(name: str) -> torch.device:
    """Return the device to measure on; raise InputError if there is none of that name."""
    try:
        device = torch.device(name)
    except RuntimeError:
        # Stands for "no such device": it is refused below.
        device = torch.device("meta")
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        return device
    raise InputError(
        f"costs='measured:{name}', but there is no device {name!r} here; write measured:cpu or "
        "measured:cuda"
    )


def measured_on(costs: str, target: Target) -> torch.device | None:
    """Return the device on which these costs are measured; None if they are not.

    No file is read.
    """
    if costs.partition(":")[0] != "measured":
        return None
    model = cost_model(costs, target.costs, target.device)
    return model.device if isinstance(model, Measured) else None


def comparable(costs: str) -> bool:
    """Return whether these costs are the same wherever a plan is checked.

    Costs in a file are the same only where the file is.
    """
    try:
        return all(cost_model(kind).reproducible for kind in kinds_of(costs))
    except InputError:
        return False  # a function, a device or a device file that is not here
    except FormatError as error:
        # A file that is damaged is an error, and not a file that is missing.
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise


def cost_graph(
    target: Target,
    costs: str,
    microbatches: int,
    captured: Captured,
    *,
    fresh: bool = False,
) -> CostGraph:
    """Return what one microbatch costs; with the loss if a target is given or the model has its own
    loss.

    Measured costs come from the cache if they were measured under the same conditions, unless
    `fresh` ones are asked for. Where ranks have devices of several kinds, it is of all of them.
    """
    # Each kind as if it were alone, from here on: all that follows is of one kind.
    if len(kinds_of(costs)) > 1:
        return of_ranks(costs, lambda kind: cost_graph(target, kind, microbatches, captured))
    model = cost_model(kinds_of(costs)[0], target.costs, target.device)
    if isinstance(model, Table):
        # At once: a file of another model must not be found out after minutes of profiling.
        model.check(captured.digest, (node.name for node in _operations(captured)))
    if model.real:
        target.check_values(f"costs={costs!r}")
    if isinstance(model, Measured):
        return _measured(target, microbatches, captured, model, fresh=fresh)
    return profiled(target, microbatches, captured, model)


def kinds_of(costs: str) -> list[str]:
    """Return the distinct costs of ranks, in their order: one where all ranks are alike."""
    return list(dict.fromkeys(_of_ranks(costs)))


def _of_ranks(costs: str) -> list[str]:
    """Return the costs of each rank; of all ranks where they are alike."""
    kind, _, text = costs.partition(":")
    return [f"roofline:{name}" for name in devices_of(text)] if kind == "roofline" else [costs]


def of_ranks(costs: str, of_kind: Callable[[str], CostGraph]) -> CostGraph:
    """Return the cost graph of ranks with these costs, given that of each kind: of all of them
    where they are of several, which must hold the same tensors, else InputError.
    """
    kinds = kinds_of(costs)
    # "roofline:h100,a100,h100" has 3 ranks and 2 kinds: two graphs are made, and [0, 1, 0] says
    # whose is whose.
    graphs = list(map(of_kind, kinds))
    if len(kinds) == 1:
        return graphs[0]
    try:
        return UnequalCosts.of(graphs, [kinds.index(each) for each in _of_ranks(costs)])
    except ValueError as error:
        raise InputError(
            f"costs={costs!r}: {error}, such as the scores of an attention that only some of them "
            "fuse, or what their allocators round; plan for devices that hold the same"
        ) from error


def _measured(
    target: Target, microbatches: int, captured: Captured, model: Measured, *, fresh: bool
) -> CostGraph:
    """Return the cost graph by measured times: those of the cache, else new ones.

    New ones are stored.
    """
    conditions = conditions_of(model, target, microbatches, captured)
    # Without conditions that describe all, nothing is read and nothing stored: a wrong time would
    # look like a right one.
    known = cached_costs(conditions) if conditions and not fresh else None
    if known is not None:
        # Only times come from the cache. Sizes are counted each time, since that takes no device.
        before = {name: CallCost(**msgspec.structs.asdict(cost)) for name, cost in known.items()}
        cached = CachedCosts(before, model.allocator, model.fused_attention)
        return profiled(target, microbatches, captured, cached)
    graph = profiled(target, microbatches, captured, model)
    logger.info(
        "measured %s distinct calls of %s nodes on %s, median spread %s",
        *(f"{len(model.costs_by_signature):,}", f"{len(graph.nodes):,}"),
        *(device_name(model.device), f"{model.spread:.1%}"),
    )
    if conditions:
        measured = {n: CachedCost(**asdict(cost)) for n, cost in model.costs_by_name.items()}
        store_costs(conditions, measured)
    return graph


def interpolated_graph(
    target: Target, microbatches: int, captured: Captured, known: Mapping[int, CostGraph]
) -> CostGraph | None:
    """Return the cost graph of one microbatch with the bytes of its own capture, and with times
    between those of two measured cost graphs, `known` by the samples of their microbatches.

    Its notes say so. It is None if microbatches of these sizes have not the same nodes.
    """
    names = {node.name for node in _operations(captured)}
    # Times are interpolated node by node. A size that takes another path, such as another kernel
    # of attention, has other nodes, and then there is nothing between the two.
    if any(graph.by_name.keys() != names for graph in known.values()):
        return None
    size, first = target.samples // microbatches, next(iter(known.values()))
    costs = interpolated_costs(known, size)
    model = CachedCosts(costs, first.allocator, first.fused_attention)
    note = (
        f"times for {counted(size, 'sample')} a microbatch are interpolated between those measured "
        f"for {' and '.join(map(str, sorted(known)))}"
    )
    return replace(profiled(target, microbatches, captured, model), cost_notes=(note,))


def _operations(captured: Captured) -> Iterable[fx.Node]:
    # A get_attr node only reads a parameter: it takes no time, and lies in no stage.
    return (node for node in captured.module.graph.nodes if node.op != "get_attr")


@contextmanager
def _kept_beside_the_graph(target: Target, captured: Captured) -> Iterator[None]:
    """Put back after the block what hooks and the loss write to and no graph has: attributes,
    buffers, what the loss holds, and caches of functions, which would keep fake tensors.
    """
    model, known = captured.capture.model, set(captured.module.buffers())
    others = [each for each in model.buffers() if has_values(each) and each not in known]
    with (
        attributes_restored(model),
        tensors_restored(model, others),
        callable_restored(target.loss_fn),
        fakes_out_of_caches(),
    ):
        yield


def profiled(target: Target, microbatches: int, captured: Captured, model: CostModel) -> CostGraph:
    """Return the cost graph by `model`: under the original parameter names, and with what may not
    be recomputed.
    """
    inputs = map(target.on_device, captured.capture.inputs.flatten(captured.sample))
    with _kept_beside_the_graph(target, captured):
        loss, targets = loss_of(target, microbatches, captured)
    run = partial(profile, captured.module, list(inputs), model)
    with _kept_beside_the_graph(target, captured):
        try:
            graph = run(loss=loss, targets=targets)
        except _LossFailedError as error:
            # It ran once: what it keeps without values, or more calls, made it fail.
            _warn_of_left_out(error.cause)
            graph = run(loss=None, targets=[])
    named = replace(
        _canonical(graph, captured.capture),
        fingerprint=captured.digest,
        cost_notes=model.notes if isinstance(model, Roofline) else (),
    )
    limited = _limited(named, captured.module)
    return model.finished(limited) if isinstance(model, Table) else limited


def regrouped(graph: CostGraph, module: fx.GraphModule) -> CostGraph:
    """Return the cost graph of a module whose groups have changed since."""
    if isinstance(graph, UnequalCosts):
        return graph.mapped(lambda kind: regrouped(kind, module))
    groups = {node.name: node.meta.get("group") for node in module.graph.nodes}
    nodes = (replace(node, group=groups[node.name]) for node in graph.nodes)
    return _limited(replace(graph, nodes=tuple(nodes)), module)


def _limited(graph: CostGraph, module: fx.GraphModule) -> CostGraph:
    """Return the same graph with what may not be recomputed, and what is copied if it is."""
    limits, copied = recompute_limits(module), copied_bytes(module)
    nodes = tuple(
        replace(
            node,
            is_recomputable=node.name not in limits.never,
            buffer_copies=copied.get(node.name, ()),
        )
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, recomputed_together=limits.together)


def loss_of(
    target: Target, microbatches: int, captured: Captured
) -> tuple[Loss | None, list[Tensor]]:
    """Return the loss of a microbatch as a function of flat outputs and target tensors, and these
    tensors.

    It is None without a target, and where the loss reads values, which a profile does not have.
    """
    if target.loss_fn is None or target.targets is None:
        return None, []
    # The profile calls the loss with tensors of its own, in a flat list. What is cut out of the
    # tree here is put back in `loss`.
    leaves, spec = torch.utils._pytree.tree_flatten(target.cut_targets(microbatches)[0])

    def loss(outputs: Sequence[Any], given: Sequence[Tensor]) -> Tensor:
        # What is no tensor among the targets, such as a flag, keeps its place in the tree.
        rest = iter(given)
        tree = torch.utils._pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        try:
            return target.trained_by(captured.capture.outputs.unflatten(outputs), tree)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _LossFailedError(error) from error

    targets = [target.on_device(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    failure = _failure_without_values(loss, targets, captured.module)
    if failure is not None:
        _warn_of_left_out(failure)
        return None, []
    return loss, targets


class _LossFailedError(Exception):
    """A loss function has raised its `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


def _warn_of_left_out(failure: Exception) -> None:
    logger.warning(
        "costs leave out the loss, since loss_fn does not run on tensors without values: %s: "
        "%s; what it takes on the last stage comes on top",
        *(type(failure).__name__, str(failure).partition("\n")[0]),
    )


def _failure_without_values(
    loss: Loss, targets: Sequence[Tensor], module: fx.GraphModule
) -> Exception | None:
    """Return what `loss` raises on fake tensors in place of the outputs; None if it runs."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    values = [node.meta["val"] for node in output.all_input_nodes]
    mode = next((each.fake_mode for each in values if isinstance(each, FakeTensor)), None)
    if mode is None:
        return None
    # In the order of the outputs, of which one may be there twice.
    outputs = fx.map_arg(output.args[0], lambda node: node.meta["val"])
    held = held_loss(module)
    own = nullcontext() if held is None else swapped_state(held, fake_state(held, mode))
    try:
        with silence_torch(), mode, own:
            loss(outputs, [mode.from_tensor(each, static_shapes=True) for each in targets])
    except _LossFailedError as error:
        return error.cause
    except Exception as error:
        return error
    return None


def _canonical(costs: CostGraph, captured: Capture) -> CostGraph:
    """Return the same graph with every parameter under its first name in the original model."""
    # A tied parameter has several names, and the recorded graph may read it by any of them.
    first, aliases = captured.first_names, captured.aliases
    parameters = []
    for parameter in costs.parameters:
        name = first.get(parameter.name, parameter.name)
        # The capture does not know the loss.
        others = aliases.get(name, parameter.aliases)
        parameters.append(replace(parameter, name=name, aliases=others))

    def canonical(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({first.get(name, name) for name in names}))

    nodes = [
        replace(
            node,
            parameters=canonical(node.parameters),
            view_gradients=canonical(node.view_gradients),
        )
        for node in costs.nodes
    ]
    parameters.sort(key=lambda parameter: parameter.name)
    return replace(costs, nodes=tuple(nodes), parameters=tuple(parameters))
