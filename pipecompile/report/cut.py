"""The partition of a cost graph for people: loads as bars beside the ideal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipecompile.ir.cut import Cut
from pipecompile.report.text import bar, gap_text, objective_text, table, time_text

__all__ = ["cut_text"]

_WIDTH = 50


def cut_text(cut: Cut) -> str:
    """How good the cut is, and per stage (per rank, where stages share ranks) its load."""
    return "\n".join([*_header(cut), "", *_loads(cut)])


def _header(cut: Cut) -> Iterator[str]:
    loads = cut.loads_ns
    mean = sum(loads) / len(loads)
    ranks = len(loads) if _is_shared(cut) else sum(cut.replicas)
    yield f"{len(cut.replicas)} stages of {len(cut.stages)} nodes on {ranks} ranks"
    value, bound = (objective_text(cut.objective, number) for number in (cut.value, cut.bound))
    proof = "proven" if cut.proven else "not proven"
    yield f"  objective  {cut.objective} {value}, bound {bound}, gap {gap_text(cut.gap)}, {proof} ({cut.method})"
    yield f"  imbalance  {max(loads) / mean if mean else 1:.3f} (largest load {time_text(max(loads))} / mean load)"
    yield f"  search     {cut.seconds:.2f} s"


def _loads(cut: Cut) -> Iterator[str]:
    """The mean load is the ideal: a bar that ends before it has room, one that goes past it is waited for."""
    mean, largest = sum(cut.loads_ns) // len(cut.loads_ns), max(*cut.loads_ns, 1)
    rows = [["ideal", time_text(mean), bar(mean / largest, _WIDTH), "100.0%"]]
    for index, load in enumerate(cut.loads_ns):
        share = f"{load / mean:.1%}" if mean else ""
        rows.append([str(index), time_text(load), bar(load / largest, _WIDTH), share])
    if _is_shared(cut):
        return table([["rank", "load", "", "of mean"], *rows], left={2})
    nodes = Counter(cut.stages.values())
    of_stages = [
        ["", ""],
        *([str(nodes[stage]), str(count)] for stage, count in enumerate(cut.replicas)),
    ]
    rows = [[row[0], *more, *row[1:]] for row, more in zip(rows, of_stages, strict=True)]
    return table([["stage", "nodes", "replicas", "load", "", "of mean"], *rows], left={4})


def _is_shared(cut: Cut) -> bool:
    """Whether ranks have several stages: loads are then the ranks'."""
    return len(cut.loads_ns) < len(cut.replicas)
