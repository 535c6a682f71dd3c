"""Where time and memory of a microbatch go, by module, operator and node: sums over a cost graph.

profile_text.py and profile_page.py show them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph, Node, TimeUnit
from pipecompile.ir.plurals import counted
from pipecompile.memory_model.optimizer import optimizer_bytes

__all__ = ["Profile", "Row", "large_rows", "profile_figures", "profile_of", "time_of"]

_HEAVIEST = 10
_SMALL = 0.0005  # rows of smaller shares are summed up: they would read 0.0 %
ITSELF, OUTSIDE, LOSS = "(itself)", "(outside of modules)", "(loss)"


@dataclass(frozen=True)
class Row:
    """What some nodes cost together. A row is part of the last row before it of a smaller `depth`.

    Parameters (and buffers) that several of the nodes read count once; two rows may share some.
    """

    name: str
    depth: int
    nodes: int
    forward_ns: int
    backward_ns: int
    saved_bytes: int
    parameter_bytes: int

    @property
    def time_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns


@dataclass(frozen=True)
class Profile:
    """One microbatch of a model under the cost model `costs`.

    `modules` are in the order of the forward, each with its parts, and like blocks as one row
    ("h.0-11"). `operators` begin with the one that takes most of the time, and so do `heaviest`,
    which are nodes that are alike and come from the same line. `optimizer` names the optimizer
    whose state is `optimizer_bytes`; None if none was named.
    """

    costs: str
    time_unit: TimeUnit
    verified: bool
    total: Row
    distinct: int
    backward_input_ns: int | None
    backward_weight_ns: int | None
    gradient_bytes: int
    optimizer: str | None
    optimizer_bytes: int
    modules: tuple[Row, ...]
    operators: tuple[Row, ...]
    heaviest: tuple[tuple[Node, ...], ...]


def profile_of(
    graph: CostGraph, costs: str, *, verified: bool, optimizer: str | None = None
) -> Profile:
    """Return the sums over `graph`; InputError if the optimizer is not known."""
    graph = replace(graph, nodes=tuple(map(_with_loss_named, graph.nodes)))
    trained = [parameter for parameter in graph.parameters if parameter.trainable]
    state, _ = optimizer_bytes(
        trained, optimizer, master_weights=False, lists=graph.allocator == "cuda"
    )
    operators = _grouped(graph.nodes, lambda node: node.operator or node.name).items()
    return Profile(
        costs=costs,
        time_unit=graph.time_unit,
        verified=verified,
        total=_row(graph, "all", graph.nodes),
        distinct=len({_kind(node) for node in graph.nodes}),
        backward_input_ns=_sum_if_known(node.backward_input_ns for node in graph.nodes),
        backward_weight_ns=_sum_if_known(node.backward_weight_ns for node in graph.nodes),
        gradient_bytes=sum(parameter.bytes for parameter in trained),
        optimizer=optimizer,
        optimizer_bytes=sum(state),
        modules=tuple(_modules(graph)),
        operators=tuple(
            sorted(
                (_row(graph, *pair) for pair in operators), key=lambda row: (-row.time_ns, row.name)
            )
        ),
        heaviest=tuple(_heaviest(graph)),
    )


def _with_loss_named(node: Node) -> Node:
    """Return the node; if it is the output and takes time, under the name of the loss, which it
    runs.
    """
    if node.operator != "output" or not node.forward_ns + node.backward_ns:
        return node
    return replace(node, operator="loss", module=LOSS)


def _kind(node: Node) -> tuple[Any, ...]:
    """Return what distinct nodes differ in."""
    backward = (node.backward_ns, node.backward_input_ns, node.backward_weight_ns)
    # Nodes that do the same are measured once, so that their times are equal to the nanosecond.
    return node.operator, node.forward_ns, backward, node.parameter_bytes


def _heaviest(graph: CostGraph) -> list[tuple[Node, ...]]:
    alike: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        alike.setdefault((_kind(node), node.source), []).append(node)
    # Together: twelve products of 1 ms each, from one line, come before one of 5 ms.
    slowest_first = sorted(map(tuple, alike.values()), key=time_of, reverse=True)
    return slowest_first[:_HEAVIEST]


def time_of(nodes: Iterable[Node]) -> int:
    """Return the time of the nodes' forwards and backwards."""
    return sum(node.forward_ns + node.backward_ns for node in nodes)


def _sum_if_known(values: Iterable[int | None]) -> int | None:
    known = list(values)
    # A sum without some of them would read as the whole.
    return None if None in known else sum(value for value in known if value is not None)


def _row(graph: CostGraph, name: str, nodes: Sequence[Node], depth: int = 0) -> Row:
    """Return the sums over some nodes, under a name."""
    # A parameter that several nodes read is there once.
    read = {parameter for node in nodes for parameter in node.parameters}
    sizes = [graph.parameter_by_name[parameter].bytes for parameter in read]
    return Row(
        name=name,
        depth=depth,
        nodes=len(nodes),
        forward_ns=sum(node.forward_ns for node in nodes),
        backward_ns=sum(node.backward_ns for node in nodes),
        saved_bytes=sum(node.saved_bytes for node in nodes),
        # A graph from elsewhere may say of its parameters only how large they are.
        parameter_bytes=sum(sizes)
        if graph.parameters
        else sum(node.parameter_bytes for node in nodes),
    )


def _grouped(nodes: Iterable[Node], key: Callable[[Node], str]) -> dict[str, list[Node]]:
    """Return the nodes by key, both in the order of the forward."""
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return groups


