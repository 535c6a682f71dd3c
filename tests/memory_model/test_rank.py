"""What ranks hold, against a simulation that does it the long way, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import AMOUNT_FIELDS, Footprint, MessageStorage, ReceivedTensor
from pipecompile.ir.graph import CostGraph, Node, Parameter, Tensor
from pipecompile.ir.schedule import BACKWARDS, COMPUTE, Action, Kind, Schedule
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.lower_bounds import bytes_lower_bounds
from pipecompile.memory_model.peak_snapshots import peak_snapshots
from pipecompile.memory_model.rank import (
    activation_curve,
    available_for_activations,
    rank_memory,
    stage_memory,
)
from pipecompile.memory_model.snapshots import all_snapshots
from pipecompile.memory_model.stage import footprint_of
from pipecompile.memory_model.unread_gradients import unread_gradients
from pipecompile.schedule.named_orders import ASYNCHRONOUS, fitting_names, generate
from pipecompile.schedule.placement import place
from pipecompile.schedule.receives import add_earliest_receives
from tests.ir.cost_graphs import cost_graphs, encoded_runs_of, regions_of, stages_of
from tests.memory_model.naive import highest
from tests.sweeps import examples

CPU = ALLOCATORS["cpu"]
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace")


@st.composite
def _schedules(draw: st.DrawFn, stages: int) -> Schedule:
    """Any named schedule that trains, on any placement that it can have."""
    each = draw(st.sampled_from([n for n in (1, 2) if stages % n == 0]))
    placement = place(draw(st.sampled_from(["linear", "loop", "v"])), stages // each, each)
    microbatches = draw(st.sampled_from([1, 2, 3, 4]))
    names = [
        n
        for n in fitting_names(placement, microbatches)
        if n not in (*ASYNCHRONOUS, "forward-only")
    ]
    recomputes, except_last = draw(st.booleans()), draw(st.booleans())
    return generate(
        draw(st.sampled_from(names)), placement, microbatches, recomputes, except_last=except_last
    )


def _with_receives(schedule: Schedule, data: st.DataObject) -> Schedule:
    """No receives, or each one anywhere from where it may be first to where it is needed."""
    if data.draw(st.booleans()):
        return schedule
    rows = [list(row) for row in add_earliest_receives(schedule).rows]
    for row in rows:
        for receive in [action for action in row if action.kind not in COMPUTE]:
            first = row.index(receive)
            last = next(i for i, action in enumerate(row) if _reads(action, receive))
            row.insert(data.draw(st.integers(first, last - 1)), row.pop(first))
    return Schedule.of(schedule.name, schedule.microbatches, schedule.placement, rows)


def _reads(action: Action, receive: Action) -> bool:
    kinds = BACKWARDS if receive.kind is Kind.RECEIVE_BACKWARD else (Kind.FORWARD,)
    return action.kind in kinds and action[::2] == receive[::2]


def _footprints(
    graph: CostGraph, cut: Sequence[Sequence[str]], optimizer: str | None = None
) -> list[Footprint]:
    ranges = LiveRanges(graph, optimizer)
    return [
        footprint_of(ranges, [n for part in cut[:index] for n in part], names)
        for index, names in enumerate(cut)
    ]


def _held(schedule: Schedule, rank: int, footprints: Sequence[Footprint]) -> dict[int, Footprint]:
    return {index: f for index, f in enumerate(footprints) if schedule.placement[index] == rank}


@settings(max_examples=examples(200), deadline=None)
@given(cost_graphs(), st.data())
def test_the_peak_is_that_of_a_simulation_of_everything_that_lives(
    graph: CostGraph, data: st.DataObject
) -> None:
    cut = data.draw(stages_of(graph))
    schedule = _with_receives(data.draw(_schedules(len(cut))), data)
    footprints = _footprints(graph, cut)
    unread = data.draw(st.sampled_from([{}, unread_gradients(schedule)]))
    for rank, row in enumerate(schedule.rows):
        held = _held(schedule, rank, footprints)
        at, allocator = peak_snapshots(row, unread), ALLOCATORS[graph.allocator]
        memory = rank_memory(held, at, microbatches=schedule.microbatches, allocator=allocator)
        naive = highest(graph, cut, row, schedule.microbatches, unread=unread)
        assert memory.total.expected == naive, rank
        shares = stage_memory(
            held, at, microbatches=schedule.microbatches, allocator=allocator
        ).values()
        assert memory.total.expected == sum(share.total.expected for share in shares)


@settings(max_examples=examples(250), deadline=None)
@given(cost_graphs(), st.data())
def test_so_is_the_peak_of_stages_with_regions_and_other_forms(
    graph: CostGraph, data: st.DataObject
) -> None:
    cut = data.draw(stages_of(graph))
    regions = {index: data.draw(regions_of(names)) for index, names in enumerate(cut)}
    encoded_runs = {
        index: data.draw(encoded_runs_of(names, regions[index])) for index, names in enumerate(cut)
    }
    name, microbatches = data.draw(st.sampled_from(["gpipe", "1f1b"])), data.draw(st.integers(1, 4))
    schedule = _with_receives(generate(name, range(len(cut)), microbatches), data)
    ranges = LiveRanges(graph)
    for index, row in enumerate(schedule.rows):
        footprint = footprint_of(
            ranges, chain(*cut[:index]), cut[index], regions[index], encoded_runs[index]
        )
        memory = rank_memory(
            {index: footprint},
            peak_snapshots(row),
            microbatches=schedule.microbatches,
            allocator=ALLOCATORS[graph.allocator],
        )
        assert memory.total.expected == highest(
            graph, cut, row, schedule.microbatches, regions, encoded_runs
        ), index
        assert memory.total.bound >= memory.total.expected


@settings(max_examples=examples(200), deadline=None)
@given(cost_graphs(), st.data())
def test_so_is_that_of_a_forward_and_of_a_microbatch_with_other_forms(
    graph: CostGraph, data: st.DataObject
) -> None:
    cut = data.draw(stages_of(graph, most=2))
    encoded_runs = {index: data.draw(encoded_runs_of(names, ())) for index, names in enumerate(cut)}
    for index, names in enumerate(cut):
        footprint = footprint_of(
            LiveRanges(graph), chain(*cut[:index]), names, (), encoded_runs[index]
        )
        row = [Action(index, Kind.FORWARD, 0), Action(index, Kind.BACKWARD, 0)]
        for part in (row[:1], row):
            memory = rank_memory(
                {index: footprint},
                peak_snapshots(part),
                microbatches=1,
                allocator=ALLOCATORS[graph.allocator],
            )
            assert memory.total.expected == highest(graph, cut, part, 1, {}, encoded_runs), index


@settings(max_examples=examples(100), deadline=None)
@given(cost_graphs(most=9), st.data())
def test_so_is_that_of_regions_within_regions(graph: CostGraph, data: st.DataObject) -> None:
    """Of one stage, without forwards and gradients that would hide most of it."""
    bare = [replace(node, forward_peak_bytes=0, workspace_bytes=0) for node in graph.nodes]
    # Copies that nothing needs any more would go as a node ends, of which the peak is left out.
    nodes = [replace(node, buffer_copies=()) if node.saves_at == "never" else node for node in bare]
    graph = replace(graph, nodes=tuple(nodes), gradients=())
    names = tuple(node.name for node in graph.nodes)
    regions = [names[data.draw(st.integers(0, min(1, len(names) - 1))) :]]
    while len(regions[-1]) > 1 and len(regions) < 4:
        begin = data.draw(st.integers(0, len(regions[-1]) - 1))
        length = data.draw(st.integers(1, len(regions[-1]) - max(begin, 1)))
        regions.append(regions[-1][begin : begin + length])
    taken = {name for region in regions[1:] for name in region} or {*regions[0]}
    regions += [part for part in data.draw(regions_of(regions[0])) if taken.isdisjoint(part)]
    row = generate("gpipe", range(1), 1).rows[0]
    footprint = footprint_of(LiveRanges(graph), (), names, regions)
    allocator = ALLOCATORS[graph.allocator]
    memory = rank_memory({0: footprint}, peak_snapshots(row), microbatches=1, allocator=allocator)
    assert memory.total.expected == highest(graph, [names], row, 1, {0: regions})


@given(cost_graphs(wild=True), st.sampled_from(["cpu", "cuda"]), st.data())
def test_moments_that_are_left_out_hold_no_more(
    graph: CostGraph, name: str, data: st.DataObject
) -> None:
    cut = data.draw(stages_of(graph))
    schedule = data.draw(_schedules(len(cut)))
    unread = unread_gradients(schedule)
    later = data.draw(st.booleans())
    footprints = [
        replace(each, is_validated_later=later) for each in _footprints(graph, cut, "adamw")
    ]
    for rank, row in enumerate(schedule.rows):
        every = list(all_snapshots(row, unread))
        totals = [
            rank_memory(
                _held(schedule, rank, footprints),
                at,
                microbatches=schedule.microbatches,
                allocator=ALLOCATORS[name],
            ).total
            for at in (peak_snapshots(row, unread), every)
        ]
        assert totals[0] == totals[1]


@given(cost_graphs(wild=True), st.data())
def test_the_bound_is_never_below_what_is_expected_and_nothing_is_left_at_the_end(
    graph: CostGraph, data: st.DataObject
) -> None:
    cut = data.draw(stages_of(graph))
    schedule = data.draw(_schedules(len(cut)))
    footprints = _footprints(graph, cut, "adam")
    for rank, row in enumerate(schedule.rows):
        held = _held(schedule, rank, footprints)
        memory = rank_memory(
            held,
            peak_snapshots(row),
            microbatches=schedule.microbatches,
            allocator=ALLOCATORS[graph.allocator],
        )
        assert memory.total.bound >= memory.total.expected
        curve = [amount for _, amount in activation_curve(held, row)]
        assert all(0 <= amount.expected <= amount.bound for amount in curve)
        assert curve[-1] == ZERO


@settings(max_examples=examples(200), deadline=None)
@given(cost_graphs(wild=True), st.sampled_from(["none", "stage", "except-last"]), st.data())
def test_the_floors_of_nodes_are_never_above_the_bound_of_their_stage(
    graph: CostGraph, recompute: Literal["none", "stage", "except-last"], data: st.DataObject
) -> None:
    """By the most microbatches that a stage holds under 1F1B.

    Gradients exist then if a backward has run.
    """
    cut = data.draw(stages_of(graph))
    microbatches, stages = data.draw(st.integers(1, 5)), len(cut)
    recomputes, except_last = recompute != "none", recompute == "except-last"
    schedule = generate("1f1b", range(stages), microbatches, recomputes, except_last=except_last)
    flights = [min(microbatches, stages - stage) for stage in range(stages)]
    summed = microbatches > max(flights)
    resident, saved = bytes_lower_bounds(graph, recompute, gradients=summed)
    for stage, footprint in enumerate(_footprints(graph, cut)):
        memory = rank_memory(
            {stage: footprint},
            peak_snapshots(schedule.rows[stage]),
            microbatches=microbatches,
            allocator=ALLOCATORS[graph.allocator],
        )
        floor = sum(resident[name] + flights[stage] * saved[name] for name in cut[stage])
        assert floor <= memory.total.bound, stage


@settings(max_examples=examples(200), deadline=None)
@given(cost_graphs(), st.sampled_from([None, "adamw", "rmsprop"]), st.data())
def test_there_is_never_less_room_than_said(
    graph: CostGraph, optimizer: str | None, data: st.DataObject
) -> None:
    """Every order that keeps no more than `available_for_activations` fits the cap."""
    cut = data.draw(stages_of(graph))
    schedule = data.draw(_schedules(len(cut)))
    later = data.draw(st.booleans())
    footprints = [
        replace(each, is_validated_later=later) for each in _footprints(graph, cut, optimizer)
    ]
    allocator, microbatches = ALLOCATORS[graph.allocator], schedule.microbatches
    for rank, row in enumerate(schedule.rows):
        held = _held(schedule, rank, footprints)
        recomputed = {action.stage for action in row if action.kind is Kind.RECOMPUTE}
        earlier = _with_earlier_recomputes(row, data)
        kept = max((amount.bound for _, amount in activation_curve(held, earlier)), default=0)
        total = rank_memory(
            held, peak_snapshots(earlier), microbatches=microbatches, allocator=allocator
        ).total.bound
        left = available_for_activations(
            held, total - 1, microbatches=microbatches, allocator=allocator, recomputed=recomputed
        )
        assert kept > left, "a byte less is too little"


@pytest.mark.parametrize("placement", [(0, 0), (0, 1)])
def test_there_is_room_for_a_gradient_that_several_stages_make(placement: tuple[int, int]) -> None:
    """On one rank the second is there beside the first."""
    common = {
        "forward_ns": 1,
        "backward_ns": 1,
        "parameter_bytes": 0,
        "saved_bytes": 0,
        "group": None,
    }
    nodes = tuple(Node(name=name, parameters=("p",), **common) for name in "ab")  # type: ignore[arg-type]
    value = Tensor(producer="a", consumers=("b",), bytes=0, gradient_bytes=0)
    shared = Parameter(name="p", bytes=6400, trainable=True)
    stages = dict(
        enumerate(
            _footprints(CostGraph(nodes=nodes, tensors=(value,), parameters=(shared,)), ["a", "b"])
        )
    )
    allocator = ALLOCATORS["cuda"]
    for rank, row in enumerate(generate("gpipe", placement, 1).rows):
        held = {index: stages[index] for index in range(2) if placement[index] == rank}
        total = rank_memory(
            held, peak_snapshots(row), microbatches=1, allocator=allocator
        ).total.bound
        assert available_for_activations(held, total - 1, microbatches=1, allocator=allocator) < 0
        assert available_for_activations(held, total, microbatches=1, allocator=allocator) >= 0


def _with_earlier_recomputes(row: Sequence[Action], data: st.DataObject) -> list[Action]:
    """Each recompute is anywhere between its forward and its backward."""
    moved = list(row)
    for action in [action for action in row if action.kind is Kind.RECOMPUTE]:
        last = moved.index(action)
        first = next(i for i, a in enumerate(moved) if a == action._replace(kind=Kind.FORWARD)) + 1
        moved.insert(data.draw(st.integers(first, last)), moved.pop(last))
    return moved


@given(cost_graphs(), st.data())
def test_what_stages_hold_of_a_graph_adds_up(graph: CostGraph, data: st.DataObject) -> None:
    """Parameters are split, except those that several stages read; one stage is the whole."""
    cut = data.draw(stages_of(graph))
    footprints = _footprints(graph, cut)
    [whole] = _footprints(graph, [[node.name for node in graph.nodes]])
    read = {
        p.name: sum(any(p.name in graph.by_name[n].parameters for n in names) for names in cut)
        for p in graph.parameters
    }
    tied = sum(
        graph.parameter_by_name[name].bytes * (stages - 1)
        for name, stages in read.items()
        if stages > 1
    )
    assert sum(f.parameters.expected for f in footprints) == whole.parameters.expected + tied
    assert sum(f.inputs.expected for f in footprints) == whole.inputs.expected
    assert whole.received == whole.received_gradients == ()
    assert whole.sent_outputs == whole.sent_by_backward == whole.sent_by_input_backward == ()
    if len(cut) == 1:
        assert footprints == [whole]


@given(cost_graphs(), st.integers(1, 3))
def test_one_stage_has_the_peak_of_the_whole_model(graph: CostGraph, microbatches: int) -> None:
    cut = [[node.name for node in graph.nodes]]
    [row] = generate("gpipe", (0,), microbatches, False).rows
    memory = rank_memory(
        dict(enumerate(_footprints(graph, cut))),
        peak_snapshots(row),
        microbatches=microbatches,
        allocator=CPU,
    )
    assert memory.total.expected == highest(graph, cut, row, microbatches)


def _amount(size: int) -> Amount:
    return Amount(expected=size, bound=size)


EMPTY_FOOTPRINT = Footprint(**dict.fromkeys(AMOUNT_FIELDS, ZERO))
FOOTPRINT = msgspec.structs.replace(
    EMPTY_FOOTPRINT,
    parameters=_amount(100),
    gradients=_amount(90),
    optimizer=_amount(50),
    inputs=_amount(5),
    activations=_amount(10),
    received=(ReceivedTensor(name="input", size=_amount(4), is_needed_by_weight_backward=False),),
    received_gradients=(
        ReceivedTensor(name="value", size=_amount(2), is_needed_by_weight_backward=True),
    ),
    sent_outputs=(
        MessageStorage(names=("value",), size=_amount(3), is_needed_by_weight_backward=False),
    ),
    sent_by_backward=(
        MessageStorage(names=("value",), size=_amount(2), is_needed_by_weight_backward=False),
    ),
    sent_by_input_backward=(
        MessageStorage(names=("value",), size=_amount(1), is_needed_by_weight_backward=False),
    ),
    added_by_input_backward=_amount(1),
    forward_peak=_amount(11),
    first_backward_peak=_amount(97),
    backward_peak=_amount(7),
    input_backward_peak=_amount(6),
    weight_backward_peak=_amount(8),
    first_weight_backward_peak=_amount(99),
    first_weight_backward_peak_freeing_outputs=_amount(99),
)


def _row(text: str) -> list[Action]:
    return [Action.parse(word) for word in text.split()]


@pytest.mark.parametrize(
    ("row", "held"),
    [
        ("0F0 0F1 0B0 0B1", [10, 20, 10, 0]),
        ("0F0 0F1 0R0 0B0 0R1 0B1", [3, 6, 16, 3, 13, 0]),
        ("0F0 0I0 0W0", [10, 8, 0]),  # without outputs of 3
        ("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD", [10, 10, 10, 0, 0]),
    ],
)
def test_activations_live_from_forward_or_recompute_to_backward(row: str, held: list[int]) -> None:
    assert [amount.expected for _, amount in activation_curve({0: FOOTPRINT}, _row(row))] == held


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        # In the first backward both are kept and gradients are made.
        ("0F0 0F1 0B0 0B1", (100, 0, 50, 20, 22, 97)),
        # The second backward: gradients exist, three are kept, and the gradient of the first one's
        # inputs waits. What the first one received is gone.
        ("0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3", (100, 90, 50, 30, 44 - 4 - 2 + 2, 7)),
        # An input backward may return several gradients in one storage. It lets go of the input
        # and of outputs of 3, and the weight backward needs the received gradient.
        ("0F0 0I0 0W0", (100, 0, 50, 8, 11 - 4 + 1, 99)),
        ("0F0 0F1 0I0 0B1 0W0", (100, 0, 50, 8 + 10, 22 - 4 + 1, 97)),
        ("0F0 0R0 0B0", (100, 0, 50, 13, 11, 97)),
        # In the second backward only its own messages are there.
        (
            "0RECV_F0 0F0 0RECV_B0 0B0 0RECV_F1 0F1 0RECV_B1 0B1",
            (100, 90, 50, 10, 2 * 5 + 4 + 2 + 2, 7),
        ),
        ("0RECV_F0 0F0 0RECV_F1 0F1", (100, 0, 50, 3, 2 * 5 + 4, 11)),
    ],
)
def test_the_peak_of_a_row_by_hand(row: str, kinds: tuple[int, ...]) -> None:
    microbatches = len({action.microbatch for action in _row(row)})
    memory = rank_memory(
        {0: FOOTPRINT}, peak_snapshots(_row(row)), microbatches=microbatches, allocator=CPU
    )
    assert tuple(getattr(memory, kind).expected for kind in KINDS) == kinds


def test_a_rank_holds_all_its_stages_but_works_in_one_at_a_time() -> None:
    """What a stage hands to one on its rank is held once, without buffers; so are gradients."""
    stages = {0: FOOTPRINT, 1: FOOTPRINT}
    memory = rank_memory(
        stages, peak_snapshots(_row("0F0 1F0 1B0 0B0")), microbatches=1, allocator=CPU
    )
    # In stage 0's backward: gradients of stage 1, and the one that it gave stage 0. What stage 1
    # received is gone.
    assert tuple(getattr(memory, kind).expected for kind in KINDS) == (
        200,
        90,
        100,
        10,
        10 + 4 + 2,
        97,
    )


@pytest.mark.parametrize(
    ("row", "copies", "kinds"),
    [
        # When all is summed, input gradients of 2 may be unread.
        ("0F0 0B0", (400,), (100, 90, 50, 0, 5 + 2 + 400, 0)),
        ("0F0 1F0 1B0 0B0", (300, 400), (200, 180, 100, 0, 10 + 2 + 700, 0)),
        # In the backward of stage 0 only stage 1 has made its copies.
        ("0F0 1F0 1B0 0B0", (0, 400), (200, 90, 100, 10, 10 + 4 + 2 + 400, 97)),
    ],
)
def test_copies_of_gradients_are_held_from_the_last_backward_on(
    row: str, copies: tuple[int, ...], kinds: tuple[int, ...]
) -> None:
    stages = {
        index: msgspec.structs.replace(FOOTPRINT, gradient_copies=_amount(size))
        for index, size in enumerate(copies)
    }
    memory = rank_memory(stages, peak_snapshots(_row(row)), microbatches=1, allocator=CPU)
    assert tuple(getattr(memory, kind).expected for kind in KINDS) == kinds


def test_the_step_of_the_optimizer_is_a_moment() -> None:
    large = msgspec.structs.replace(FOOTPRINT, optimizer_workspace=_amount(1000))
    memory = rank_memory({0: large}, peak_snapshots(_row("0F0 0B0")), microbatches=1, allocator=CPU)
    assert tuple(getattr(memory, kind).expected for kind in KINDS) == (100, 90, 50, 0, 5, 1000)
