"""Levels of the module tree, and cuts at each of them, on random models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import msgspec
import networkx as nx
import pytest
from cuts import chain, node
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.graph import CostGraph, Tensor
from pipecompile.ir.links import FREE, Links
from pipecompile.partition.check import faults
from pipecompile.partition.hierarchy import Modules, inside, kept_together
from pipecompile.partition.opening import NEAR, at_stage_ends, keeping, solve_opening
from pipecompile.partition.problem import Memory, Problem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve

LEVELS = ("operators", "modules", "blocks")  # from fine to coarse
SECONDS = 1.0


@st.composite
def models(draw: st.DrawFn) -> CostGraph:
    """A forward through modules in modules and lists of them; each operator reads a few earlier ones."""

    def forward(path: str, depth: int) -> Iterator[str]:
        """The module of each operator that a module's forward runs."""
        for step in draw(
            st.lists(st.sampled_from(["own", "leaf", "module", "list"]), min_size=1, max_size=3)
        ):
            inner = f"{path}.{step}".lstrip(".")
            if step == "own" or depth == 0:
                yield path
            elif step == "leaf":
                yield inner
            elif step == "module":
                yield from forward(inner, depth - 1)
            else:
                for place in range(draw(st.integers(1, 3))):
                    yield from forward(f"{inner}.{place}", depth - 1)

    paths = list(forward("", 3))[:14]
    nodes = tuple(
        msgspec.structs.replace(
            node(f"n{index}", draw(st.integers(0, 9)), held=draw(st.integers(0, 3))), module=path
        )
        for index, path in enumerate(paths)
    )
    read = [
        draw(st.sets(st.integers(max(0, i - 4), i - 1), max_size=2)) | {i - 1}
        for i in range(1, len(nodes))
    ]
    consumers = {
        i: tuple(f"n{j}" for j, sources in enumerate(read, 1) if i in sources)
        for i in range(len(nodes))
    }
    tensors = (
        Tensor(producer=f"n{i}", consumers=to, bytes=1, gradient_bytes=1)
        for i, to in consumers.items()
        if to
    )
    return CostGraph(nodes=nodes, tensors=tuple(tensors))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """With free links or not, with and without caps, one stage a rank or two."""
    graph, k = draw(models()), draw(st.integers(1, 4))
    placement = (0, 1) * (k // 2) if k % 2 == 0 and draw(st.booleans()) else tuple(range(k))
    cap = draw(st.none() | st.integers(3, 12))
    return Problem(
        graph,
        k,
        objective=draw(st.sampled_from(["variance", "max-load"])),
        links=draw(st.sampled_from([FREE, Links(bandwidth_bytes_per_s=10**9, latency_ns=0)])),
        placement=placement,
        memory=None
        if cap is None
        else Memory.simple(graph, (cap,) * (max(placement) + 1), (1,) * k, 1),
    )


def _solved(problem: Problem, granularity: str) -> Partition | None:
    try:
        return solve(replace(problem, granularity=granularity), seconds=SECONDS)
    except InfeasibleError:
        return None


def _model(*paths: str, times: dict[str, int] | None = None) -> CostGraph:
    """A chain of operators in these modules; each takes 1 ns unless `times` says otherwise for its path."""
    graph = chain([(times or {}).get(path, 1) for path in paths])
    nodes = tuple(
        msgspec.structs.replace(n, module=path) for n, path in zip(graph.nodes, paths, strict=True)
    )
    return msgspec.structs.replace(graph, nodes=nodes)


@pytest.mark.parametrize(
    ("path", "beside", "block"),
    [
        ("transformer.h.3.attn.c_attn", ["transformer.h.3"], "transformer.h.3"),
        ("h.3.mlp.0", ["h.3", "h.3.mlp.2"], "h.3"),  # single layers in a list are no blocks
        (
            "encoder.stages.0.layers.1.layer.0.convolution",
            ["encoder.stages.0.layers.1"],
            "encoder.stages.0.layers.1",
        ),
        ("layers.0.blocks.1.mlp.fc1", ["layers.0.blocks.1"], "layers.0.blocks.1"),
        ("layers.0.downsample.norm", ["layers.0.blocks.1", "layers.0.blocks.1.mlp"], None),
        (
            "encoder.block.0.layer.1.DenseReluDense.wi",
            ["encoder.block.0.layer.1"],
            "encoder.block.0.layer.1",
        ),
        ("features.0.1", ["features.0.0"], "features.0"),
        ("3", ["4"], "3"),
        ("layer1.2.conv1", ["layer1.2"], "layer1.2"),
        ("lm_head", ["h.3"], None),
        ("", ["h.3"], None),
    ],
)
def test_blocks_are_the_outermost_entries_of_lists_that_have_operators_of_their_own(
    path: str, beside: list[str], block: str | None
) -> None:
    assert Modules.of([path, *beside]).block(path) == block


def test_modules_are_cut_where_a_submodule_runs_between() -> None:
    """A layer's norm, attention, its sum and norm, the rest; so outside of blocks, but not in the model's forward."""
    inner = ("ln_1", "attn.q", "attn", "attn.o", "", "ln_2", "mlp.up", "mlp.down", "")
    layer = [f"t.h.0.{name}".rstrip(".") for name in inner]
    graph = _model("", "t.wte", "t", "t.drop", *layer, "t.ln_f", "t", "head", "")
    assert kept_together(graph, "operators") == kept_together(graph, "auto") == ()
    assert kept_together(graph, "modules") == (
        ("n1", "n2", "n3"),
        ("n5", "n6", "n7"),
        ("n8", "n9"),
        ("n10", "n11"),
        ("n13", "n14"),
    )
    block = tuple(f"n{index}" for index in range(4, 13))
    assert kept_together(graph, "blocks") == (("n1", "n2", "n3"), block, ("n13", "n14"))
    assert inside(graph) == {block: (("n5", "n6", "n7"), ("n8", "n9"), ("n10", "n11"))}


def test_a_block_that_runs_again_after_another_is_another_unit() -> None:
    graph = _model("h.0.a", "h.0.b", "h.1.a", "h.1.b", "h.0.a", "h.0.b")
    assert kept_together(graph, "blocks") == (("n0", "n1"), ("n2", "n3"), ("n4", "n5"))


@given(models())
def test_levels_lie_in_each_other_and_their_units_form_no_cycle(graph: CostGraph) -> None:
    module_of = {name: names for names in kept_together(graph, "modules") for name in names}
    for granularity in ("modules", "blocks"):
        unit_of = {n.name: (n.name,) for n in graph.nodes}
        unit_of |= {name: names for names in kept_together(graph, granularity) for name in names}
        assert all(
            set(module_of.get(name, ())) <= set(unit)
            for name, unit in unit_of.items()
            if len(unit) > 1
        )
        edges = (
            (unit_of[t.producer], unit_of[name]) for t in graph.tensors for name in t.consumers
        )
        quotient = nx.DiGraph(edge for edge in edges if edge[0] != edge[1])
        quotient.add_nodes_from(unit_of.values())
        assert nx.is_directed_acyclic_graph(quotient)
        assert set(Problem(graph, 1, granularity=granularity).units) == set(quotient)


@given(problems())
def test_coarser_levels_are_cuts_of_the_operators_and_worth_no_more(problem: Problem) -> None:
    found = [_solved(problem, level) for level in LEVELS]
    for cut in found:
        assert cut is None or not list(faults(problem, cut.assignment))
    for finer, coarser in pairwise(found):
        if coarser is not None:
            assert finer is not None
            assert finer.search.value <= coarser.search.value or not finer.search.proven


@given(problems())
def test_blocks_are_opened_until_the_cut_is_near_the_bound_or_nothing_is_left_at_its_ends(
    problem: Problem,
) -> None:
    operators, blocks = _solved(problem, "operators"), _solved(problem, "blocks")
    if operators is None:
        assert _solved(problem, "auto") is None
        return
    found, closed = solve_opening(problem, SECONDS)
    value, bound = found.search.value, found.search.bound
    assert not list(faults(problem, found.assignment))
    assert bound <= operators.search.value
    assert blocks is None or value <= blocks.search.value
    assert found.search.proven == (value == bound)
    assert found.search.gap == ((value - bound) / value if value else 0)
    near = (value - bound) * NEAR[problem.objective] <= value
    assert near or not at_stage_ends(keeping(problem, closed), found.assignment, closed)
    assert _solved(problem, "auto") == found


def test_only_blocks_where_stages_end_are_opened() -> None:
    """Five blocks of two modules, each of 2 ns: 8 | 12 between blocks, and 10 | 10 where two of them are opened."""
    graph = _model(
        *(f"h.{block}.{module}.{op}" for block in range(5) for module in "ab" for op in "xy")
    )
    found, closed = solve_opening(Problem(graph, 2, objective="max-load"), SECONDS)
    assert (found.search.value, found.search.proven) == (10, True)
    assert found.assignment["n9"] < found.assignment["n10"]
    assert [len(names) for names in closed] in ([4, 2, 2, 2, 2, 4, 4], [4, 4, 2, 2, 2, 2, 4])


def test_the_bound_of_a_cut_between_blocks_is_about_blocks_and_that_of_auto_about_operators() -> (
    None
):
    """503 | 500 is the best between blocks, and near enough to 501 | 502 that none is opened."""
    graph = _model(
        "h.0.a",
        "h.0.b",
        "h.0.c",
        "h.1.a",
        times={"h.0.a": 499, "h.0.b": 2, "h.0.c": 2, "h.1.a": 500},
    )
    blocks = solve(Problem(graph, 2, objective="max-load", granularity="blocks"))
    assert (blocks.search.value, blocks.search.bound, blocks.search.proven) == (503, 503, True)
    found, closed = solve_opening(Problem(graph, 2, objective="max-load"), SECONDS)
    assert (found.search.value, found.search.bound, found.search.proven) == (503, 502, False)
    assert closed == (("n0", "n1", "n2"),)


def test_blocks_are_opened_where_they_are_too_few_or_too_large_for_a_rank() -> None:
    graph = _model("h.0.a.x", "h.0.a.y", "h.0.b.x", "h.0.b.y", "h.1.a.x")
    with pytest.raises(
        InfeasibleError, match=r"at most 2 stages .*choose k ≤ 2, or a finer granularity"
    ):
        solve(Problem(graph, 3, granularity="blocks"))
    assert len(solve_opening(Problem(graph, 3), SECONDS)[0].loads_ns) == 3
    with pytest.raises(InfeasibleError, match=r"at most 5 stages; choose k ≤ 5$"):
        solve(Problem(graph, 6, granularity="auto"))
    heavy = msgspec.structs.replace(
        graph, nodes=tuple(msgspec.structs.replace(n, parameter_bytes=1) for n in graph.nodes)
    )
    memory = Memory.simple(heavy, (3, 3), (1, 1), 1)
    with pytest.raises(InfeasibleError, match="a rank may hold 3 bytes"):
        solve(Problem(heavy, 2, memory=memory, granularity="blocks"))
    found, closed = solve_opening(Problem(heavy, 2, memory=memory), SECONDS)
    assert list(found.assignment.values()) == [0, 0, 1, 1, 1]
    assert closed == (("n0", "n1"), ("n2", "n3"))


def test_a_model_without_modules_is_cut_between_operators() -> None:
    graph = chain([3, 1, 4, 1, 5, 9, 2, 6])
    operators = solve(Problem(graph, 3))
    assert all(
        solve(Problem(graph, 3, granularity=level)) == operators
        for level in ("modules", "blocks", "auto")
    )


def test_other_granularities_are_refused() -> None:
    with pytest.raises(
        InputError, match="granularity 'layers' is not known; choose one of operators, modules"
    ):
        Problem(chain([1]), 1, granularity="layers")
