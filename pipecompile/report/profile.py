"""Where time and memory of a microbatch go: by module, by operator, by node; from a cost graph alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.module_paths import block_of
from pipecompile.memory_model.optimizer import optimizer_bytes
from pipecompile.report.text import bar, size_text, table, time_text

__all__ = [
    "Profile",
    "Row",
    "headline",
    "profile_figures",
    "profile_of",
    "profile_text",
    "share",
    "shown",
    "totals",
]

_NAME_WIDTH = 34
_HEAVIEST = 10
_SMALL = 0.0005  # rows of smaller shares are summed up: they would read 0.0 %
ITSELF, MODEL = "(itself)", "(the model)"


@dataclass(frozen=True)
class Row:
    """What some nodes cost together; `depth` 1 is a part of the row of depth 0 above it.

    Parameters (and buffers) that several of the nodes read count once; those of two rows may overlap.
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

    `modules` are in the order of the forward, like blocks folded into one row ("transformer.h.0-11"), each with its
    parts. `operators` begin with the one that takes most of the time, and so do `heaviest`, which are nodes that are
    alike and come from the same line.
    `optimizer` names whose state `optimizer_bytes` are, None if none was asked for.
    """

    costs: str
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
    """Sums `graph` up; InputError if the optimizer is not known."""
    trained = [parameter for parameter in graph.parameters if parameter.trainable]
    state, _ = optimizer_bytes(
        trained, optimizer, master_weights=False, lists=graph.memory == "cuda"
    )
    operators = _grouped(graph.nodes, lambda node: node.operator or node.name).items()
    return Profile(
        costs=costs,
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


def _kind(node: Node) -> tuple[Any, ...]:
    backward = (node.backward_ns, node.backward_input_ns, node.backward_weight_ns)
    return node.operator, node.forward_ns, backward, node.parameter_bytes


def _heaviest(graph: CostGraph) -> list[tuple[Node, ...]]:
    alike: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        alike.setdefault((_kind(node), node.source), []).append(node)
    return sorted(map(tuple, alike.values()), key=lambda nodes: -sum(map(_time_ns, nodes)))[
        :_HEAVIEST
    ]


def _time_ns(node: Node) -> int:
    return node.forward_ns + node.backward_ns


def _sum_if_known(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _row(graph: CostGraph, name: str, nodes: Sequence[Node], depth: int = 0) -> Row:
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
    """Nodes by key, both in the order of the forward."""
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return groups


def _modules(graph: CostGraph) -> Iterator[Row]:
    """A row for each run of like blocks, and one for each part of them; what lies in no module is one row."""
    blocks = _grouped(graph.nodes, lambda node: block_of(node.module))
    for (parent, *_), run in groupby(
        blocks.items(), key=lambda item: (_parent(item[0]), *_likeness(item[1]))
    ):
        members = list(run)
        nodes = [node for _, members_nodes in members for node in members_nodes]
        first, last = members[0][0], members[-1][0]
        yield _row(
            graph,
            (f"{first}-{last[len(parent) + 1 :]}" if len(members) > 1 else first) or MODEL,
            nodes,
        )
        parts = _grouped(nodes, _part)
        if len(parts) > 1:
            yield from (_row(graph, name, part, depth=1) for name, part in parts.items())


def _parent(block: str) -> str:
    return re.sub(r"(^|\.)\d+$", "", block)


def _likeness(nodes: Sequence[Node]) -> tuple[Any, ...]:
    """Equal for blocks that do the same on parameters of the same sizes."""
    return [node.operator for node in nodes], [node.parameter_bytes for node in nodes]


def _part(node: Node) -> str:
    """The module below the block that a node lies in."""
    inner = node.module[len(block_of(node.module)) :].lstrip(".")
    return inner.split(".")[0] or ITSELF


def headline(profile: Profile) -> str:
    """One line: what is counted, and by which costs."""
    proof = "capture verified against the model" if profile.verified else "unverified capture"
    return f"one microbatch, costs {profile.costs}, {proof}"


def totals(profile: Profile) -> Iterator[tuple[str, str]]:
    """The figures of the whole, each with its name."""
    row = profile.total
    yield "nodes", f"{row.nodes}, {profile.distinct} distinct"
    yield "forward", time_text(row.forward_ns)
    halves = (profile.backward_input_ns, profile.backward_weight_ns)
    inputs, weights = ("?" if half is None else time_text(half) for half in halves)
    yield (
        "backward",
        f"{time_text(row.backward_ns)} (inputs alone {inputs}, weights alone {weights})",
    )
    yield "parameters", f"{size_text(row.parameter_bytes)} with buffers"
    yield "gradients", size_text(profile.gradient_bytes)
    if profile.optimizer is not None:
        yield "optimizer", f"{size_text(profile.optimizer_bytes)} ({profile.optimizer})"
    yield "saved", f"{size_text(row.saved_bytes)} for the backward"


def profile_text(profile: Profile) -> str:
    """Totals, then tables by module, operator and node, of at most 100 columns."""
    head = [headline(profile), *(f"  {name:<11} {figure}" for name, figure in totals(profile))]
    parts = [
        head,
        list(_table("module", profile.modules, profile.total)),
        list(_table("operator", shown(profile.operators, profile.total), profile.total)),
        list(_nodes(profile)),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _table(title: str, rows: Sequence[Row], total: Row) -> Iterator[str]:
    lines = [[title, "nodes", "forward", "backward", "", "time", "saved", "", "params", ""]]
    most = max((row.time_ns for row in rows), default=0)
    for row in rows:
        name = _fitted(f"{'  ' * row.depth}{_short(row.name)}", _NAME_WIDTH)
        times = [
            time_text(row.forward_ns),
            time_text(row.backward_ns),
            bar(row.time_ns / max(most, 1), 5),
        ]
        saved = [size_text(row.saved_bytes), share(row.saved_bytes, total.saved_bytes)]
        parameters = [
            size_text(row.parameter_bytes),
            share(row.parameter_bytes, total.parameter_bytes),
        ]
        lines.append(
            [name, str(row.nodes), *times, share(row.time_ns, total.time_ns), *saved, *parameters]
        )
    return table(lines, left={0, 4})


def shown(rows: Sequence[Row], total: Row) -> list[Row]:
    """Rows that matter to time or memory, and the sum of the others."""
    figures = ("time_ns", "saved_bytes", "parameter_bytes")
    large = [
        row
        for row in rows
        if any(getattr(row, name) > _SMALL * getattr(total, name) for name in figures)
    ]
    small = [row for row in rows if row not in large]
    sums = {
        name: sum(getattr(row, name) for row in small)
        for name in ("nodes", "forward_ns", "backward_ns", "saved_bytes", "parameter_bytes")
    }
    return [*large, Row(name=f"{len(small)} others", depth=0, **sums)] if small else large


def share(part: int, whole: int) -> str:
    """A part of the whole in percent."""
    return f"{part / max(whole, 1):.1%}"


def _nodes(profile: Profile) -> Iterator[str]:
    lines = [["node", "", "operator", "time", "", "saved", "source"]]
    for nodes in profile.heaviest:
        node, time = nodes[0], sum(map(_time_ns, nodes))
        alike = f"×{len(nodes)}" if len(nodes) > 1 else ""
        source = node.source if len(node.source) <= 28 else f"…{node.source[-27:]}"
        figures = [
            time_text(time),
            share(time, profile.total.time_ns),
            size_text(sum(n.saved_bytes for n in nodes)),
        ]
        operator = _fitted(_short(node.operator), 20)
        lines.append([_fitted(node.name, 20), alike, operator, *figures, source])
    return table(lines, left={0, 2, 6})


def _short(operator: str) -> str:
    return operator.removeprefix("torch.nn.functional.").removeprefix("torch.nn.")


def _fitted(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width // 3]}…{text[1 - width + width // 3 :]}"


def profile_figures(profile: Profile) -> dict[str, Any]:
    """The same for scripts; nodes have their source lines in the cost graph."""
    return {
        "costs": profile.costs,
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
                "ns": sum(map(_time_ns, nodes)),
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
