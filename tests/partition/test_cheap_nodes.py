"""Which nodes are copied, and what that does to every cut of small graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import pytest
from cuts import node
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.api.choices import requested_options
from pipecompile.ir.copied_nodes import with_copies, without_copied
from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.links import FREE, Link, Links
from pipecompile.ir.plan import Provenance
from pipecompile.partition.cheap_nodes import TOTAL_SHARE, with_cheap_nodes_copied
from pipecompile.partition.objective import stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.planner.draft import draft
from pipecompile.report.plan_facts import plan_facts

LAYER_NS = 100_000
SLOW = Links.of(Link(bandwidth_bytes_per_s=10**9))


def cheap(name: str, ns: int) -> Node:
    return replace(node(name, ns), is_copyable=True)


def layers(count: int) -> list[Node]:
    return [node(f"layer{index}", LAYER_NS, 2 * LAYER_NS) for index in range(count)]


def value(producer: str, size: int, *consumers: str) -> Tensor:
    return Tensor(producer=producer, consumers=consumers, bytes=size, gradient_bytes=0)


def activations(count: int) -> Iterator[Tensor]:
    for index in range(count - 1):
        yield replace(value(f"layer{index}", 50, f"layer{index + 1}"), gradient_bytes=50)


def rotary(size: int = 1000, *, ns: int = 200, count: int = 4) -> CostGraph:
    """Return layers that all read what a position is turned into."""
    names = [f"layer{index}" for index in range(count)]
    return CostGraph(
        nodes=(cheap("positions", ns), cheap("cos", ns), *layers(count)),
        tensors=(
            value("positions", 8, "cos"),
            value("cos", size, *names),
            *activations(count),
        ),
    )


def test_what_needs_no_input_is_copied() -> None:
    assert with_cheap_nodes_copied(rotary(), 2, FREE).copied == ("positions", "cos")


def test_what_takes_long_is_copied_only_where_transfers_take_longer() -> None:
    # The mean load of two stages is 600 µs: 2 µs are next to nothing, 4 µs for both are not.
    graph = rotary(size=10_000, ns=2000)
    assert with_cheap_nodes_copied(graph, 2, FREE).copied == ("positions",)
    assert with_cheap_nodes_copied(graph, 2, SLOW).copied == ("positions", "cos")
    # All copies together take a hundredth of a load at most.
    assert with_cheap_nodes_copied(rotary(10**6, ns=5000), 2, SLOW).copied == ("cos",)
    assert with_cheap_nodes_copied(rotary(10**6, ns=7000), 2, SLOW).copied == ()


@pytest.mark.parametrize("change", [{"group": "g"}, {"is_copyable": False}, {"backward_ns": 1}])
def test_what_must_stay_is_not_copied(change: dict[str, object]) -> None:
    graph = rotary()
    first, second, *others = graph.nodes
    changed = replace(graph, nodes=(replace(first, **change), second, *others))
    # It is relayed instead to the copies of what reads it, which has more bytes.
    assert with_cheap_nodes_copied(changed, 2, FREE).copied == ("cos",)
    same_size = replace(changed, tensors=(value("positions", 1000, "cos"), *graph.tensors[1:]))
    assert with_cheap_nodes_copied(same_size, 2, FREE).copied == ()


def test_what_is_pinned_is_not_copied() -> None:
    assert with_cheap_nodes_copied(rotary(), 2, FREE, {"cos": 0}).copied == ()


def test_a_view_of_what_is_relayed_is_not_copied() -> None:
    graph = rotary()
    first, second, *others = graph.tensors
    viewed = replace(
        graph,
        nodes=(replace(graph.nodes[0], is_copyable=False), *graph.nodes[1:]),
        tensors=(replace(first, storage=0), replace(second, storage=0), *others),
        storages=(8,),
    )
    assert with_cheap_nodes_copied(viewed, 2, FREE).copied == ()


@st.composite
def graphs(draw: st.DrawFn) -> CostGraph:
    """Draw a model input and cheap nodes, which read earlier ones, and three layers that read
    some of them.
    """
    count = 3
    names = [f"layer{index}" for index in range(count)]
    made = ["ids"]
    nodes, readers = [node("ids", 0)], {"ids": [names[0]]}
    for index in range(draw(st.integers(1, 4))):
        name = f"cheap{index}"
        nodes.append(cheap(name, draw(st.integers(0, 1500))))
        for source in draw(st.sets(st.sampled_from(made), max_size=2)):
            readers[source].append(name)
        readers[name] = sorted(draw(st.sets(st.sampled_from(names), min_size=1)))
        made.append(name)
    sizes = [draw(st.integers(1, 2000)) for _ in made]
    return CostGraph(
        nodes=(*nodes, *layers(count)),
        tensors=(
            *(value(n, s, *readers[n]) for n, s in zip(made, sizes, strict=True)),
            *activations(count),
        ),
    )


def cuts(graph: CostGraph, k: int) -> Iterator[dict[str, int]]:
    """Yield all cuts of a graph into stages that are not empty."""
    names = [each.name for each in graph.nodes]
    for stages in product(range(k), repeat=len(names)):
        stage = dict(zip(names, stages, strict=True))
        flows = all(stage[t.producer] <= stage[name] for t in graph.tensors for name in t.consumers)
        if flows and set(stages) == set(range(k)) and not stage["ids"]:
            yield stage


def loads_with_copies(
    graph: CostGraph, k: int, links: Links, cut: Mapping[str, int]
) -> tuple[int, ...]:
    whole = with_copies(graph, cut)
    return stage_loads(PartitionProblem(whole.graph, k, links=links), whole.assignment)


@given(graphs(), st.sampled_from([FREE, SLOW]))
def test_no_stage_is_longer_than_with_relays_by_more_than_a_small_share(
    graph: CostGraph, links: Links
) -> None:
    k = 2
    copied = with_cheap_nodes_copied(graph, k, links)
    share = sum(n.forward_ns + n.backward_ns for n in graph.nodes) // k // TOTAL_SHARE
    for cut in cuts(graph, k):
        relayed = stage_loads(PartitionProblem(graph, k, links=links), cut)
        for more, less in zip(loads_with_copies(copied, k, links, cut), relayed, strict=True):
            assert more <= less + share


@given(graphs())
def test_each_stage_has_what_it_reads_and_nothing_else(graph: CostGraph) -> None:
    copied = with_cheap_nodes_copied(graph, 2, SLOW)
    for cut in cuts(without_copied(copied), 2):
        whole = with_copies(copied, cut)
        copies = {name for name in whole.assignment if name not in cut} - set(graph.copied)
        for tensor in whole.graph.tensors:
            stages = {whole.assignment[name] for name in tensor.consumers}
            if tensor.producer in copies:
                assert stages == {whole.assignment[tensor.producer]}
        # Every layer reads what it read before, each in its own stage.
        original = {name: whole.originals.get(name, name) for name in whole.assignment}
        edges = {
            (original[t.producer], original[n]) for t in whole.graph.tensors for n in t.consumers
        }
        assert edges == {
            (t.producer, name)
            for t in graph.tensors
            for name in t.consumers
            if {t.producer, name} <= {*original.values()}
        }


@given(graphs(), st.sampled_from([FREE, SLOW]), st.sampled_from(["variance", "max-load"]))
def test_a_plan_is_within_its_bound_and_near_the_best_of_all_cuts(
    graph: CostGraph, links: Links, objective: str
) -> None:
    k = 2
    plan = draft(
        graph,
        requested_options(k=k, costs="flops", objective=objective),
        graph_digest="",
        capture=Provenance(verified=False),
        microbatch_shapes=[],
        links=links,
    )
    copied = with_cheap_nodes_copied(graph, k, links)
    worth = max if objective == "max-load" else lambda loads: sum(load**2 for load in loads)
    values = [
        worth(loads_with_copies(copied, k, links, cut)) for cut in cuts(without_copied(copied), k)
    ]
    assert plan.search.bound <= min(values) <= plan.search.value
    least = plan_facts(plan).heaviest.least_ns
    most = (max(loads_with_copies(copied, k, FREE, cut)) for cut in cuts(without_copied(copied), k))
    assert least is not None and least <= min(most)
    # The search leaves copies out, which take a hundredth of a load: a fiftieth of its square.
    assert plan.search.value <= min(values) * (1 + 3 / TOTAL_SHARE)
    stages = {
        name: {i for i, s in enumerate(plan.stages) if name in s.nodes} for name in copied.copied
    }
    assert {name for name, several in stages.items() if len(several) > 1} == plan.copied
