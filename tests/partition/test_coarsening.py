"""Levels of the module tree, and cuts at each of them, on random models."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import pytest
from cuts import chain
from hypothesis import given
from module_trees import in_modules, level_problems, models, solved_at

from pipecompile.errors import InputError
from pipecompile.ir.graph import CostGraph
from pipecompile.partition.coarsening import ModuleTree, coarse_groups, finer_groups
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve
from pipecompile.partition.violations import violations

LEVELS = ("operators", "modules", "blocks")  # from fine to coarse


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
    assert ModuleTree.of([path, *beside]).block(path) == block


def test_modules_are_cut_where_a_submodule_runs_between() -> None:
    """A layer's runs: norm, attention, sum and norm, the rest. The model's own forward has none."""
    inner = ("ln_1", "attn.q", "attn", "attn.o", "", "ln_2", "mlp.up", "mlp.down", "")
    layer = [f"t.h.0.{name}".rstrip(".") for name in inner]
    graph = in_modules("", "t.wte", "t", "t.drop", *layer, "t.ln_f", "t", "head", "")
    assert coarse_groups(graph, "operators") == coarse_groups(graph, "auto") == ()
    assert coarse_groups(graph, "modules") == (
        ("n1", "n2", "n3"),
        ("n5", "n6", "n7"),
        ("n8", "n9"),
        ("n10", "n11"),
        ("n13", "n14"),
    )
    block = tuple(f"n{index}" for index in range(4, 13))
    assert coarse_groups(graph, "blocks") == (("n1", "n2", "n3"), block, ("n13", "n14"))
    assert finer_groups(graph) == {block: (("n5", "n6", "n7"), ("n8", "n9"), ("n10", "n11"))}


def test_a_block_that_runs_again_after_another_is_another_unit() -> None:
    graph = in_modules("h.0.a", "h.0.b", "h.1.a", "h.1.b", "h.0.a", "h.0.b")
    assert coarse_groups(graph, "blocks") == (("n0", "n1"), ("n2", "n3"), ("n4", "n5"))


@given(models())
def test_levels_lie_in_each_other_and_their_units_form_no_cycle(graph: CostGraph) -> None:
    module_of = {name: names for names in coarse_groups(graph, "modules") for name in names}
    for granularity in ("modules", "blocks"):
        unit_of = {n.name: (n.name,) for n in graph.nodes}
        unit_of |= {name: names for names in coarse_groups(graph, granularity) for name in names}
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
        assert set(PartitionProblem(graph, 1, granularity=granularity).units) == set(quotient)


@given(level_problems())
def test_coarser_levels_are_cuts_of_the_operators_and_worth_no_more(
    problem: PartitionProblem,
) -> None:
    cuts = [solved_at(problem, level) for level in LEVELS]
    for cut in cuts:
        assert cut is None or not list(violations(problem, cut.assignment))
    for finer, coarser in pairwise(cuts):
        if coarser is not None:
            assert finer is not None
            assert finer.search.value <= coarser.search.value or not finer.search.proven


def test_a_model_without_modules_is_cut_between_operators() -> None:
    graph = chain([3, 1, 4, 1, 5, 9, 2, 6])
    operators = solve(PartitionProblem(graph, 3))
    assert all(
        solve(PartitionProblem(graph, 3, granularity=level)) == operators
        for level in ("modules", "blocks", "auto")
    )


def test_other_granularities_are_refused() -> None:
    with pytest.raises(
        InputError, match="unknown granularity 'layers'; choose from operators, modules"
    ):
        PartitionProblem(chain([1]), 1, granularity="layers")
