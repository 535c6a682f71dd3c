"""Plans of graphs whose cheap nodes are copied into the stages that read them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph, Tensor
from pipecompile.ir.plan import Options, Recompute
from pipecompile.schedule import selection
from tests.cuts import node as node_of
from tests.planner.test_open_choices import planned
from tests.sweeps import examples

CAP = 1 << 30  # more than any of these graphs needs


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SEARCH_SECONDS", 0.02)


def layers(forward_ns: list[int]) -> CostGraph:
    """Layers of two nodes, each with the forward of that place, all of which read the same cosines.

    What passes from one layer to the next is larger than what lies within a layer.
    """
    names = [f"{part}{layer}" for layer in range(len(forward_ns) // 2) for part in "ab"]
    sizes = [100 if name.startswith("a") else 10_000 for name in names]
    nodes = [replace(node_of("cos", 2), is_copyable=True, forward_peak_bytes=64)]
    tensors = [
        Tensor(producer="cos", consumers=tuple(names), bytes=64, gradient_bytes=0, storage=0)
    ]
    for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
        node = node_of(name, forward_ns[place], 4000)
        # Storage 0 has the cosines, and storage n the value of the n-th node.
        saved = (0, place) if place else (0,)
        nodes.append(
            replace(
                node,
                module=f"layers.{name[1:]}",
                saved=saved,
                uses=(("other",),) * len(saved),
                saves_at="before",
                forward_peak_bytes=size,
            )
        )
        readers = tuple(names[place + 1 : place + 2])
        tensors.append(
            Tensor(
                producer=name, consumers=readers, bytes=size, gradient_bytes=size, storage=place + 1
            )
        )
    return CostGraph(nodes=tuple(nodes), tensors=tuple(tensors), storages=(64, *sizes))


def options(stages_per_rank: int, microbatches: int, recompute: Recompute, memory: int) -> Options:
    return Options(
        k=2 * stages_per_rank,
        stages_per_rank=stages_per_rank,
        microbatches=microbatches,
        schedule="interleaved-1f1b" if stages_per_rank > 1 else "1f1b",
        objective="variance",
        recompute=recompute,
        memory_bytes=memory,
        costs="table",
    )


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("choice", [{"schedule": "search"}, {"recompute": "auto"}])
def test_a_choice_knows_what_fits_without_copies_only(
    microbatches: int, choice: dict[str, Any]
) -> None:
    """With its cosines a stage of two layers has three blocks, and so two regions instead of one:
    between them it keeps what passes from one layer to the next.
    """
    graph = layers([2000] * 16)
    plain = replace(graph, nodes=tuple(replace(node, is_copyable=False) for node in graph.nodes))
    asked = options(2, microbatches, "sqrt", CAP)
    relayed = planned(plain, asked)
    assert relayed is not None
    caps = tuple(rank.total.bound for rank in relayed.prediction.memory)
    named = planned(graph, replace(asked, memory_bytes=caps))
    assert named is not None
    assert not named.copied, "with copies its ranks are full"
    chosen = planned(graph, replace(asked, memory_bytes=caps, **choice))
    assert chosen is not None
    assert chosen.prediction.step_ns <= named.prediction.step_ns


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=8, max_size=12).filter(lambda times: len(times) % 2 == 0),
    st.sampled_from(["block", "sqrt"]),
)
def test_a_bound_holds_for_stages_that_have_other_regions_with_their_copies(
    times: list[int], recompute: Recompute
) -> None:
    """The search knows stages without copies: four layers make two regions, five blocks others."""
    plan = planned(layers([1000 * each for each in times]), options(1, 1, recompute, CAP))
    assert plan is not None
    assert plan.search.bound <= plan.search.value


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.integers(500, 6000), min_size=16, max_size=16), st.sampled_from([2, 4, 8]))
def test_a_faster_objective_gives_the_step_that_the_plan_says(
    times: list[int], microbatches: int
) -> None:
    graph, asked = layers(times), options(1, microbatches, "none", CAP)
    plan = planned(graph, asked)
    assert plan is not None
    if plan.search.faster is not None:
        other = planned(graph, replace(asked, objective=plan.search.faster.objective))
        assert other is not None
        assert other.prediction.step_ns <= plan.search.faster.step_ns < plan.prediction.step_ns
