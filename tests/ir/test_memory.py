from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.ir.graph import CostGraph, Node, Parameter, Tensor
from pipecompile.ir.memory import Amount, Footprint, Layout, activation_curve, floors, rank_memory
from pipecompile.ir.schedule import Action
from pipecompile.schedule.named import generate, in_flight

SIZES = st.integers(0, 3000)


@st.composite
def _layouts(draw: st.DrawFn) -> Layout:
    """Any graph in its own order: shared storages and parameters, skips, tensors nobody takes, nodes without names."""
    size, storages = draw(st.integers(1, 7)), draw(st.lists(SIZES, max_size=5))
    names, some = (
        [f"n{i}" for i in range(size)],
        st.sets(st.sampled_from(range(len(storages)))) if storages else st.just(set()),
    )
    parameters = [
        Parameter(name=f"p{i}", bytes=draw(SIZES), trainable=draw(st.booleans()))
        for i in range(draw(st.integers(0, 3)))
    ]
    read = st.sets(st.sampled_from([p.name for p in parameters])) if parameters else st.just(set())
    nodes = [
        Node(
            name=name,
            forward_ns=1,
            backward_ns=1,
            parameter_bytes=draw(SIZES),
            saved_bytes=0,
            group=None,
            workspace_bytes=draw(SIZES),
            saved=tuple(sorted(draw(some))),
            parameters=tuple(sorted(draw(read))),
        )
        for name in names
    ]
    tensors = [
        Tensor(
            producer=names[i],
            consumers=tuple(names[j] for j in sorted(draw(st.sets(st.integers(i + 1, size - 1), max_size=3)))),
            bytes=draw(SIZES),
            gradient_bytes=draw(SIZES),
            storage=draw(st.sampled_from([None, *range(len(storages))])),
        )
        for i in range(size - 1)
        if draw(st.booleans())
    ]
    graph = CostGraph(
        nodes=tuple(nodes), tensors=tuple(tensors), storages=tuple(storages), parameters=tuple(parameters)
    )
    return Layout(graph, tuple((name,) for name in names))


