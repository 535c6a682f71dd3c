"""Which nodes of a graph may be recomputed, and what a region of them has to copy first."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from pipecompile.graph.storages import size_bytes, storage_key

__all__ = [
    "RecomputeLimits",
    "copied_bytes",
    "reads_module",
    "reads_written_buffer",
    "recompute_limits",
    "writing_modules",
    "written_storages",
]


@dataclass(frozen=True)
class RecomputeLimits:
    """What no region may do.

    `never` tells, by name, why a node may lie in none. Of each of `together` a region has all nodes or no node.
    """

    never: Mapping[str, str]
    together: tuple[tuple[str, ...], ...]


def recompute_limits(module: fx.GraphModule) -> RecomputeLimits:
    """The limits of regions in an instantiated capture, wherever it is cut. Requires `meta["group"]` (Group)."""
    nodes = _operations(module.graph)
    parameters = _storages_of_parameters(module.graph)
    never = {node.name: why for node in module.graph.nodes if (why := _hindrance(node, parameters))}
    bound = tuple(
        tuple(node.name for node in members) for members in _groups(nodes) if len(members) > 1
    )
    return RecomputeLimits(_spread(never, bound), bound)


def copied_bytes(module: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    """By node of an instantiated capture the sizes of the buffers that regions with it copy, since they write to them.

    All who touch such a buffer are in one group, so each group has its own: they are with the first node of it that
    writes. Requires `meta["group"]` (Group).
    """
    nodes = _operations(module.graph)
    found: dict[str, tuple[int, ...]] = {}
    for members in (*_groups(nodes), *([node] for node in nodes if node.meta["group"] is None)):
        written = written_storages(members)
        read = dict.fromkeys(source for node in members for source in node.all_input_nodes)
        copied = [
            operator.attrgetter(str(source.target))(module)
            for source in read
            if reads_written_buffer(source, written)
        ]
        for target in writing_modules(members, written):
            copied += module.get_submodule(target).buffers()
        if copied:
            first = next(node.name for node in members if node.meta["mutates"])
            found[first] = tuple(
                size_bytes([buffer]) for buffer in {id(each): each for each in copied}.values()
            )
    return found


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def _storages_of_parameters(graph: fx.Graph) -> set[int]:
    values = [node.meta["val"] for node in graph.nodes if node.op == "get_attr"]
    return {storage_key(value) for value in values if isinstance(value, nn.Parameter)}


def _hindrance(node: fx.Node, parameters: Collection[int]) -> str | None:
    """Why `node` may not run twice; `parameters` are the storages of those that the graph reads."""
    if node.op in ("placeholder", "get_attr", "output"):
        return "it computes nothing"
    if node.target is torch.autograd.grad:
        return "it goes back through the nodes before it while the forward runs"
    if node.meta.get("hook") and node.all_input_nodes[0].op in ("placeholder", "get_attr"):
        return f"it acts on {node.all_input_nodes[0].name} itself, which no region makes anew"
    if any(
        isinstance(value, nn.Parameter) or storage_key(value) in parameters
        for value in node.meta["mutates"]
    ):
        return "it writes to a parameter"
    return None


def _spread(never: Mapping[str, str], together: Sequence[Sequence[str]]) -> dict[str, str]:
    """`never`, and all that is bound to one of its nodes."""
    found = dict(never)
    growing = True
    while growing:
        growing = False
        for members in together:
            cause = next((name for name in members if name in found), None)
            missing = [name for name in members if name not in found] if cause else []
            found.update(
                (name, f"it goes with {cause}, of which {found[str(cause)]}") for name in missing
            )
            growing = growing or bool(missing)
    return found


def _groups(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Groups without inputs and output: they only keep a first and a last operation on a stage with these."""
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.meta["group"] is not None:
            found.setdefault(node.meta["group"], []).append(node)
    return iter(found.values())


def written_storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages that they write to."""
    return {storage_key(value) for node in nodes for value in node.meta["mutates"]}


def writing_modules(nodes: Iterable[fx.Node], written: Collection[int]) -> dict[str, None]:
    """Modules that they call and that have such storages, also those whose buffers others write to."""
    return {
        str(node.target): None
        for node in nodes
        if any(storage_key(value) in written for value in _state(node))
    }


def reads_written_buffer(source: fx.Node, written: Collection[int]) -> bool:
    """Whether it reads a buffer that lies in one of these storages."""
    return (
        source.op == "get_attr"
        and not reads_module(source)
        and storage_key(source.meta["val"]) in written
    )


def _state(node: fx.Node) -> tuple[Tensor, ...]:
    """Of the module that a node calls."""
    state: tuple[Tensor, ...] = node.meta["state"] if node.op == "call_module" else ()
    return state


def reads_module(read: fx.Node) -> bool:
    """Whether `read` stands for a module that a region calls."""
    return read.op == "get_attr" and read.meta["val"] is None
