"""What has changed in a model since its plan was made: nodes, and what they take, by block.

A node is known by the digest of what it does, since its name is numbered through the graph: add_7
of one model may be add_8 of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from typing import NamedTuple, TypeVar

from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.finding import Finding
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Plan
from pipecompile.ir.plurals import counted
from pipecompile.ir.size import size_text

__all__ = [
    "Outline",
    "OutlinedNode",
    "drift_findings",
    "memory_drift_findings",
    "node_findings",
    "outline",
    "plan_outline",
]

T = TypeVar("T")
_SHOWN_NAMES = 3


class OutlinedNode(NamedTuple):
    """A node of a model: the path of its module, its name, and the digest of what it does."""

    module: str
    name: str
    digest: str


@dataclass(frozen=True)
class _Block:
    """The nodes of one block in the order of the forward; `ns` is None where it is not known."""

    nodes: tuple[OutlinedNode, ...]
    ns: int | None = None


Outline = Mapping[str, _Block]
"""The blocks of a model by path, in the order of the forward."""
_EMPTY = _Block(())


def outline(nodes: Iterable[OutlinedNode], ns_by_module: Mapping[str, int] | None) -> Outline:
    """Return the blocks that `nodes` make up; `ns_by_module` is None where no times are known."""
    members: dict[str, list[OutlinedNode]] = {}
    for node in nodes:
        members.setdefault(block_of(node.module), []).append(node)
    if ns_by_module is None:
        return {block: _Block(tuple(each)) for block, each in members.items()}
    # A block whose nodes take no time has one of 0, and not none.
    times = dict.fromkeys(members, 0)
    for module, ns in ns_by_module.items():
        times[block_of(module)] += ns
    return {block: _Block(tuple(each), times[block]) for block, each in members.items()}


def plan_outline(plan: Plan) -> Outline | None:
    """Return the blocks of the model that a plan was made for; None if its file does not tell."""
    placed: list[tuple[int, OutlinedNode]] = []
    ns_by_module: dict[str, int] = {}
    for stage in plan.stages:
        names = iter(stage.own_nodes)
        if not all(run.digests for run in stage.module_runs) or not stage.module_runs:
            return None
        for run in stage.module_runs:
            ns_by_module[run.module] = ns_by_module.get(run.module, 0) + run.ns
            # Nodes of two stages may alternate in the forward: places sort them below.
            for place, digest in enumerate(run.digests, run.place):
                placed.append((place, OutlinedNode(run.module, next(names), digest)))
    return outline((node for _, node in sorted(placed)), ns_by_module)


@dataclass(frozen=True)
class _Change:
    """The nodes of a block that changed (by their names now), came and went."""

    block: str
    before: _Block
    after: _Block
    changed: tuple[str, ...]
    came: tuple[str, ...]
    went: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.changed) + len(self.came) + len(self.went)

    @property
    def times_differ(self) -> bool:
        """Whether it takes another time, as far as both are known."""
        return None not in (self.before.ns, self.after.ns) and self.before.ns != self.after.ns

    @property
    def shape(self) -> Hashable:
        """What is the same for blocks that changed alike."""
        numbers = tuple(map(len, (self.changed, self.came, self.went)))
        sizes = len(self.before.nodes), len(self.after.nodes)
        times = self.before.ns, self.after.ns
        return numbers, sizes, times if self.times_differ else None


def node_findings(old: Outline, new: Outline, unit: TimeUnit = "ns") -> list[Finding]:
    """Return a failed finding for each block whose nodes differ; there is one for those in a row
    that changed alike.

    Blocks that only one of the models has came or went. `value` counts nodes.
    """
    changes = [change for change in _changes(old, new) if change.count]
    order = list(dict.fromkeys([*old, *new]))
    findings = []
    for alike in _runs(changes, lambda change: change.shape):
        blocks = _blocks_text([change.block for change in alike], order)
        count = sum(change.count for change in alike)
        message = f"{blocks}: {_change_text(alike, unit)}"
        findings.append(Finding(code="nodes", message=message, value=count, limit=0))
    return findings


def _changes(old: Outline, new: Outline) -> Iterator[_Change]:
    for block in dict.fromkeys([*old, *new]):
        before, after = old.get(block, _EMPTY), new.get(block, _EMPTY)
        changed: list[str] = []
        came: list[str] = []
        went: list[str] = []
        digests = ([node.digest for node in each.nodes] for each in (before, after))
        for _, i, end, j, new_end in _differing(*digests):
            # Of 2 nodes that are replaced by 3, 2 have changed and 1 came.
            pairs = min(end - i, new_end - j)
            changed += (node.name for node in after.nodes[j : j + pairs])
            came += (node.name for node in after.nodes[j + pairs : new_end])
            went += (node.name for node in before.nodes[i + pairs : end])
        yield _Change(block, before, after, tuple(changed), tuple(came), tuple(went))


def _differing(old: list[str], new: list[str]) -> Iterator[tuple[str, int, int, int, int]]:
    # Without `autojunk`: in long lists it ignores what is frequent, and layers repeat their
    # digests.
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return (step for step in matcher.get_opcodes() if step[0] != "equal")


def _change_text(alike: list[_Change], unit: TimeUnit) -> str:
    """Return what changed in each of some blocks; names are those of the first one."""
    first = alike[0]
    nodes = counted(len(first.after.nodes or first.before.nodes), "node")
    before, after = first.before.ns, first.after.ns
    each = "each " * (len(alike) > 1)
    if not first.before.nodes:
        return f"came, {each}{nodes}{'' if after is None else f', {time_with_unit(after, unit)}'}"
    if not first.after.nodes:
        return f"went, {each}{nodes}"
    said = {f" of {nodes} changed": first.changed, " came": first.came, " went": first.went}
    parts = [f"{len(names)}{what} ({_names_text(names)})" for what, names in said.items() if names]
    if first.times_differ:
        parts.append(_times_text(before or 0, after or 0, unit))
    return f"{each}{', '.join(parts)}"


def _names_text(names: tuple[str, ...]) -> str:
    shown = names if len(names) <= _SHOWN_NAMES else (*names[: _SHOWN_NAMES - 1], "…", names[-1])
    return ", ".join(shown)


def drift_findings(
    old: Outline, new: Outline, limit: float, unit: TimeUnit = "ns"
) -> list[Finding]:
    """Return a failed finding for each block with the same nodes whose time differs by more than
    `limit`, a share; there is one for those in a row that drifted alike. If there are none, return
    one that passed; nothing where no times are known.
    """
    # A block whose nodes changed takes another time for that reason, which `node_findings` says.
    drifts = {
        change.block: (change.before.ns, change.after.ns)
        for change in _changes(old, new)
        if not change.count and change.before.ns is not None and change.after.ns is not None
    }
    over = [block for block, times in drifts.items() if abs(_drift(*times)) > limit]
    if not over:
        return [_all_within(drifts, limit)] if drifts else []
    return [
        _drift_finding(
            _blocks_text(alike, list(new)), [drifts[block] for block in alike], limit, unit
        )
        # Alike is what has the same tenth of a per cent: in measured times no two layers agree in
        # more.
        for alike in _runs(over, lambda block: f"{_drift(*drifts[block]):.3f}")
    ]


def _drift(before: int, after: int) -> float:
    """Return the relative change of a time; what took nothing is compared with the least time."""
    return (after - before) / max(before, 1)


def _drift_finding(
    where: str, times: list[tuple[int, int]], limit: float, unit: TimeUnit
) -> Finding:
    # Blocks that drifted alike drift together as much as each of them, and read as one line.
    before, after = (sum(each) for each in zip(*times, strict=True))
    drift = _drift(before, after)
    text = f"time {drift:+.1%} ({_times_text(before, after, unit)})"
    return Finding(
        code="drift",
        message=f"{where}: {text}, over {limit:.1%}",
        value=drift,
        limit=limit,
    )


def _all_within(drifts: Mapping[str, tuple[int, int]], limit: float) -> Finding:
    drift, block = max(
        ((_drift(*times), block) for block, times in drifts.items()),
        key=lambda pair: abs(pair[0]),
    )
    most = f", the largest drift is {drift:+.1%} of {_block_text(block)}" if drift else ""
    return Finding(
        code="drift",
        message=f"times are within {limit:.1%} of the plan's{most}",
        passed=True,
        value=drift,
        limit=limit,
    )


def memory_drift_findings(old: Plan, new: Plan, limit: float) -> list[Finding]:
    """Return a failed finding for each rank that may need more by `new` than by `old`, by more than
    `limit`, a share; the plans have the same ranks.
    """
    needs = zip(old.prediction.memory, new.prediction.memory, strict=True)
    # Only more than planned is a finding: a rank that needs less breaks no cap.
    bounds = [(before.total.bound, after.total.bound) for before, after in needs]
    return [
        Finding(
            code="drift",
            message=f"rank {rank} may need {size_text(after)}, {_drift(before, after):+.1%} "
            f"against {size_text(before)} in the plan, over {limit:.1%}",
            rank=rank,
            value=_drift(before, after),
            limit=limit,
        )
        for rank, (before, after) in enumerate(bounds)
        if _drift(before, after) > limit
    ]


def _times_text(before: int, after: int, unit: TimeUnit) -> str:
    return f"{time_with_unit(before, unit)} → {time_with_unit(after, unit)}"


def _blocks_text(blocks: list[str], order: list[str]) -> str:
    """Return a range for blocks that are neighbours in `order`, else a list, perhaps shortened."""
    names = [_block_text(block) for block in blocks]
    if len(blocks) == 1:
        return names[0]
    first = order.index(blocks[0])
    # h.3, h.4, h.5 changed alike are "h.3 … h.5 (3 blocks)"; h.3 and h.7 are named.
    is_range = order[first : first + len(blocks)] == blocks
    text = f"{names[0]} … {names[-1]}" if is_range else _names_text(tuple(names))
    return f"{text} ({len(blocks)} blocks)"


def _block_text(block: str) -> str:
    return block or "outside of modules"


def _runs(items: Iterable[T], key: Callable[[T], Hashable]) -> Iterator[list[T]]:
    """Yield the runs of neighbours that have the same key."""
    # groupby joins neighbours only, which is what is wanted: twelve layers that each got a node are
    #     h.0 … h.11 (12 blocks): each 1 came (…)
    # and the fourth of them, if it changed otherwise, splits that into three lines.
    return (list(run) for _, run in groupby(items, key=key))
