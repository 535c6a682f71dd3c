"""Cuts a placed graph into stage modules that keep the original parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from pipecompile.codegen.regions import EncodedRuns, Regions, check_regions, enclose
from pipecompile.graph.autograd_context import current_context
from pipecompile.graph.layout import dense_order, is_dense, strides_with_gaps
from pipecompile.graph.stages import origin_of, relay, stage_of
from pipecompile.graph.storages import storage_key
from pipecompile.ir.encodings import Policy
from pipecompile.passes.autograd_context import EnterContexts
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.data_dependence import GuardDataDependence
from pipecompile.passes.place import Place
from pipecompile.passes.relay import Relay
from pipecompile.passes.seed import Seed

__all__ = ["BoundaryTensor", "StageModule", "emit"]


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor between two stages, as it travels: contiguous, of this shape and type.

    `order` is how its dimensions were permuted to make it so, `gaps` the strides that it had if it was a view with
    holes, or one that repeats elements. The receiver brings both back: how later sums round may depend on the layout in
    memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    order: tuple[int, ...]
    gaps: tuple[int, ...] | None

    @staticmethod
    def of(node: fx.Node) -> BoundaryTensor:
        """How the value of `node` travels."""
        value: Tensor = node.meta["val"]
        order = dense_order(value)
        shape = tuple(int(value.shape[dimension]) for dimension in order)
        return BoundaryTensor(
            origin_of(node),
            shape,
            value.dtype,
            value.requires_grad,
            order,
            strides_with_gaps(value),
        )

    @property
    def permuted(self) -> bool:
        """Whether the dimensions travel in another order."""
        return self.order != tuple(range(len(self.order)))


@dataclass(frozen=True)
class StageModule:
    """One stage: `module` maps the tensors of `inputs` to those of `outputs`.

    The first stage takes the model's input tensors, the last gives the model's output tensors: there `inputs` or
    `outputs` are empty. `gradient_inputs` tells which of the module's arguments carry a gradient back, `written` names
    the buffers that its forward writes to, `random` tells whether it draws random numbers.
    """

    index: int
    module: fx.GraphModule
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]
    gradient_inputs: tuple[bool, ...]
    written: tuple[str, ...]
    random: bool

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The buffers that its forward writes to; others after `.to` than before."""
        buffers = map(self.module.get_buffer, self.written)
        return tuple({id(buffer): buffer for buffer in buffers}.values())


def emit(
    module: fx.GraphModule,
    assignment: Mapping[str, int],
    regions: Regions = MappingProxyType({}),
    savings: EncodedRuns = MappingProxyType({}),
) -> tuple[StageModule, ...]:
    """The stages of `module` (an instantiated capture) under `assignment`, node name → stage.

    `regions` of a stage are runs of its nodes, reads of parameters aside, that are computed again in its backward;
    `savings` are others, whose saved tensors are kept by policies. They require groups (`meta["group"]`), and
    InputError names those that cannot be. `module` is rewritten on the way: its
    nodes get their stages, and relays for tensors that skip stages.
    """
    if regions or savings:
        check_regions(module, assignment, regions, savings)
    apply_passes(module.graph, [Place(assignment), Relay()])
    count = 1 + max(map(stage_of, module.graph.nodes))
    return tuple(
        _stage(module, index, count, regions.get(index, ()), savings.get(index, ()))
        for index in range(count)
    )


def _stage(
    module: fx.GraphModule,
    index: int,
    count: int,
    regions: Sequence[Sequence[str]],
    savings: Sequence[tuple[Sequence[str], tuple[Policy, ...]]],
) -> StageModule:
    mine = [node for node in module.graph.nodes if stage_of(node) == index]
    received = _crossing(module.graph, index - 1) if index else []
    sent = _crossing(module.graph, index) if index < count - 1 else []
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    # First all placeholders, under names that nothing else in the stage has taken yet.
    arrived = [graph.placeholder(origin_of(node)) for node in received]
    for node, value in zip(received, arrived, strict=True):
        copies[node] = _receive(
            graph, node, value, [user for user in node.users if stage_of(user) == index]
        )
    # Nothing is summed of what carries no gradient: it is sent on as it came, whoever reads it here.
    came = copies | {
        node: value
        for node, value in zip(received, arrived, strict=True)
        if not BoundaryTensor.of(node).gradient
    }
    for node in mine:
        if node.op != "output":
            copies[node] = graph.node_copy(node, (came if _relays(node) else copies).__getitem__)
            copies[node].meta["origin"] = origin_of(node)  # the copy's own name may differ
    if index < count - 1:
        _finish(graph, tuple(_send(graph, node, copies[node]) for node in sent))
    else:
        (output,) = (node for node in mine if node.op == "output")
        _finish(graph, tuple(copies[node] for node in output.args[0]))
    random = any(node.meta["random"] for node in mine)
    named = {node.name: copy for node, copy in copies.items()}
    runs = [([named[name] for name in names], policies) for names, policies in savings]
    enclose(graph, [[named[name] for name in region] for region in regions], runs)
    apply_passes(graph, [GuardDataDependence(), Seed(), EnterContexts()])
    return StageModule(
        index=index,
        module=fx.GraphModule(module, graph, class_name=f"Stage{index}"),
        inputs=tuple(map(BoundaryTensor.of, received)),
        outputs=tuple(map(BoundaryTensor.of, sent)),
        gradient_inputs=tuple(
            n.meta["val"].requires_grad for n in graph.nodes if n.op == "placeholder"
        ),
        written=_written_buffers(module, mine),
        random=random,
    )