@dataclass(frozen=True)
class _Member:
    """A node, and the path of its module below the row that is looked at."""

    path: tuple[str, ...]
    node: Node


def _modules(graph: CostGraph) -> Iterator[Row]:
    """Yield a row for each module, in the order of the forward, each with its parts below it.

    Like blocks that follow each other are one row. The nodes of

        transformer.wte, transformer.h.0.attn.query, transformer.h.0, transformer.h.1.attn.query, …

    give

        transformer
          wte
          h.0-1
            attn
            (itself)
    """
    members = [_Member(tuple(filter(None, node.module.split("."))), node) for node in graph.nodes]
    yield from _rows(graph, members, depth=0)


def _rows(graph: CostGraph, members: Sequence[_Member], depth: int) -> Iterator[Row]:
    """Yield the rows of `members`, each followed by the rows of its parts."""
    for name, inner in _folded(members):
        yield _row(graph, name or (ITSELF if depth else OUTSIDE), [m.node for m in inner], depth)
        if re.search(r"\d$", name):  # a block: its parts are shown, but not what lies in them
            inner = [_Member(member.path[:1], member.node) for member in inner]
        # One child only would repeat the row above it.
        if len({_child(member.path) for member in inner}) > 1:
            yield from _rows(graph, inner, depth + 1)


def _folded(members: Sequence[_Member]) -> Iterator[tuple[str, list[_Member]]]:
    """Yield the children by name, like blocks as one, with members whose paths begin below them."""
    children: dict[str, list[_Member]] = {}
    for member in members:
        children.setdefault(_child(member.path), []).append(member)
    # h.0, h.1, h.2 that do the same are h.0-2; a block that differs ends the run.
    for (parent, *_), run in groupby(children.items(), key=_fold_key):
        names, groups = zip(*run, strict=True)
        name = f"{names[0]}-{names[-1].removeprefix(parent)}" if len(names) > 1 else names[0]
        inner = [
            _Member(member.path[len(child.split(".")) if child else 0 :], member.node)
            for child, group in zip(names, groups, strict=True)
            for member in group
        ]
        yield _only_child(name, inner)


def _fold_key(child: tuple[str, list[_Member]]) -> tuple[Any, ...]:
    """Return a key that blocks of one list share if they do the same on parameters of the same
    sizes.
    """
    name, members = child
    # Eleven blocks that do the same and a last one without dropout are h.0-10 and h.11.
    nodes = [member.node for member in members]
    # Without times, since those of like blocks may differ where they were measured.
    likeness = [node.operator for node in nodes], [node.parameter_bytes for node in nodes]
    return (re.sub(r"\d+$", "", name), *likeness)


def _child(path: tuple[str, ...]) -> str:
    """Return the first module of a path, with the number behind it if it is a list of blocks."""
    # h.0 is one step, so that blocks stand side by side and not below a row `h`.
    is_list = len(path) > 1 and path[1].isdigit() and not path[0].isdigit()
    return ".".join(path[: 1 + is_list])


def _only_child(name: str, members: list[_Member]) -> tuple[str, list[_Member]]:
    """Return a module as its child if that is all it has: `vision.encoder` instead of two rows."""
    child = _child(members[0].path)
    if re.search(r"\d$", name) or not child or any(_child(m.path) != child for m in members):
        return name, members
    length = len(child.split("."))
    return _only_child(f"{name}.{child}", [_Member(m.path[length:], m.node) for m in members])


def large_rows(rows: Sequence[Row], total: Row) -> list[Row]:
    """Return the rows that matter to time or memory, and one row with the sum of the others."""
    large = [row for row in rows if _is_large(row, total)]
    small = [row for row in rows if row not in large]
    if not small:
        return large
    others = Row(
        name=counted(len(small), "other"),
        depth=0,
        nodes=sum(row.nodes for row in small),
        forward_ns=sum(row.forward_ns for row in small),
        backward_ns=sum(row.backward_ns for row in small),
        saved_bytes=sum(row.saved_bytes for row in small),
        parameter_bytes=sum(row.parameter_bytes for row in small),
    )
    return [*large, others]


def _is_large(row: Row, total: Row) -> bool:
    pairs = (
        (row.time_ns, total.time_ns),
        (row.saved_bytes, total.saved_bytes),
        (row.parameter_bytes, total.parameter_bytes),
    )
    return any(part > _SMALL * whole for part, whole in pairs)


def profile_figures(profile: Profile) -> dict[str, Any]:
    """Return the same for scripts; nodes have their source lines in the cost graph."""
    return {
        "costs": profile.costs,
        "time_unit": profile.time_unit,
        "verified": profile.verified,
        "distinct": profile.distinct,
        "backward_input_ns": profile.backward_input_ns,
        "backward_weight_ns": profile.backward_weight_ns,
        "gradient_bytes": profile.gradient_bytes,
        "optimizer": profile.optimizer,
        "optimizer_bytes": profile.optimizer_bytes,
        "total": _figures(profile.total),
        "modules": list(map(_figures, profile.modules)),
        "operators": list(map(_figures, profile.operators)),
        "heaviest": [
            {
                "name": nodes[0].name,
                "nodes": len(nodes),
                "ns": time_of(nodes),
                "source": nodes[0].source,
            }
            for nodes in profile.heaviest
        ],
    }


def _figures(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "depth": row.depth,
        "nodes": row.nodes,
        "forward_ns": row.forward_ns,
        "backward_ns": row.backward_ns,
        "saved_bytes": row.saved_bytes,
        "parameter_bytes": row.parameter_bytes,
    }
