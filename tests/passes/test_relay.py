from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from pipecompile.graph.propagation import propagate
from pipecompile.graph.stages import origin_of, relay, stage_of
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.place import Place
from pipecompile.passes.relay import Relay


def combine(left: Tensor, right: Tensor) -> Tensor:
    return left.sin() - 2 * right


def dag(sources: list[tuple[int, int]]) -> fx.GraphModule:
    """Return a graph: an input, then a node for each pair of positions of its sources."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for left, right in sources:
        nodes.append(graph.call_function(combine, (nodes[left], nodes[right])))
    graph.output(tuple(node for node in nodes if not node.users))
    module = fx.GraphModule(nn.Module(), graph)
    propagate(module, [torch.randn(3)])
    for node in graph.nodes:
        node.meta.update(random=False, autograd_context=None)
    return module


def placed(module: fx.GraphModule, stages: list[int]) -> fx.GraphModule:
    """Return the graph after Place and Relay; `stages` has an entry for each node in order."""
    assignment = {node.name: stage for node, stage in zip(module.graph.nodes, stages, strict=True)}
    apply_passes(module.graph, [Place(assignment), Relay()])
    module.recompile()
    return module


def relays(module: fx.GraphModule) -> list[tuple[str, int]]:
    """Return the origin and the stage of each relay."""
    return [
        (origin_of(node), stage_of(node)) for node in module.graph.nodes if node.target is relay
    ]


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int]]:
    """A random graph with stages that never decrease and are never empty."""
    size = draw(st.integers(1, 12))
    sources = [(draw(st.integers(0, node)), draw(st.integers(0, node))) for node in range(size)]
    grow = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    stages = [0, *(sum(grow[:node]) for node in range(1, size + 1))]
    return sources, [*stages, stages[-1]]


@given(dags())
def test_every_edge_spans_at_most_one_boundary_and_values_stay(
    case: tuple[list[tuple[int, int]], list[int]],
) -> None:
    sources, stages = case
    module, x = dag(sources), torch.randn(3)
    expected = module(x)
    after = placed(module, stages)
    edges = [(source, node) for node in after.graph.nodes for source in node.all_input_nodes]
    assert all(stage_of(node) - stage_of(source) in (0, 1) for source, node in edges)
    assert all(torch.equal(got, want) for got, want in zip(after(x), expected, strict=True))


@given(dags())
def test_a_value_is_relayed_once_in_each_stage_between(
    case: tuple[list[tuple[int, int]], list[int]],
) -> None:
    sources, stages = case
    module = dag(sources)
    where = dict(zip(module.graph.nodes, stages, strict=True))
    expected = [
        (node.name, stage)
        for node in module.graph.nodes
        if node.users
        for stage in range(where[node] + 1, max(where[user] for user in node.users))
    ]
    assert sorted(relays(placed(module, stages))) == sorted(expected)


def test_a_skip_over_two_stages() -> None:
    module = placed(dag([(0, 0), (1, 1), (2, 2), (3, 1)]), [0, 0, 1, 2, 3, 3])
    assert relays(module) == [("combine", 1), ("combine", 2)]


def test_neighbours_need_no_relay() -> None:
    assert relays(placed(dag([(0, 0), (1, 0), (2, 1)]), [0, 0, 1, 1, 1])) == []


def test_a_relay_is_known_by_the_value_it_carries() -> None:
    module = placed(dag([(0, 0), (1, 1), (2, 2), (3, 0)]), [0, 1, 2, 3, 4, 4])
    assert relays(module) == [("x", 1), ("x", 2), ("x", 3)]
    assert all(node.meta["origin"] == "x" for node in module.graph.nodes if node.target is relay)


def test_a_relay_has_no_side_effects_and_no_context() -> None:
    module = dag([(0, 0), (1, 1), (2, 0)])
    for node in module.graph.nodes:
        node.meta.update(random=True, autograd_context="context")
    (hop,) = [node for node in placed(module, [0, 1, 1, 2, 2]).graph.nodes if node.target is relay]
    assert (hop.meta["random"], hop.meta["mutates"], hop.meta["autograd_context"]) == (
        False,
        (),
        None,
    )
    assert hop.meta["val"].shape == (3,)
