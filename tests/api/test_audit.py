"""Audits of layouts: the best cuts beside lists of all cuts, and the published controls."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.api.audit import audit_file, audit_graph
from pipecompile.api.choices import requested_options
from pipecompile.errors import InputError
from pipecompile.ir.audit import Audit
from pipecompile.ir.graph import CostGraph
from pipecompile.layouts.layer_times import layer_times
from pipecompile.report.audit_text import findings_of
from tests.layouts.models import decoder

HEADER = "part,forward_ms,backward_ms"


def audited(table: str | CostGraph, layout: str, **choices: Any) -> Audit:
    """The audit of a layout on a table of layer times, or on a graph."""
    graph = layer_times(f"{HEADER}\n{table}") if isinstance(table, str) else table
    return audit_graph(graph, requested_options(layout=layout, costs="flops", **choices))


def least_heaviest(times: list[int], k: int, ranks: int) -> int:
    """The lightest heaviest rank of all cuts of a chain, whose stages lie around and around."""
    loads = []
    for inner in combinations(range(1, len(times)), k - 1):
        stages = [sum(times[a:b]) for a, b in pairwise((0, *inner, len(times)))]
        loads.append(max(sum(stages[rank::ranks]) for rank in range(ranks)))
    return min(loads)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=5), st.data())
def test_the_best_cuts_are_those_of_all_cuts(halves: list[tuple[int, int]], data: Any) -> None:
    head, around = data.draw(st.integers(1, 9)), data.draw(st.booleans())
    rows = [f"attention,0,{a}\nmlp,0,{p}" for a, p in halves]
    text = "\n".join(["E,0,1", *rows, f"L,0,{head}"])
    k = 4 if around else 3
    ranks = 2 if around else 3
    choices = {"schedule": "interleaved-1f1b", "stages_per_rank": 2} if around else {}
    layout = "E|" + "t" * (len(halves) - (k == 4)) + "|" + "t|" * (k == 4) + "L"
    audit = audited(text, layout, **choices)
    whole = [1, *(a + p for a, p in halves), head]
    parted = [1, *(time for pair in halves for time in pair), head]
    ms = 1_000_000
    for cut, times in zip(audit.best, (whole, parted), strict=True):
        best = least_heaviest(times, k, ranks) * ms
        assert cut.bound_ns <= best == cut.heaviest_ns
        # One stage a rank is solved exactly.
        assert around or cut.proven
    assert audit.hand.heaviest_ns == sum(audit.hand.loads_ns[audit.hand.heaviest_rank :][:1])
    assert all(cut.step_bound_ns <= cut.step_ns for cut in audit.cuts)
    assert all(cut.memory_bound <= max(cut.memory) for cut in audit.cuts)


LLAMA_70B = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"
LOOPED = {"schedule": "interleaved-1f1b", "stages_per_rank": 5, "microbatches": 8}


def test_a_published_layout_is_the_best_between_layers_and_beaten_inside_them() -> None:
    # Forward FLOPs of Llama 3 70B: a layer as 1, its attention about a quarter, the head 1.14.
    audit = audited("E,0,0\nattention*80,0,0.24\nmlp*80,0,0.76\nL,0,1.14", LLAMA_70B, **LOOPED)
    layers, halves = audit.best
    assert audit.hand.heaviest_ns == layers.heaviest_ns == layers.bound_ns == 11 * 10**6
    assert (layers.grain, halves.grain) == ("layers", "halves")
    assert halves.heaviest_ns <= 10.3 * 10**6
    assert audit.hand.parts == {"t": 11.0}
    assert (halves.form, halves.text.count("|")) == ("megatron-hybrid", 39)


def test_parts_are_counted_with_those_that_take_as_long() -> None:
    audit = audited("E,0,1\nt,1,1\nt*3,1,2\nL,0,2", "Et|tt|tL")
    parts = [(p.name, p.count, p.forward_ns, p.backward_ns) for p in audit.parts]
    ms = 10**6
    assert parts == [("E", 1, 0, ms), ("t", 1, ms, ms), ("t", 3, ms, 2 * ms), ("L", 1, 0, 2 * ms)]
    assert "no cuts inside layers" in audit.notes[0]


def test_a_graph_of_operators_is_cut_at_every_grain() -> None:
    audit = audited(decoder(4), "Ett|ttL")
    assert [cut.grain for cut in audit.cuts] == [None, "layers", "halves", "operators"]
    heaviest = [cut.heaviest_ns for cut in audit.cuts]
    assert heaviest == sorted(heaviest, reverse=True)
    bounds = [cut.bound_ns for cut in audit.best]
    assert bounds == sorted(bounds, reverse=True)
    assert [tensor.name for tensor in audit.shared] == ["tokens", "mask"]


def test_a_layout_that_parts_layers_is_bounded_by_cuts_that_do() -> None:
    stages = '[["embed", "layers.0", "layers.1.norm1"], ["layers", "norm", "head"]]'
    audit = audited(decoder(2), stages)
    layers, _, operators = audit.best
    assert audit.hand.bound_ns == operators.bound_ns <= layers.bound_ns


def test_a_layout_over_its_cap_is_audited_without_it() -> None:
    sizes = "E,1,1,1GB,0\nt*4,1,2,8GB,0\nL,1,1,1GB,0"
    graph = layer_times(f"{HEADER},parameters,saved\n{sizes}")
    options = requested_options(layout="E|ttttL", costs="flops", memory="50GB")
    audit = audit_graph(graph, options)
    assert audit.first_full_rank == 1 and audit.caps == (50 * 10**9,) * 2
    assert audit.notes[-1] == "the layout does not fit the memory cap; it is planned without one"
    layers = audit.best[0]
    assert max(layers.memory) <= 50 * 10**9 < audit.hand.memory[1]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=2, max_size=5),
    st.integers(1, 100),
)
def test_no_bound_is_above_its_cut_whatever_fits(
    layers: list[tuple[int, int]], cap_gib: int
) -> None:
    """What bounds the cuts that fit a cap bounds neither a layout nor a grain that does not."""
    rows = [f"attention,1,{time},{size}GB,0\nmlp,1,1,1GB,0" for time, size in layers]
    graph = layer_times(
        "\n".join([f"{HEADER},parameters,saved", "E,1,1,1GB,0", *rows, "L,1,1,1GB,0"])
    )
    layout = "Et|" + "t" * (len(layers) - 1) + "L"
    options = requested_options(layout=layout, costs="flops", memory=f"{cap_gib}GiB")
    audit = audit_graph(graph, options)
    ms = 10**6
    for cut in audit.cuts:
        assert cut.bound_ns <= cut.heaviest_ns
    whole = [2 * ms, *((3 + time) * ms for time, _ in layers), 2 * ms]
    free = least_heaviest(whole, 2, 2)
    if not audit.fits(audit.hand):
        assert audit.hand.bound_ns <= free


def test_a_cut_that_is_as_heavy_is_no_better_one() -> None:
    audit = audited("E,0,1\nt*3,0,3\nL,0,1", "Et|ttL")
    equal = replace(audit.best[0], bound_ns=audit.hand.heaviest_ns * 100 // 101)
    found = next(findings_of(replace(audit, cuts=(audit.hand, equal))))
    assert found == (
        "no lighter cut between layers was found; the layout is 1.0% over what one can reach"
    )


def test_files_and_what_is_no_audit(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text(f"{HEADER}\nE,1,1\nt*4,1,2\nL,1,1\n")
    assert audit_file(path, layout="Ett|ttL").costs == "table:times.csv"
    with pytest.raises(InputError, match="has the costs; leave one of them out"):
        audit_file(path, layout="Ett|ttL", costs="flops")
    with pytest.raises(InputError, match="an audit is of a layout; give one"):
        audit_file(path)
    with pytest.raises(InputError, match="of training steps; choose a schedule with backwards"):
        audit_file(path, layout="Ett|ttL", schedule="forward-only")
