"""From a captured graph and a cost model to the cost graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile.cost_models.protocol import CallCost, CostModel
from pipecompile.graph.model_state import has_values, named_state
from pipecompile.graph.storages import size_bytes
from pipecompile.ir import graph as ir
from pipecompile.profiling.cuda import as_on_cuda
from pipecompile.profiling.kernel_scratch import scratch_on
from pipecompile.profiling.observation import NodeObservation, StepObservation, observe
from pipecompile.profiling.pricing import price
from pipecompile.profiling.workload import Loss, Workload

__all__ = ["profile"]


def profile(
    graph_module: fx.GraphModule,
    inputs: Sequence[Tensor],
    cost_model: CostModel,
    *,
    loss: Loss | None = None,
    targets: Sequence[Tensor] = (),
) -> ir.CostGraph:
    """The cost graph of one microbatch.

    `inputs` are the values of the placeholders, in order, for the shapes that the graph was captured for. The output
    node costs what `loss(outputs, targets)` costs, `outputs` being the flat outputs; nothing without a loss.
    Sizes come from one run on fake tensors, so only a cost model that wants real tensors computes
    anything. The model, its inputs and the random generators are left as they were.
    """
    workload = Workload(graph_module, graph_module.graph, tuple(inputs), loss, tuple(targets))
    with _untouched(graph_module), _training_attention():
        kernels = (
            as_on_cuda(cost_model.fused_attention) if cost_model.memory == "cuda" else nullcontext()
        )
        with _anywhere(), FakeTensorMode(allow_non_fake_inputs=True), kernels:
            fake = workload.faked()
            observation = observe(fake, scratch_on(cost_model.memory))
            costs = {} if cost_model.real else price(fake, observation, cost_model)
        if cost_model.real:
            costs = price(workload, observation, cost_model)
    known = _known(workload.graph, observation)
    return ir.CostGraph(
        allocator=cost_model.memory,
        fused_attention=tuple(cost_model.fused_attention),
        nodes=tuple(_nodes(workload, observation, costs, known)),
        tensors=tuple(_tensors(workload.graph, observation, known)),
        storages=tuple(observation.storages[storage] for storage in known),
        contents=tuple(observation.contents.get(storage) for storage in known),
        parameters=tuple(_parameters(graph_module)),
        gradients=observation.gradients,
    )


@contextmanager
def _training_attention() -> Iterator[None]:
    """Attention without gradients, in eval mode, takes the path that a training step takes and no other."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _anywhere() -> Iterator[None]:
    """Fake runs do not hang on what this process has run before (fakes are cached), nor on its kernels' switches."""
    FakeTensorMode.cache_clear()
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(True)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _known(graph: fx.Graph, observation: StepObservation) -> dict[int, int]:
    """The storages that nodes save or pass on, numbered anew in their order."""
    read = {node.name for node in graph.nodes if node.users}
    nodes = observation.nodes.items()
    storages = {
        s
        for name, facts in nodes
        for s in (*facts.saved, *(facts.storages if name in read else ()))
    }
    return {storage: index for index, storage in enumerate(sorted(storages))}


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if has_values(buffer)]
    devices = {value.device for value in (*module.parameters(), *module.buffers()) if value.is_cuda}
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(
                        buffer, before
                    ):  # an expanded buffer never changes and refuses any write
                        buffer.copy_(before)


def _nodes(
    workload: Workload, observation: StepObservation, costs: dict[str, CallCost], known: dict[int, int]
) -> Iterator[ir.Node]:
    parameter_bytes = {name: size_bytes([value]) for name, value in named_state(workload.module)}
    claimed: set[int] = set()
    for node in workload.graph.nodes:
        if node.op == "get_attr":
            continue
        facts, cost = observation.nodes[node.name], costs[node.name]
        first = [storage for storage in facts.saved if storage not in claimed]
        claimed.update(first)
        yield ir.Node(
            name=node.name,
            forward_ns=cost.forward_ns,
            backward_ns=cost.backward_ns,
            backward_input_ns=cost.backward_input_ns,
            backward_weight_ns=cost.backward_weight_ns,
            parameter_bytes=sum(parameter_bytes[name] for name in facts.parameters),
            # A storage that several nodes save is counted once, at the first.
            saved_bytes=sum(observation.storages[storage] for storage in first),
            saved=tuple(known[storage] for storage in facts.saved),
            uses=facts.uses,
            forward_peak_bytes=facts.forward_peak,
            backward_peak_bytes=facts.backward_peak,
            saves_at=facts.packs,
            workspace_bytes=facts.scratch if cost.workspace_bytes is None else cost.workspace_bytes,
            input_bytes=_input_bytes(workload, node, facts),
            parameters=facts.parameters,
            view_gradients=facts.given_as_views,
            gradients_by_input_backward=facts.early,
            group=node.meta.get("group"),
            module=node.meta.get("module", ""),
            operator=facts.operator,
            source=node.meta.get("source", ""),
        )


def _input_bytes(workload: Workload, node: fx.Node, facts: NodeObservation) -> int:
    """What the node reads of the minibatch: the loss its targets."""
    return (
        size_bytes(workload.targets)
        if node.op == "output"
        else facts.bytes
        if node.op == "placeholder"
        else 0
    )


def _tensors(
    graph: fx.Graph, observation: StepObservation, known: dict[int, int]
) -> Iterator[ir.Tensor]:
    """One for each value that somebody reads; a tuple counts as the sum of its tensors and has no one storage."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "get_attr" and node.users:
            facts = observation.nodes[node.name]
            yield ir.Tensor(
                producer=node.name,
                consumers=tuple(user.name for user in sorted(node.users, key=position.__getitem__)),
                bytes=facts.bytes,
                gradient_bytes=facts.gradient_bytes,
                storage=known[facts.storages[0]] if len(facts.storages) == 1 else None,
                is_permuted=facts.permuted,
                is_dense=facts.dense,
                strided_copy_bytes=facts.spread_bytes,
                gradient_expanded_by=observation.expanded.get(node.name),
                consumers_without_gradient=facts.silent,
            )


def _parameters(module: nn.Module) -> Iterator[ir.Parameter]:
    """Parameters, then buffers, each once, in the order of the module."""
    names: dict[int, list[str]] = {}
    values: dict[int, Tensor] = {}
    for name, value in named_state(module):
        names.setdefault(id(value), []).append(name)
        values[id(value)] = value
    for key, value in values.items():
        first, *aliases = names[key]
        yield ir.Parameter(
            name=first,
            bytes=size_bytes([value]),
            trainable=isinstance(value, nn.Parameter) and value.requires_grad,
            aliases=tuple(aliases),
            shape=tuple(value.shape),
        )
