"""The partition of a cost graph for people: what each stage takes, as bars beside the ideal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipecompile.ir.cut import Cut
from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.imbalance import imbalance_of
from pipecompile.ir.plurals import counted
from pipecompile.report.tables import DrawTable, bar, plain_table
from pipecompile.report.units import (
    RELATIVE_NOTE,
    gap_text,
    objective_label,
    objective_text,
    percent,
    square_text,
)

__all__ = ["cut_text"]

_WIDTH = 45
_COST = "load + transfers"  # transfers as `--comm` counts them


def cut_text(cut: Cut, draw: DrawTable = plain_table) -> str:
    """Return how good the cut is, and what each stage takes, or each rank if stages share ranks."""
    return "\n".join([*_header(cut), "", *draw(_rows(cut), {2 if _is_shared(cut) else 4})])


def _header(cut: Cut) -> Iterator[str]:
    """Yield the figures above the table: the sizes, the objective and its bound, the balance."""
    loads, unit = cut.loads_with_transfers_ns, cut.time_unit
    ranks = len(loads) if _is_shared(cut) else sum(cut.replicas)
    value = objective_text(cut.objective, cut.value, unit)
    bound = objective_text(cut.objective, cut.bound, unit)
    proof = "proven" if cut.proven else "not proven"
    stages, nodes = counted(len(cut.replicas), "stage"), counted(len(cut.stages), "node")
    yield f"{stages} of {nodes} on {counted(ranks, 'rank')}"
    yield (
        f"  objective  {objective_label(cut.objective)} {value}, bound {bound}, "
        f"gap {gap_text(cut.gap)}, {proof} ({cut.method})"
    )
    yield (
        f"  imbalance  {imbalance_of(loads):.3f} "
        f"(largest {time_with_unit(max(loads), unit)} / mean), "
        f"variance {square_text(cut.variance_ns2, unit)}"
    )
    yield f"  search     {cut.seconds:.2f} s"
    if max(cut.replicas) > 1 and cut.replicas[-1] == 1:
        replicas = ",".join(map(str, cut.replicas))
        yield f"  to run it  --stage-replicas {replicas} of plan, for the model of these costs"
    if unit == "relative":
        yield f"  times      {RELATIVE_NOTE}"


def _rows(cut: Cut) -> list[list[str]]:
    """Return the rows of the table, after the ideal: the mean, of which each stage would have as
    much.
    """
    # A bar that ends before the ideal has room; one that goes past it is waited for.
    loads = cut.loads_with_transfers_ns
    mean, largest = sum(loads) // len(loads), max(*loads, 1)
    rows = [["ideal", time_text(mean, cut.time_unit), bar(mean / largest, _WIDTH), "100.0%"]]
    for index, load in enumerate(loads):
        filled, share = bar(load / largest, _WIDTH), percent(load, mean)
        rows.append([str(index), time_text(load, cut.time_unit), filled, share])
    if _is_shared(cut):
        return [["rank", _COST, "", "of mean"], *rows]
    nodes = Counter(cut.stages.values())
    sizes = [["", ""]]
    sizes += [[str(nodes[stage]), str(count)] for stage, count in enumerate(cut.replicas)]
    # The columns of nodes and replicas stand behind the first one; the row of the ideal has none.
    wide = [[first, *size, *rest] for (first, *rest), size in zip(rows, sizes, strict=True)]
    return [["stage", "nodes", "replicas", _COST, "", "of mean"], *wide]


def _is_shared(cut: Cut) -> bool:
    """Return whether ranks have several stages: there is then one load for each rank."""
    return len(cut.loads_with_transfers_ns) < len(cut.replicas)