def _crossing(graph: fx.Graph, stage: int) -> list[fx.Node]:
    """The nodes of `stage` that the next stage reads, in the order of the values they carry."""
    nodes = [node for node in graph.nodes if stage_of(node) == stage]
    crossing = [node for node in nodes if any(stage_of(user) == stage + 1 for user in node.users)]
    return sorted(crossing, key=lambda node: int(node.meta["order"]))


def _receive(graph: fx.Graph, node: fx.Node, value: fx.Node, readers: Sequence[fx.Node]) -> fx.Node:
    edge = BoundaryTensor.of(node)
    value.meta.update(_plain(node))
    if all(map(_relays, readers)):
        return value  # sent on as it is
    if edge.gradient and any(
        (reader.meta["autograd_context"] or current_context()).is_autocast for reader in readers
    ):
        # Autocast casts a leaf once for all readers, and sums their gradients as cast; this is none in the whole model.
        value = graph.call_method("view_as", (value, value))
        value.meta.update(_plain(node))
    if edge.permuted:
        inverse = sorted(range(len(edge.order)), key=edge.order.__getitem__)
        value = graph.call_method("permute", (value, inverse))
        value.meta.update(_plain(node))
    if edge.gaps is not None:
        value = graph.call_function(restride, (value, edge.gaps))
        value.meta.update(_plain(node))
    return value


def _send(graph: fx.Graph, node: fx.Node, value: fx.Node) -> fx.Node:
    if _relays(node) and value.all_input_nodes[0].op == "placeholder":
        return value  # it is as it came
    edge = BoundaryTensor.of(node)
    if edge.permuted:
        value = graph.call_method("permute", (value, edge.order))
        value.meta.update(_plain(node))
    if not is_dense(node.meta["val"]):
        value = graph.call_method("contiguous", (value,))
        value.meta.update(_plain(node))
    return value


def _relays(node: fx.Node) -> bool:
    return node.target is relay


def _finish(graph: fx.Graph, values: Sequence[fx.Node]) -> None:
    graph.output(values).meta.update(random=False, mutates=(), autograd_context=None, val=None)


def _plain(node: fx.Node) -> dict[str, object]:
    """The notes of a node that only hands on the value of `node`."""
    return {**node.meta, "random": False, "mutates": (), "autograd_context": None}


def restride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of `tensor` with these strides."""
    if any(size > 1 and not step for size, step in zip(tensor.shape, stride, strict=True)):
        expanded: Tensor = _Expanded.apply(tensor, stride)  # type: ignore[no-untyped-call]
        return expanded
    return torch.empty_strided(
        tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


class _Expanded(torch.autograd.Function):
    """Elements that are alike lie in one place again; the gradient has all of them, as the sender's view has."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        part = tensor
        for dimension, step in enumerate(stride):
            part = part if step else part[(slice(None),) * dimension + (slice(1),)]
        copy = torch.empty_strided(
            part.shape, stride, dtype=tensor.dtype, device=tensor.device
        ).copy_(part)
        return copy.expand(tensor.shape)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _written_buffers(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """The names of the buffers that a forward of `nodes` writes to."""
    written = {storage_key(tensor) for node in nodes for tensor in node.meta["mutates"]}
    found: dict[str, None] = {}
    for node in nodes:
        target = str(node.target)
        if node.op == "call_module" and node.meta["mutates"]:
            found |= dict.fromkeys(
                f"{target}.{name}" for name, _ in module.get_submodule(target).named_buffers()
            )
        elif node.op == "get_attr" and storage_key(node.meta["val"]) in written:
            found[target] = None
    return tuple(found)
