"""Links in plans: equal ones are one link, slow ones are charged exactly and shunned."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cuts import chain, graphs
from hypothesis import assume, given
from hypothesis import strategies as st

from pipecompile.api.links import links_for, links_of
from pipecompile.errors import FormatError, InputError, PipecompileError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE, Link, Links
from pipecompile.ir.plan import Options, Plan, Provenance
from pipecompile.ir.serialization import encode, write
from pipecompile.planner.draft import draft

TWO = Links(bandwidth_bytes_per_s=None, latency_ns=((0, 5), (7, 0)))


def _options(
    k: int, microbatches: int = 2, schedule: str = "gpipe", objective: str = "max-load"
) -> Options:
    return Options(
        k=k,
        microbatches=microbatches,
        schedule=schedule,
        objective=objective,
        recompute="none",
        memory_bytes=None,
        costs="table",
    )


def _planned(graph: CostGraph, options: Options, links: Links) -> Plan:
    return draft(
        graph,
        options,
        graph_digest="0" * 64,
        capture=Provenance(verified=True),
        microbatch_shapes=[(1,)],
        links=links,
    )


def test_links_come_from_a_file_a_mapping_or_nowhere(tmp_path: Path) -> None:
    write(path := tmp_path / "links.json", encode(TWO))
    assert (
        links_of(path)
        == links_of(str(path))
        == links_of(msgspec.to_builtins(TWO))
        == links_of(TWO)
        == TWO
    )
    assert links_of(None) == FREE
    with pytest.raises(FormatError, match=r"^links: .*`\$\.latency_ns`"):
        links_of({"bandwidth_bytes_per_s": None, "latency_ns": -1})


def test_links_of_another_number_of_ranks_are_refused_with_both(tmp_path: Path) -> None:
    write(path := tmp_path / "links.json", encode(TWO))
    assert links_for(_options(2), path) == TWO
    with pytest.raises(
        InputError, match=r"links\.json is for 2 ranks, but the plan has 3; .*--nproc-per-node 3"
    ):
        links_for(_options(3), path)
    assert (
        links_for(msgspec.structs.replace(_options(4), stages_per_rank=2, schedule="zb-v"), TWO)
        == TWO
    )
    plan = _planned(chain([1, 1]), _options(2), TWO)
    with pytest.raises(ValueError, match="links for 3 ranks do not connect the plan's 2"):
        msgspec.structs.replace(
            plan, links=Links(bandwidth_bytes_per_s=None, latency_ns=((0,) * 3,) * 3)
        )


@given(
    graphs(6),
    st.sampled_from(["gpipe", "1f1b"]),
    st.sampled_from(["variance", "max-load"]),
    st.data(),
)
def test_equal_links_plan_as_one_link(
    graph: CostGraph, schedule: str, objective: str, data: st.DataObject
) -> None:
    rate, delay = data.draw(st.sampled_from([None, 3 * 10**8])), data.draw(st.integers(0, 3))
    k = data.draw(st.integers(1, 3))
    options = _options(k, schedule=schedule, objective=objective)
    one = Links(bandwidth_bytes_per_s=rate, latency_ns=delay)
    many = Links(bandwidth_bytes_per_s=((rate,) * k,) * k, latency_ns=((delay,) * k,) * k)
    try:
        plan = _planned(graph, options, one)
    except PipecompileError:  # too few units
        assume(False)
        raise
    assert msgspec.structs.replace(_planned(graph, options, many), links=one) == plan


def test_a_slow_link_is_charged_exactly() -> None:
    """Two stages, forwards of nothing and backwards of 10 ns, as `chain` makes them; two
    microbatches under GPipe.

    Both values leave rank 0 at 0 and arrive at 3; rank 1 does backwards until 13 and 23, whose
    gradients arrive 40 later, at 53 and 63; rank 0 does its own until 63 and 73.
    """
    graph = chain([10, 10], size=1)
    graph = msgspec.structs.replace(
        graph, tensors=tuple(msgspec.structs.replace(t, gradient_bytes=1) for t in graph.tensors)
    )
    links = Links(bandwidth_bytes_per_s=None, latency_ns=((0, 3), (40, 0)))
    plan = _planned(graph, _options(2), links)
    assert plan.prediction.step_ns == 73
    assert plan.search.values["max_load_ns"] == 10 + 3 + 40
    back = _planned(
        graph, _options(2), Links(bandwidth_bytes_per_s=None, latency_ns=((0, 40), (3, 0)))
    )
    assert back.prediction.step_ns == 40 + 10 + 10 + 3 + 10


def test_two_nodes_are_joined_where_little_crosses() -> None:
    """Ranks 0 and 1 are one node, 2 and 3 another; between nodes a byte takes 100 times as long.

    Eight equal layers; what leaves the third is small, what leaves the others large. Evenly cut,
    the large tensor behind the fourth would cross between the nodes: the planner takes the third
    instead.
    """
    fast, slow = 10**9, 10**7
    rates = tuple(tuple(fast if a // 2 == b // 2 else slow for b in range(4)) for a in range(4))
    nodes = Links(bandwidth_bytes_per_s=rates, latency_ns=0)
    graph = chain([100] * 8, size=10)
    third = msgspec.structs.replace(graph.tensors[2], bytes=1)
    graph = msgspec.structs.replace(graph, tensors=(*graph.tensors[:2], third, *graph.tensors[3:]))
    even = _planned(graph, _options(4), Links.of(Link(bandwidth_bytes_per_s=fast)))
    joined = _planned(graph, _options(4), nodes)
    assert [even.assignment[f"n{i}"] for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [joined.assignment["n2"], joined.assignment["n3"]] == [1, 2]
    # Five layers are left for ranks 2 and 3: 200 + 100 (from rank 1) + 10 (to rank 3), or 300 + 10.
    assert joined.search.proven
    assert joined.search.value == 310
