"""Stages: a captured graph cut into modules that keep the original parameter names.

`emit` is called by `training/program.py`. Each stage is one fx module. A tensor that crosses a
boundary is sent contiguous, and the receiving stage restores its layout first:

    stage 0    inputs ── nodes ── permute, contiguous ──▶ message
    stage 1    message ── permute, restride ── nodes ── …
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from pipecompile.codegen.region_replacement import replace_regions
from pipecompile.codegen.regions import EncodedRuns, Regions, check_regions
from pipecompile.codegen.stage_passes import STAGE_PASSES
from pipecompile.graph.autograd_context import current_context
from pipecompile.graph.layout import check_strides, dense_order, strides_with_gaps
from pipecompile.graph.loss_module import called_path, held_loss, hold_loss
from pipecompile.graph.stages import origin_of, relay, stage_of
from pipecompile.graph.storages import storage_key
from pipecompile.ir.encodings import Encoding
from pipecompile.ir.plan import BatchNormUpdate
from pipecompile.passes.batch_norm import MarkBatchNorms
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.place import Place
from pipecompile.passes.relay import Relay

__all__ = ["BoundaryTensor", "StageModule", "emit"]


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that crosses a boundary, in the form in which it is sent: contiguous.

    `name` is the node that computes it, `shape` and `dtype` are those of the message. To become
    contiguous its dimensions were permuted to `order`. `gaps` are the strides of a view with gaps
    or repeated elements, else None. The receiver restores the layout from both, because the
    rounding of later sums may depend on it:

        sender     (N, C, H, W), channels last ── permute (0, 2, 3, 1) ──▶ contiguous message
        receiver   message ── permute (0, 3, 1, 2) ──▶ (N, C, H, W), channels last
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    order: tuple[int, ...]
    gaps: tuple[int, ...] | None

    @staticmethod
    def of(node: fx.Node) -> BoundaryTensor:
        """Return how the value of `node` is sent."""
        value: Tensor = node.meta["val"]
        order = dense_order(value)
        shape = tuple(int(value.shape[dimension]) for dimension in order)
        return BoundaryTensor(
            name=origin_of(node),
            shape=shape,
            dtype=value.dtype,
            has_gradient=value.requires_grad,
            order=order,
            gaps=strides_with_gaps(value),
        )

    @property
    def is_permuted(self) -> bool:
        """Whether the dimensions of the message have another order than those of the tensor."""
        return self.order != tuple(range(len(self.order)))


@dataclass(frozen=True)
class StageModule:
    """One stage: `module` computes the tensors of `outputs` from those of `inputs`.

    The first stage takes the model's input tensors and the last one returns the model's output
    tensors; there `inputs` or `outputs` is empty. `gradient_inputs` says for each argument of the
    module whether a gradient for it is sent back. `written` are the names of the buffers that a
    forward writes to. `random` says whether a forward draws random numbers.
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
        """The buffers that a forward writes to, each once.

        They are looked up at each call, because `module.to` puts new tensors in their place.
        """
        buffers = map(self.module.get_buffer, self.written)
        return tuple({id(buffer): buffer for buffer in buffers}.values())


def emit(
    module: fx.GraphModule,
    assignment: Mapping[str, int],
    regions: Regions = MappingProxyType({}),
    encoded_runs: EncodedRuns = MappingProxyType({}),
    batch_norm: BatchNormUpdate = "microbatch",
    copied: Collection[str] = (),
) -> tuple[StageModule, ...]:
    """Return the stages of `module` (an instantiated capture); `assignment` maps nodes to stages.

    Each stage that reads the value of a node of `copied` runs it, whatever the assignment says.

    `regions` are recomputed in the backward, and the saved tensors of `encoded_runs` are encoded
    (see regions.py). Both require groups (`meta["group"]`); InputError names those that are not
    possible. With `batch_norm="minibatch"` running averages are left to `MinibatchStatistics`
    (runtime/batch_statistics.py). `module` is changed: its nodes are marked with their stages, and
    relays are inserted for tensors that skip stages.
    """
    if regions or encoded_runs:
        check_regions(module, assignment, regions, encoded_runs, copied)
    if batch_norm == "minibatch":
        apply_passes(module.graph, [MarkBatchNorms()])
    apply_passes(module.graph, [Place(assignment, copied), Relay()])
    count = 1 + max(map(stage_of, module.graph.nodes))
    return tuple(
        _stage(module, index, count, regions.get(index, ()), encoded_runs.get(index, ()))
        for index in range(count)
    )


