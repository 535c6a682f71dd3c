"""Limits of recompute: which nodes may be recomputed, and which buffers their regions copy.

The planner keeps to `recompute_limits` when it chooses regions, and code generation when a user
names regions. `copied_bytes` says what a region costs besides its time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from pipecompile.graph.storages import size_bytes, storage_key

__all__ = [
    "RecomputeLimits",
    "copied_bytes",
    "is_module_read",
    "is_written_buffer_read",
    "recompute_limits",
    "writing_modules",
    "written_buffers",
    "written_storages",
]


@dataclass(frozen=True)
class RecomputeLimits:
    """The limits that every region keeps to.

    `never` maps the name of a node that no region may contain to the reason. Of each tuple in
    `together` a region contains all nodes or none.
    """

    never: Mapping[str, str]
    together: tuple[tuple[str, ...], ...]


def recompute_limits(module: fx.GraphModule) -> RecomputeLimits:
    """Return the limits of regions in an instantiated capture; they hold for every cut.

    Requires `meta["group"]` (Group).
    """
    parameters = _parameter_storages(module.graph)
    never: dict[str, str] = {}
    for node in module.graph.nodes:
        reason = _reason_against(node, parameters)
        if reason is not None:
            never[node.name] = reason
    # A view and what is written through it, say: a region with the view alone would be written to
    # by a node that its second run does not have.
    groups = _groups(_operations(module.graph))
    together = tuple(tuple(node.name for node in nodes) for nodes in groups if len(nodes) > 1)
    return RecomputeLimits(_with_bound_nodes(never, together), together)


def copied_bytes(module: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    """Return, by node, the sizes of the buffers that a region with this node copies.

    A region copies the buffers that it writes to, so that both of its runs begin with the same
    values. All nodes that touch such a buffer are in one group, and a region contains all of a
    group or nothing, so the sizes are noted with the first node of the group that writes.

    Requires an instantiated capture with `meta["group"]` (Group).
    """
    nodes = _operations(module.graph)
    # A node without a group may write to a buffer that no other node touches.
    singles = [[node] for node in nodes if node.meta["group"] is None]
    sizes: dict[str, tuple[int, ...]] = {}
    for members in (*_groups(nodes), *singles):
        # By identity: a buffer that a module owns and the graph reads too has one copy.
        # A node that calls BatchNorm1d(64) has (256, 256, 8) bytes: running mean, running
        # variance, and the number of batches.
        buffers = {id(buffer): buffer for buffer in written_buffers(module, members)}
        if buffers:
            first = next(node.name for node in members if node.meta["mutates"])
            sizes[first] = tuple(size_bytes([buffer]) for buffer in buffers.values())
    return sizes


def written_buffers(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[Tensor]:
    """Return the buffers that these nodes write to, which a region of them copies; one may be there
    twice.
    """
    written = written_storages(nodes)
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    copied = [
        operator.attrgetter(str(source.target))(module)
        for source in sources
        if is_written_buffer_read(source, written)
    ]
    # Of a module that is called as a whole nothing tells which of its buffers it writes to: all
    # of them are copied.
    for target in writing_modules(nodes, written):
        copied += module.get_submodule(target).buffers()
    return copied


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def _parameter_storages(graph: fx.Graph) -> set[int]:
    """Return the storages of the parameters that the graph itself reads."""
    values = [node.meta["val"] for node in graph.nodes if node.op == "get_attr"]
    return {storage_key(value) for value in values if isinstance(value, nn.Parameter)}


def _reason_against(node: fx.Node, parameters: Collection[int]) -> str | None:
    """Return why `node` may not run twice, None if it may; `parameters` are their storages."""
    if node.op in ("placeholder", "get_attr", "output"):
        return "it computes nothing"
    if node.target is torch.autograd.grad:
        return "it goes back through the nodes before it while the forward runs"
    if node.meta.get("keeps_state"):
        return "it computes with what it has kept of other microbatches"
    for value in node.meta["mutates"]:
        # A second run would write a second time: only buffers have copies to run on.
        if isinstance(value, nn.Parameter) or storage_key(value) in parameters:
            return "it writes to a parameter"
    return None


def _with_bound_nodes(
    never: Mapping[str, str], together: Sequence[Sequence[str]]
) -> dict[str, str]:
    """Return `never` and all nodes that are bound to one of its nodes.

    Chains are followed: if a may not run twice and (a, b) and (b, c) are together, neither may c.
    """
    reasons = dict(never)
    grown = True
    while grown:
        grown = False
        for members in together:
            # A pass over all groups may bind a node that a group before it contains too, so there
            # are passes until none finds more.
            cause = next((name for name in members if name in reasons), None)
            if cause is None:
                continue
            for name in members:
                if name not in reasons:
                    reasons[name] = f"it goes with {cause}, of which {reasons[cause]}"
                    grown = True
    return reasons


def _groups(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes of each group.

    `nodes` are without inputs and output. The groups of these only keep the first and the last
    operation on a stage with them, which is no limit for a region.
    """
    groups: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.meta["group"] is not None:
            groups.setdefault(node.meta["group"], []).append(node)
    return list(groups.values())


def written_storages(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the storages that the nodes write to."""
    return {storage_key(value) for node in nodes for value in node.meta["mutates"]}


def writing_modules(nodes: Iterable[fx.Node], written: Collection[int]) -> dict[str, None]:
    """Return, in order, the paths of called modules whose state lies in `written` storages.

    A module whose buffers another node writes to is among them.
    """
    return {
        str(node.target): None
        for node in nodes
        if any(storage_key(value) in written for value in _called_state(node))
    }


def is_written_buffer_read(source: fx.Node, written: Collection[int]) -> bool:
    """Return whether `source` reads a buffer that lies in one of the `written` storages."""
    return (
        source.op == "get_attr"
        and not is_module_read(source)
        and storage_key(source.meta["val"]) in written
    )


def _called_state(node: fx.Node) -> tuple[Tensor, ...]:
    """Return the parameters and buffers of the module that `node` calls, if it calls one."""
    state: tuple[Tensor, ...] = node.meta["state"] if node.op == "call_module" else ()
    return state


def is_module_read(read: fx.Node) -> bool:
    """Return whether `read` stands for a module, which a region calls, and not for a tensor."""
    return read.op == "get_attr" and read.meta["val"] is None
