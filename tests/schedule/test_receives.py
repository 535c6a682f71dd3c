"""Where receives may stand at the earliest, against sets of all that happens before them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Schedule
from pipecompile.schedule.named_orders import ASYNCHRONOUS, fitting_names, generate
from pipecompile.schedule.placement import place
from pipecompile.schedule.problem import StageCosts
from pipecompile.schedule.receives import add_earliest_receives
from pipecompile.schedule.transfers import add_transfers
from tests.schedule.cases import equal, order

RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any synchronous named schedule on up to four ranks."""
    each = draw(st.integers(1, 2))
    shape = draw(st.sampled_from(["linear", "loop", "v"]))
    placement = place(shape, draw(st.integers(1, 4)), each)
    microbatches = draw(st.integers(1, 6))
    names = [n for n in fitting_names(placement, microbatches) if n not in ASYNCHRONOUS]
    name = draw(st.sampled_from([*names, "forward-only"]))
    return generate(name, placement, microbatches, name != "forward-only" and draw(st.booleans()))


def places(row: Sequence[Action]) -> dict[Action, int]:
    """Of each receive how many compute actions stand before it."""
    found, before = {}, 0
    for action in row:
        if action.kind in RECEIVES:
            found[action] = before
        before += action.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT, *BACKWARDS)
    return found


def source_of(schedule: Schedule, receive: Action) -> Action | None:
    """The action on another rank whose result comes."""
    is_value = receive.kind is Kind.RECEIVE_FORWARD
    stage = receive.stage + (-1 if is_value else 1)
    kinds = [Kind.FORWARD] if is_value else [Kind.BACKWARD, Kind.BACKWARD_INPUT]
    actions = [action for row in schedule.compute for action in row]
    sought = [Action(stage, kind, receive.microbatch) for kind in kinds]
    return next((action for action in actions if action in sought), None)


def past_of(schedule: Schedule, action: Action) -> set[Action]:
    """All that is done whenever `action` is, itself included."""
    past, waiting = set[Action](), [action]
    while waiting:
        current = waiting.pop()
        if current in past:
            continue
        past.add(current)
        row = next(row for row in schedule.compute if current in row)
        waiting += row[: row.index(current)]
        for kinds, receive in (([Kind.FORWARD], RECEIVES[0]), (BACKWARDS, RECEIVES[1])):
            if current.kind in kinds:
                source = source_of(schedule, current._replace(kind=receive))
                waiting += [source] if source else []
    return past


@given(schedules())
def test_a_receive_stands_behind_what_is_always_done_before_it(schedule: Schedule) -> None:
    found = add_earliest_receives(schedule)
    assert found.compute == schedule.compute
    for rank, row in enumerate(found.rows):
        wanted = {}
        for action in schedule.compute[rank]:
            for receive in (action._replace(kind=kind) for kind in RECEIVES):
                source = source_of(schedule, receive)
                if source and schedule.placement[source.stage] != rank:
                    before = past_of(schedule, source).intersection(schedule.compute[rank])
                    wanted[receive] = len(before)
        assert places(row) == wanted


@given(schedules(), st.randoms())
def test_no_times_bring_a_message_earlier(schedule: Schedule, rng: random.Random) -> None:
    stages = len(schedule.placement)
    costs = tuple(StageCosts(*(rng.choice([0, 1, 7]) for _ in range(5))) for _ in range(stages))
    problem = replace(equal(schedule.placement, schedule.microbatches), costs=costs)
    earliest, timed = add_earliest_receives(schedule), add_transfers(problem, schedule)
    for first, row in zip(earliest.rows, timed.rows, strict=True):
        first_places, own_places = places(first), places(row)
        assert first_places.keys() == own_places.keys()
        assert all(first_places[receive] <= place for receive, place in own_places.items())


@given(schedules(), st.data())
def test_a_rank_among_others_that_take_no_time_has_all_messages_that_early(
    schedule: Schedule, data: st.DataObject
) -> None:
    """So no bound that knows no times is less than that of the earliest receives."""
    slow = data.draw(st.integers(0, schedule.ranks - 1))
    costs = tuple(StageCosts(*[int(rank == slow)] * 5) for rank in schedule.placement)
    problem = replace(equal(schedule.placement, schedule.microbatches), costs=costs)
    timed = add_transfers(problem, schedule)
    assert places(timed.rows[slow]) == places(add_earliest_receives(schedule).rows[slow])


def test_two_ranks_in_turns() -> None:
    schedule = order(["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"], [0, 1], 3)
    assert [" ".join(row) for row in add_earliest_receives(schedule).actions] == [
        "0F0 0RECV_B0 0F1 0RECV_B1 0B0 0F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1RECV_F2 1F1 1B1 1F2 1B2",
    ]