def _stage(
    module: fx.GraphModule,
    index: int,
    count: int,
    regions: Sequence[Sequence[str]],
    encoded_runs: Sequence[tuple[Sequence[str], tuple[Encoding, ...]]],
) -> StageModule:
    """Return stage `index` of `count`, from a graph to which `Place` and `Relay` were applied."""
    nodes = [node for node in module.graph.nodes if stage_of(node) == index]
    received = _crossing(module.graph, index - 1) if index else []
    sent = _crossing(module.graph, index) if index < count - 1 else []
    graph = fx.Graph()
    copies = _copy_nodes(graph, index, nodes, received)
    if index < count - 1:
        _finish(graph, tuple(_prepare_to_send(graph, node, copies[node]) for node in sent))
    else:
        (output,) = (node for node in nodes if node.op == "output")
        _finish(graph, tuple(copies[node] for node in output.args[0]))
    # Plans name nodes as the captured graph does, and fx may have named the copies otherwise.
    copy_by_name = {origin_of(node): copies[node] for node in nodes if node in copies}
    replace_regions(
        graph,
        [[copy_by_name[name] for name in region] for region in regions],
        [([copy_by_name[name] for name in names], encodings) for names, encodings in encoded_runs],
    )
    # These passes come last: the bodies of regions have had them already.
    apply_passes(graph, STAGE_PASSES)
    placeholders = graph.find_nodes(op="placeholder")
    stage = fx.GraphModule(module, graph, class_name=f"Stage{index}")
    if index == count - 1:
        hold_loss(stage, held_loss(module))
    return StageModule(
        index=index,
        module=stage,
        inputs=tuple(map(BoundaryTensor.of, received)),
        outputs=tuple(map(BoundaryTensor.of, sent)),
        gradient_inputs=tuple(node.meta["val"].requires_grad for node in placeholders),
        written=_written_buffers(module, nodes),
        random=any(node.meta["random"] for node in nodes),
    )


