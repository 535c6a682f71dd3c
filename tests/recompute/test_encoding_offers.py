"""Which runs of a stage's nodes are offered to save in other forms, and what they cost."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, pairwise
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.ir.encodings import ENCODINGS, Encoding, Use
from pipecompile.ir.graph import Content, CostGraph, Node, Tensor
from pipecompile.memory_model.encodings import EncodedPlaces, storage_encodings
from pipecompile.memory_model.live_ranges import LiveRanges, Storage
from pipecompile.memory_model.lower_bounds import bytes_lower_bounds, freeable_bytes
from pipecompile.memory_model.recompute_problem import RecomputeProblem, recompute_problem_of
from pipecompile.memory_model.stage import footprint_of
from pipecompile.recompute.encoding_offers import HOST_BYTES_PER_NS, encoding_offers
from tests.ir.cost_graphs import cost_graphs, stages_of
from tests.recompute.test_region_search import every_choice, extra_ns
from tests.sweeps import examples

COUNT = 8000  # elements
WIDE = 4 * COUNT


@settings(max_examples=examples(200), deadline=None)
@given(cost_graphs(), st.lists(st.sampled_from(ENCODINGS), min_size=1, unique=True), st.data())
def test_runs_lie_apart_and_together_free_memory(
    graph: CostGraph, encodings: list[Encoding], data: st.DataObject
) -> None:
    cut = data.draw(stages_of(graph, most=2))
    index = data.draw(st.integers(0, len(cut) - 1))
    fixed = data.draw(st.sets(st.sampled_from(cut[index])))
    nodes = tuple(
        msgspec.structs.replace(node, is_recomputable=node.name not in fixed)
        for node in graph.nodes
    )
    graph = msgspec.structs.replace(graph, nodes=nodes)
    ranges, before = LiveRanges(graph), list(chain(*cut[:index]))
    found = encoding_offers(ranges, before, cut[index], encodings)
    named = [name for offer in found for name in offer.encoded.nodes]
    assert len(set(named)) == len(named) and not fixed.intersection(named)
    assert all(a.ns_per_byte <= b.ns_per_byte for a, b in pairwise(found))
    runs = [(offer.encoded.nodes, offer.encoded.encodings) for offer in found]
    plain, saved = (
        footprint_of(ranges, before, cut[index], (), chosen).activations.expected
        for chosen in ((), runs)
    )
    assert saved < plain if found else saved == plain
    if graph.allocator == "cpu":  # where the host's memory is the same
        assert not any("offload" in offer.encoded.encodings for offer in found)


@settings(max_examples=examples(400), deadline=None)
@given(
    cost_graphs(),
    st.lists(st.sampled_from(ENCODINGS), unique=True),
    st.sampled_from(["none", "auto"]),
    st.data(),
)
def test_nothing_frees_bytes_in_less_time_than_a_search_takes_it_to(
    graph: CostGraph,
    encodings: list[Encoding],
    recompute: Literal["none", "auto"],
    data: st.DataObject,
) -> None:
    """Some offers beside some regions keep what lower bounds and freeable bytes say."""
    cut = data.draw(stages_of(graph, most=2))
    index = data.draw(st.integers(0, len(cut) - 1))
    fixed = data.draw(st.sets(st.sampled_from(cut[index]), max_size=2))
    nodes = tuple(
        msgspec.structs.replace(node, is_recomputable=node.name not in fixed)
        for node in graph.nodes
    )
    graph = msgspec.structs.replace(graph, nodes=nodes)
    ranges, before, names = LiveRanges(graph), list(chain(*cut[:index])), cut[index]
    offered = [offer.encoded for offer in encoding_offers(ranges, before, names, encodings)]
    chosen = [run for run in offered if data.draw(st.booleans())]
    runs = [(run.nodes, run.encodings) for run in chosen]
    problem = recompute_problem_of(ranges, before, names, has_gradients=True, encoded_runs=runs)
    regions = (
        [names[a:b] for a, b in data.draw(st.sampled_from(_choices(problem)))]
        if recompute == "auto"
        else []
    )
    kept = footprint_of(ranges, before, names, regions, runs).activations.bound
    _, saved = bytes_lower_bounds(graph, recompute, gradients=False, encodings=encodings)
    classes = freeable_bytes(graph, recompute, encodings, ranges.bytes_per_ns)
    held = [sum(each.bytes.get(name, 0) for name in names) for each in classes]
    missing, least = sum(saved[name] for name in names) + sum(held) - kept, Fraction(0)
    for each, size in zip(classes, held, strict=True):
        freed = max(0, min(missing, size))
        missing, least = missing - freed, least + freed * each.rate
    assert all(a.rate <= b.rate for a, b in pairwise(classes)) and missing <= 0
    assert least <= sum(extra_ns(graph, region) for region in regions) + sum(
        run.ns for run in chosen
    )


def _choices(problem: RecomputeProblem) -> list[tuple[tuple[int, int], ...]]:
    """All regions without the nodes that must be in none."""
    return [
        chosen
        for chosen in every_choice(problem.boundaries)
        if not any(start <= place < stop for start, stop in chosen for place in problem.excluded)
    ]


def chain_of(
    *rows: tuple[str, Content | None, tuple[tuple[int, Use], ...]], memory: str = "cpu"
) -> CostGraph:
    """Nodes in a row, 2 bytes a nanosecond each; each makes one storage and saves some."""
    nodes = [
        Node(
            name=name,
            forward_ns=WIDE,
            backward_ns=WIDE,
            parameter_bytes=0,
            saved_bytes=0,
            group=None,
            forward_peak_bytes=WIDE,
            backward_peak_bytes=WIDE,
            saved=tuple(storage for storage, _ in saved),
            uses=tuple((use,) for _, use in saved),
            module=name,
        )
        for name, _, saved in rows
    ]
    names = [name for name, _, _ in rows]
    tensors = [
        Tensor(producer=a, consumers=(b,), bytes=WIDE, gradient_bytes=0, storage=index)
        for index, (a, b) in enumerate(pairwise(names))
    ]
    contents = tuple(content for _, content, _ in rows)
    return msgspec.convert(
        {
            "allocator": memory,
            "nodes": msgspec.to_builtins(nodes),
            "tensors": msgspec.to_builtins(tensors),
            "storages": [WIDE] * len(rows),
            "contents": msgspec.to_builtins(contents),
        },
        CostGraph,
    )


FLOAT, MASK = Content(dtype="float32"), Content(dtype="float32", is_mask=True)


def offered(
    graph: CostGraph, *encodings: Encoding
) -> list[tuple[tuple[str, ...], tuple[Encoding, ...]]]:
    found = encoding_offers(LiveRanges(graph), (), [node.name for node in graph.nodes], encodings)
    return sorted((offer.encoded.nodes, offer.encoded.encodings) for offer in found)


def test_runs_are_as_short_as_what_they_must_see() -> None:
    """ReLU's result goes only if all who save it are in the run; a mask is its node's own."""
    graph = chain_of(
        ("norm", FLOAT, ()),
        ("relu", FLOAT, ((1, "relu"),)),
        ("pool", FLOAT, ((1, "pool input"),)),
        ("drop", MASK, ((3, "other"),)),
        ("active", FLOAT, ((4, "relu"),)),
        ("line", FLOAT, ((4, "other"),)),
        ("end", None, ()),
    )
    assert offered(graph, "relu", "pool") == [(("relu", "pool"), ("relu", "pool"))]
    assert offered(graph, "relu") == offered(graph, "pool") == []
    assert offered(graph, "mask") == [(("drop",), ("mask",))]
    assert offered(graph, "half", "relu", "pool") == [
        (("active",), ("half",)),
        (("drop",), ("half",)),
        (("line",), ("half",)),
        (("relu", "pool"), ("relu", "pool")),
    ]
    assert offered(graph, "offload") == []


def test_prices() -> None:
    """Kernels run at the graph's rate; a GPU's link counts beyond the run's own nodes."""
    rows = (("first", FLOAT, ()), ("second", FLOAT, ((1, "other"),)), ("end", None, ()))
    (offer,) = encoding_offers(
        LiveRanges(chain_of(*rows)), (), ["first", "second", "end"], ("half",)
    )
    assert LiveRanges(chain_of(*rows)).bytes_per_ns == 2
    assert (offer.encoded.forward_ns, offer.encoded.backward_ns) == (WIDE * 3 // 4, WIDE * 3 // 4)
    assert offer.ns_per_byte == Fraction(3, 1)
    (offer,) = encoding_offers(
        LiveRanges(chain_of(*rows, memory="cuda")), (), ["first", "second", "end"], ("offload",)
    )
    assert WIDE // HOST_BYTES_PER_NS < WIDE  # it hides
    assert (offer.encoded.forward_ns, offer.encoded.backward_ns) == (WIDE // 2, WIDE // 2)


@pytest.mark.parametrize(("memory", "back"), [("cpu", 6), ("cuda", 8)])
def test_a_storage_that_several_nodes_save_is_kept_once_and_comes_back_for_the_last(
    memory: str, back: int
) -> None:
    runs = {place: EncodedPlaces((3, 4, 5), ("offload",)) for place in (3, 4, 5)}
    runs |= {place: EncodedPlaces((6, 7, 8), ("offload",)) for place in (6, 7, 8)}
    storage = Storage(WIDE, (3, 4, 6), (3, 4, 6), FLOAT, dict.fromkeys((3, 4, 6), ("other",)))
    forms, plain = storage_encodings(
        storage, (3, 4, 6), runs, "cuda" if memory == "cuda" else "cpu"
    )
    ((full, _, made, waits, savers, there),) = forms
    assert (full, made, waits, savers, there, plain) == (WIDE, 3, False, (3, 4, 6), back, ())


def test_a_shared_storage_is_there_from_its_last_backward_to_its_first() -> None:
    """By hand: 16000 bytes are kept, and 32000 more live from `third` to `first`."""
    graph = chain_of(
        ("zero", FLOAT, ()),
        ("first", FLOAT, ((0, "other"),)),
        ("second", FLOAT, ()),
        ("third", FLOAT, ((0, "other"),)),
        ("end", None, ()),
    )
    tensors = (
        msgspec.structs.replace(graph.tensors[0], consumers=("first", "third")),
        *graph.tensors[1:],
    )
    graph = msgspec.structs.replace(graph, tensors=tensors)
    runs = [(("first",), ("half",)), (("third",), ("half",))]
    footprint = footprint_of(LiveRanges(graph), (), [node.name for node in graph.nodes], (), runs)
    assert footprint.activations.expected == WIDE // 2
    assert footprint.backward_peak.expected == 2 * WIDE
    one = footprint_of(LiveRanges(graph), (), [node.name for node in graph.nodes], (), runs[:1])
    assert one.activations.expected == WIDE + WIDE // 2  # `third` keeps it as it is
