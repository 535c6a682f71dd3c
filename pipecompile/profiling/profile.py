"""Profiling: from a captured graph and a cost model to the cost graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile.cost_models.protocol import CallCost, CostModel
from pipecompile.graph.attention_path import training_attention
from pipecompile.graph.copied_nodes import is_copyable
from pipecompile.graph.kv_cache import kv_token_bytes
from pipecompile.graph.model_state import has_values, named_state
from pipecompile.graph.restored_state import tensors_restored
from pipecompile.graph.storages import size_bytes
from pipecompile.graph.torch_repairs import new_fake_mode
from pipecompile.ir import graph as ir
from pipecompile.profiling.cuda import as_on_cuda
from pipecompile.profiling.folds import Fold, IrregularError, folds_of
from pipecompile.profiling.kernel_workspace import workspace_on
from pipecompile.profiling.node_costs import costs_of_nodes
from pipecompile.profiling.observation import NodeObservation, StepObservation
from pipecompile.profiling.observer import observe
from pipecompile.profiling.workload import Loss, Workload

__all__ = ["profile"]

_FAKE_RESULTS: dict[Any, Any] = {}
"""What operators return on fake tensors in a profile: torch fills and reads it."""


def profile(
    graph_module: fx.GraphModule,
    inputs: Sequence[Tensor],
    cost_model: CostModel,
    *,
    loss: Loss | None = None,
    targets: Sequence[Tensor] = (),
) -> ir.CostGraph:
    """Return the cost graph of one microbatch.

    `inputs` are the values of the placeholders, in order, in the shapes that the graph was captured
    for. The output node costs what `loss(outputs, targets)` costs, where `outputs` is the flat list
    of outputs; without a loss it costs nothing. Sizes come from one run on fake tensors, and only a
    cost model that needs real tensors computes anything. The model, its inputs and the random
    generators are left as they were.
    """
    workload = Workload(graph_module, graph_module.graph, tuple(inputs), loss, tuple(targets))
    with _restored_state(graph_module), training_attention():
        observation, costs = _observed(workload, cost_model)
    # Storages that never leave their node are in its peaks, and need no number.
    numbering = _storage_numbering(workload.graph, observation)
    return ir.CostGraph(
        allocator=cost_model.allocator,
        fused_attention=tuple(cost_model.fused_attention),
        time_unit=cost_model.time_unit,
        nodes=tuple(_nodes(workload, observation, costs, numbering)),
        tensors=tuple(_tensors(workload.graph, observation, numbering)),
        storages=tuple(observation.storages[storage] for storage in numbering),
        contents=tuple(observation.contents.get(storage) for storage in numbering),
        parameters=tuple(_parameters(graph_module)),
        gradients=observation.gradients,
    )


def _observed(
    workload: Workload, cost_model: CostModel
) -> tuple[StepObservation, dict[str, CallCost]]:
    """Return what a step shows, and the costs of nodes; equal blocks are run a few times only."""
    folds = folds_of(workload)
    try:
        observation, costs = _observed_folded(workload, folds, cost_model)
    except IrregularError:
        # Blocks that the graph shows as equal were not in the step: every node is run then.
        observation, costs = _observed_folded(workload, (), cost_model)
    # The costs of real tensors are found outside of the fake mode, on the device's own kernels.
    if cost_model.real:
        costs = costs_of_nodes(workload, observation, cost_model)
    return observation, costs


def _observed_folded(
    workload: Workload, folds: Sequence[Fold], cost_model: CostModel
) -> tuple[StepObservation, dict[str, CallCost]]:
    """Return what a step shows, by a run of what the folds leave, and the costs of fake tensors."""
    with _fakes(cost_model, folds[-1].folded if folds else workload) as fake:
        observation = observe(fake, workspace_on(cost_model.allocator))
        costs = {}
        # Fake tensors belong to this mode, so their costs are found inside it.
        if cost_model.by_signature and not cost_model.real:
            costs = costs_of_nodes(fake, observation, cost_model)
    # The last fold is the smallest workload, and each one gives what the fold before it had seen.
    for fold in reversed(folds):
        observation = fold.unfolded(observation)
        costs = fold.unfolded_costs(costs) if costs else {}
    if not cost_model.by_signature and not cost_model.real:
        with _fakes(cost_model, workload) as fake:
            costs = costs_of_nodes(fake, observation, cost_model)
    return observation, costs


@contextmanager
def _fakes(cost_model: CostModel, workload: Workload) -> Iterator[Workload]:
    """The workload on fake tensors, for the kernels of the device that costs are of."""
    is_cuda = cost_model.allocator == "cuda"
    with (
        _reproducible_fakes(),
        new_fake_mode(),
        as_on_cuda(cost_model.fused_attention) if is_cuda else nullcontext(),
        workload.faked() as fake,
    ):
        yield fake


@contextmanager
def _reproducible_fakes() -> Iterator[None]:
    """Make a run on fake tensors the same in every process.

    Otherwise it depends on what ran before in this process (fake results are cached), and on its
    switch for oneDNN. Profiles have a cache of their own, which they fill with that switch on.
    """
    others, before = FakeTensorMode.cache, torch._C._get_mkldnn_enabled()
    FakeTensorMode.cache = _FAKE_RESULTS
    torch._C._set_mkldnn_enabled(True)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
        FakeTensorMode.cache = others


def _storage_numbering(graph: fx.Graph, observation: StepObservation) -> dict[int, int]:
    """Return the storages that nodes save or that others read, with their number in the cost graph.

    They keep their order: if 2, 5 and 9 remain, these become 0, 1 and 2.
    """
    storages: set[int] = set()
    for node in graph.nodes:
        if node.op != "get_attr":
            observed = observation.nodes[node.name]
            storages.update(observed.saved)
            storages.update(observed.storages if node.users else ())
    return {storage: number for number, storage in enumerate(sorted(storages))}


@contextmanager
def _restored_state(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of `module` and the random generators after the block."""
    buffers = [buffer for buffer in module.buffers() if has_values(buffer)]
    devices = {value.device for value in (*module.parameters(), *module.buffers()) if value.is_cuda}
    # Dropout and batch norms run for real where nodes are measured, with any number of repeats.
    with torch.random.fork_rng(devices), tensors_restored(module, buffers):
        yield