@given(_layouts(), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.data())
def test_the_bound_of_a_stage_is_what_its_rank_would_hold(
    layout: Layout, stages: int, microbatches: int, recompute: bool, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    again = recompute and stage < stages - 1
    schedule = generate("1f1b", range(stages), microbatches, recompute)
    row = [Action(0, action.kind, action.microbatch) for action in schedule.rows[stage]]
    flight = in_flight("1f1b", range(stages), microbatches)[stage]
    for start, stop in combinations(range(len(layout.units) + 1), 2):
        footprint = layout.footprint(start, stop)
        memory = rank_memory({0: footprint}, row, microbatches=microbatches)
        bound = footprint.bound(in_flight=flight, microbatches=microbatches, recompute=again)
        assert bound == memory.total.bound, (start, stop)


@st.composite
def _stages(draw: st.DrawFn, graph: CostGraph) -> list[tuple[str, ...]]:
    """Non-empty stages of any cut: stages never decrease along a tensor, but need not follow the graph's order."""
    before: dict[str, set[str]] = {node.name: set() for node in graph.nodes}
    for tensor in graph.tensors:
        for name in tensor.consumers:
            before[name].add(tensor.producer)
    stage: dict[str, int] = {}
    for node in graph.nodes:
        stage[node.name] = draw(st.integers(max((stage[name] for name in before[node.name]), default=0), 3))
    members = [tuple(name for name in stage if stage[name] == index) for index in range(4)]
    return [names for names in members if names]


@settings(max_examples=300)
@given(_layouts(), st.booleans(), st.integers(1, 4), st.data())
def test_the_floors_of_nodes_are_never_above_the_bound_of_their_stage(
    layout: Layout, recompute: bool, microbatches: int, data: st.DataObject
) -> None:
    graph = layout.graph
    resident, saved = floors(graph, recompute=recompute)
    stages = data.draw(_stages(graph))
    for index, names in enumerate(stages):
        # As the planner prices a stage: all that lies before it is one unit, and all that follows another.
        parts = [tuple(name for stage in part for name in stage) for part in (stages[:index], stages[index + 1 :])]
        start = int(bool(parts[0]))
        units = tuple(unit for unit in (parts[0], names, parts[1]) if unit)
        flight = data.draw(st.integers(1, microbatches))
        bound = (
            Layout(graph, units)
            .footprint(start, start + 1)
            .bound(in_flight=flight, microbatches=microbatches, recompute=recompute and index < len(stages) - 1)
        )
        assert sum(resident[name] + flight * saved[name] for name in names) <= bound


@given(_layouts(), st.booleans())
def test_the_bound_is_never_below_what_is_expected_and_nothing_is_left_at_the_end(
    layout: Layout, recompute: bool
) -> None:
    footprint = layout.footprint(0, len(layout.units))
    (row, _) = generate("1f1b", range(2), 3, recompute).rows
    curve = [amount for _, amount in activation_curve({0: footprint}, row)]
    assert all(0 <= amount.expected <= amount.bound for amount in curve)
    assert (curve[-1].expected, curve[-1].bound) == (0, 0)


def test_sizes_are_rounded_up_to_the_blocks_of_the_allocator() -> None:
    assert Amount.of([1, 512, 513]) == Amount(expected=1026, bound=512 + 512 + 1024)


def _amount(size: int) -> Amount:
    return Amount(expected=size, bound=size)


FOOTPRINT = Footprint(
    parameters=_amount(100),
    gradients=_amount(90),
    kept=_amount(10),
    outputs=_amount(3),
    received=_amount(4),
    received_gradients=_amount(2),
    workspace=_amount(7),
)


def _row(text: str) -> list[Action]:
    return [Action.parse(word) for word in text.split()]


@pytest.mark.parametrize(
    ("row", "held"),
    [
        ("0F0 0F1 0B0 0B1", [10, 20, 10, 0]),
        ("0F0 0F1 0R0 0B0 0R1 0B1", [3, 6, 13, 3, 10, 0]),
        ("0F0 0I0 0W0", [10, 10, 0]),
        ("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD", [10, 10, 10, 0, 0]),
    ],
)
def test_activations_live_from_forward_or_recompute_to_backward(row: str, held: list[int]) -> None:
    assert [amount.expected for _, amount in activation_curve({0: FOOTPRINT}, _row(row))] == held


def test_a_rank_holds_all_its_stages_but_works_in_one_at_a_time() -> None:
    memory = rank_memory({0: FOOTPRINT, 1: FOOTPRINT}, _row("0F0 1F0 1B0 0B0"), microbatches=3)
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace", "total")
    assert [getattr(memory, kind).expected for kind in kinds] == [200, 180, 0, 20, 36, 7, 443]


def test_a_storage_saved_by_many_nodes_and_a_parameter_read_twice_are_held_once() -> None:
    node = {"forward_ns": 1, "backward_ns": 1, "parameter_bytes": 9, "saved_bytes": 5, "group": None}
    nodes = tuple(Node(name=name, saved=(0,), parameters=("w",), **node) for name in "ab")  # type: ignore[arg-type]
    tied = Parameter(name="w", bytes=9, trainable=True)
    footprint = Layout(
        CostGraph(nodes=nodes, tensors=(), storages=(5,), parameters=(tied,)), (("a",), ("b",))
    ).footprint(0, 2)
    assert (footprint.kept.expected, footprint.parameters.expected, footprint.gradients.expected) == (5, 9, 9)


def test_only_a_storage_with_one_producer_is_a_floor_of_it() -> None:
    """Where two nodes write one storage, or a node saves it that does not take it, its stage is not known."""
    node = {"forward_ns": 1, "backward_ns": 1, "parameter_bytes": 0, "saved_bytes": 0, "group": None}
    saves = {"a": (0, 1), "b": (1,), "c": (0, 2), "d": (2,)}
    nodes = tuple(Node(name=name, saved=saved, **node) for name, saved in saves.items())  # type: ignore[arg-type]
    tensors = tuple(
        Tensor(producer=name, consumers=("c",), bytes=512, gradient_bytes=512, storage=storage)
        for name, storage in (("a", 0), ("b", 1), ("d", 1))
    )
    graph = CostGraph(nodes=nodes, tensors=tensors, storages=(512,) * 3)
    nothing = dict.fromkeys("abcd", 0)
    assert floors(graph, recompute=False) == (nothing, {**nothing, "a": 512})
    assert floors(graph, recompute=True) == ({**nothing, "a": 512}, nothing)


def test_a_relayed_tensor_is_received_by_every_stage_on_its_way() -> None:
    node = {"forward_ns": 1, "backward_ns": 1, "parameter_bytes": 0, "saved_bytes": 0, "group": None}
    nodes = tuple(Node(name=name, **node) for name in "abc")  # type: ignore[arg-type]
    skip = Tensor(producer="a", consumers=("c",), bytes=6, gradient_bytes=4, storage=0)
    layout = Layout(CostGraph(nodes=nodes, tensors=(skip,), storages=(6,)), (("a",), ("b",), ("c",)))
    first, middle, last = (layout.footprint(i, i + 1) for i in range(3))
    assert [f.received.expected for f in (first, middle, last)] == [0, 6, 6]
    assert [f.received_gradients.expected for f in (first, middle, last)] == [4, 4, 0]
    assert [f.outputs.expected for f in (first, middle, last)] == [6, 0, 0]