def _copy_nodes(
    graph: fx.Graph, index: int, nodes: Sequence[fx.Node], received: Sequence[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copy the nodes of stage `index` into its graph and return the copy of each value.

    `received` are nodes of earlier stages, whose values become the placeholders.
    """
    copies: dict[fx.Node, fx.Node] = {}
    # The placeholders come first, while no other node of the stage has taken their names.
    arrived = [graph.placeholder(origin_of(node)) for node in received]
    for node, value in zip(received, arrived, strict=True):
        readers = [user for user in node.users if stage_of(user) == index]
        copies[node] = _restore_layout(graph, node, value, readers)
    # Relays read received values only. Without a gradient, a relay sends the message on as it
    # arrived, even if other nodes of this stage read the restored tensor. With a gradient it must
    # send the restored tensor, so that autograd sums the gradients of relay and other readers.
    relay_sources = dict(copies)
    for node, value in zip(received, arrived, strict=True):
        if not BoundaryTensor.of(node).has_gradient:
            relay_sources[node] = value
    for node in nodes:
        if node.op == "output":
            continue
        sources = relay_sources if _is_relay(node) else copies
        copy = graph.node_copy(node, sources.__getitem__)
        copy.meta["origin"] = origin_of(node)  # fx may have given the copy another name
        copies[node] = copy
    return copies


def _crossing(graph: fx.Graph, stage: int) -> list[fx.Node]:
    """Return the nodes of `stage` that the next stage reads, in the order of their values.

    A relay has the `order` of the node whose value it passes on.
    """
    nodes = [node for node in graph.nodes if stage_of(node) == stage]
    crossing = [node for node in nodes if any(stage_of(user) == stage + 1 for user in node.users)]
    # Sender and receiver each sort for themselves, and tensors have no names on their way: both
    # must find the same order, also where the sender has relays among its nodes.
    return sorted(crossing, key=lambda node: int(node.meta["order"]))


def _restore_layout(
    graph: fx.Graph, node: fx.Node, value: fx.Node, readers: Sequence[fx.Node]
) -> fx.Node:
    """Return the value of `node` in its own layout; `value` is the placeholder of its message."""
    boundary_tensor = BoundaryTensor.of(node)
    value.meta.update(_forwarded_meta(node))
    if all(map(_is_relay, readers)):
        return value  # it is only sent on, in the form of a message
    if boundary_tensor.has_gradient and any(map(_runs_under_autocast, readers)):
        # Autocast casts a leaf once for all readers and sums their gradients in the cast type.
        # In the unsplit model this tensor is no leaf; as a view it is none here either.
        value = graph.call_method("view_as", (value, value))
        value.meta.update(_forwarded_meta(node))
    if boundary_tensor.is_permuted:
        order = boundary_tensor.order
        # (0, 2, 3, 1) becomes (0, 3, 1, 2): where in the message each dimension of the tensor
        # lies.
        inverse = sorted(range(len(order)), key=order.__getitem__)
        value = graph.call_method("permute", (value, inverse))
        value.meta.update(_forwarded_meta(node))
    if boundary_tensor.gaps is not None:
        value = graph.call_function(restride, (value, boundary_tensor.gaps))
        value.meta.update(_forwarded_meta(node))
    return value


def _runs_under_autocast(node: fx.Node) -> bool:
    return bool((node.meta["autograd_context"] or current_context()).is_autocast)


def _prepare_to_send(graph: fx.Graph, node: fx.Node, value: fx.Node) -> fx.Node:
    """Return the message for the value of `node`, whose copy in the stage's graph is `value`."""
    if _is_relay(node) and value.all_input_nodes[0].op == "placeholder":
        return value  # it has the form of a message already
    boundary_tensor = BoundaryTensor.of(node)
    if boundary_tensor.is_permuted:
        value = graph.call_method("permute", (value, boundary_tensor.order))
        value.meta.update(_forwarded_meta(node))
    if boundary_tensor.gaps is not None:
        arguments = (value, boundary_tensor.name, boundary_tensor.gaps)
        check = graph.call_function(check_strides, arguments)
        check.meta.update(_forwarded_meta(node), val=None)
        value = graph.call_method("contiguous", (value,))
        value.meta.update(_forwarded_meta(node))
    return value


def _is_relay(node: fx.Node) -> bool:
    return node.target is relay


def _finish(graph: fx.Graph, values: Sequence[fx.Node]) -> None:
    graph.output(values).meta.update(random=False, mutates=(), autograd_context=None, val=None)


def _forwarded_meta(node: fx.Node) -> dict[str, object]:
    """Return the meta of a node that only changes the layout of the value of `node`."""
    return {**node.meta, "random": False, "mutates": (), "autograd_context": None}


def restride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of `tensor` with these strides; a stride of 0 repeats elements."""
    if any(size > 1 and not step for size, step in zip(tensor.shape, stride, strict=True)):
        expanded: Tensor = _Expanded.apply(tensor, stride)  # type: ignore[no-untyped-call]
        return expanded
    return torch.empty_strided(
        tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


class _Expanded(torch.autograd.Function):
    """A copy that has repeated elements only once in memory.

    Its gradient has every element, as the gradient of the sender's expanded view has: autograd's
    own formula would sum those of equal elements here, in another order than the unsplit model.
    """

    @staticmethod
    def forward(_: Any, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        distinct = tensor
        for dimension, step in enumerate(stride):
            if not step:  # the first element along this dimension stands for all
                distinct = distinct.narrow(dimension, 0, 1)
        copy = torch.empty_strided(
            distinct.shape, stride, dtype=tensor.dtype, device=tensor.device
        ).copy_(distinct)
        return copy.expand(tensor.shape)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _written_buffers(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """Return the names of the buffers that a forward of `nodes` writes to, each once."""
    written = {storage_key(tensor) for node in nodes for tensor in node.meta["mutates"]}
    names: dict[str, None] = {}
    # A module that writes is taken to write to all of its buffers, and so is any loss.
    for node in nodes:
        path = called_path(node)
        if path is not None and (node.meta["mutates"] or node.op == "output"):
            for name, _ in module.get_submodule(path).named_buffers():
                names[f"{path}.{name}"] = None
        elif node.op == "get_attr" and storage_key(node.meta["val"]) in written:
            names[str(node.target)] = None
    return tuple(names)