def _nodes(
    workload: Workload,
    observation: StepObservation,
    costs: dict[str, CallCost],
    numbering: dict[int, int],
) -> Iterator[ir.Node]:
    """Yield the nodes of the cost graph: what was observed of each, with what the cost model says.

    `numbering` gives storages their numbers in the cost graph.
    """
    parameter_bytes = {name: size_bytes([value]) for name, value in named_state(workload.module)}
    counted: set[int] = set()
    for node in workload.graph.nodes:
        if node.op == "get_attr":
            continue
        observed, cost = observation.nodes[node.name], costs[node.name]
        # A storage that several nodes save is counted once, at the first of them.
        newly_saved = [storage for storage in observed.saved if storage not in counted]
        counted.update(newly_saved)
        workspace = observed.workspace if cost.workspace_bytes is None else cost.workspace_bytes
        yield ir.Node(
            name=node.name,
            forward_ns=cost.forward_ns,
            backward_ns=cost.backward_ns,
            backward_input_ns=cost.backward_input_ns,
            backward_weight_ns=cost.backward_weight_ns,
            parameter_bytes=sum(parameter_bytes[name] for name in observed.parameters),
            saved_bytes=sum(observation.storages[storage] for storage in newly_saved),
            saved=tuple(numbering[storage] for storage in observed.saved),
            uses=observed.uses,
            forward_peak_bytes=observed.forward_peak,
            backward_peak_bytes=observed.backward_peak,
            saves_at=observed.saves_at,
            is_copyable=is_copyable(node),
            workspace_bytes=workspace,
            input_bytes=_input_bytes(workload, node, observed),
            kv_token_bytes=kv_token_bytes(workload.module, node),
            parameters=observed.parameters,
            view_gradients=observed.view_gradients,
            gradients_by_input_backward=observed.gradients_by_input_backward,
            has_ordered_gradients=observed.has_ordered_gradients,
            group=node.meta.get("group"),
            module=node.meta.get("module", ""),
            operator=observed.operator,
            source=node.meta.get("source", ""),
        )


def _input_bytes(workload: Workload, node: fx.Node, observed: NodeObservation) -> int:
    """Return the bytes that a node reads from the minibatch; the output node reads the targets."""
    if node.op == "output":
        return size_bytes(workload.targets)
    return observed.bytes if node.op == "placeholder" else 0


def _tensors(
    graph: fx.Graph, observation: StepObservation, numbering: dict[int, int]
) -> Iterator[ir.Tensor]:
    """Yield a tensor for each value that is read.

    A tuple counts as one tensor with the sum of the bytes. It has no storage, since it has several.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    parameters = {node.name: str(node.target) for node in graph.nodes if node.op == "get_attr"}
    for node in graph.nodes:
        if node.op != "get_attr" and node.users:
            observed = observation.nodes[node.name]
            yield ir.Tensor(
                producer=node.name,
                consumers=tuple(user.name for user in sorted(node.users, key=position.__getitem__)),
                bytes=observed.bytes,
                gradient_bytes=observed.gradient_bytes,
                storage=numbering[observed.storages[0]] if len(observed.storages) == 1 else None,
                is_permuted=observed.is_permuted,
                is_dense=observed.is_dense,
                strided_copy_bytes=observed.strided_copy_bytes,
                gradient_expanded_by=observation.expanded_by.get(node.name),
                sums_with=None if observed.sums_with in parameters else observed.sums_with,
                sums_with_parameter=parameters.get(observed.sums_with or ""),
                consumers_without_gradient=observed.consumers_without_gradient,
            )


def _parameters(module: nn.Module) -> Iterator[ir.Parameter]:
    """Yield parameters, then buffers, each once, in the order of the module."""
    names: dict[int, list[str]] = {}
    values: dict[int, Tensor] = {}
    for name, value in named_state(module):
        names.setdefault(id(value), []).append(name)
        values[id(value)] = value
    # Names of one tensor are aliases: the first is canonical.
    for key, value in values.items():
        first, *aliases = names[key]
        yield ir.Parameter(
            name=first,
            bytes=size_bytes([value]),
            trainable=isinstance(value, nn.Parameter) and value.requires_grad,
            aliases=tuple(aliases),
            shape=tuple(value.shape),
        )
