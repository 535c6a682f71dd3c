"""The scheduler on files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipecompile.errors import InfeasibleError, InputError, ScheduleError
from pipecompile.ir.schedule import Schedule
from pipecompile.ir.schedule_problem import Order, ScheduleProblem
from pipecompile.ir.serialization import decode, encode, read
from pipecompile.schedule.named_orders import ASYNCHRONOUS, NAMES, generate, required_placement
from pipecompile.schedule.placement import SHAPES, place
from pipecompile.schedule.problem import placed_problem
from pipecompile.schedule.request import ScheduleRequest, answer_for_file
from pipecompile.schedule.search import order_lower_bound
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.torch_csv import write_csv

INSTANCES = Path(__file__).parents[3] / "shared" / "instances" / "schedule"
QUICK = ScheduleRequest(seconds=0.3)


def stage(rank: int | None, **more: int) -> dict[str, Any]:
    return {
        **{"rank": rank, "forward_ns": 10, "backward_input_ns": 10, "backward_weight_ns": 8},
        **{"activation_bytes": 4, "weight_gradient_bytes": 2},
        **more,
    }


def write_problem(
    folder: Path, stages: list[dict[str, Any]], ranks: int, microbatches: int, **more: Any
) -> Path:
    path = folder / "problem.json"
    fields = {"ranks": ranks, "microbatches": microbatches, "transfer_ns": 1, "memory_bytes": None}
    tree = {
        "schema": "pipecompile/schedule-problem/1",
        "stages": stages,
        "split_backward": True,
        **fields,
        **more,
    }
    path.write_text(json.dumps(tree))
    return path


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    """Two stages of unequal times on each of two ranks, around and around."""
    stages = [stage(rank, forward_ns=10 + 3 * index) for index, rank in enumerate([0, 1, 0, 1])]
    return write_problem(tmp_path, stages, 2, 4)


@pytest.fixture
def unplaced(tmp_path: Path) -> Path:
    """Four stages for two ranks."""
    return write_problem(
        tmp_path, [stage(None, forward_ns=10 + 3 * index) for index in range(4)], 2, 4
    )


def schedule(path: Path, request: ScheduleRequest) -> Order:
    return answer_for_file(path, request).order


def simulated(path: Path, order: Order) -> tuple[int, int]:
    """Return makespan and span of an order by the rules of the simulator."""
    problem = placed_problem(read(path, ScheduleProblem), order.placement)
    row = Schedule(
        name="again",
        microbatches=order.microbatches,
        placement=order.placement,
        actions=order.orders,
    )
    timeline = simulate(problem, row)
    return timeline.makespan_ns, timeline.span_ns


def test_the_search_is_no_worse_than_any_named_schedule_and_says_what_it_is(loop: Path) -> None:
    found = schedule(loop, QUICK)
    assert (found.request, found.placement_shape, found.fits, found.violations) == (
        "search",
        "loop",
        True,
        (),
    )
    assert {other.name for other in found.named} == {"gpipe", "interleaved-1f1b", "looped-bfs"}
    assert found.best_named is not None
    assert found.best_named.value_ns == min(other.value_ns for other in found.named)
    assert found.makespan_ns <= found.best_named.value_ns
    assert (found.name == "search") == (found.makespan_ns < found.best_named.value_ns)
    assert found.lower_bound_ns is not None
    assert found.proven == (found.makespan_ns == found.lower_bound_ns)
    assert simulated(loop, found) == (found.makespan_ns, found.span_ns)


def test_where_a_named_schedule_is_best_the_answer_has_its_name(tmp_path: Path) -> None:
    path = write_problem(tmp_path, [stage(0), stage(1)], 2, 4, split_backward=False, transfer_ns=0)
    found = schedule(path, QUICK)
    assert (found.request, found.name, found.proven) == ("search", "1f1b", True)
    assert {other.name for other in found.named} == {
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "looped-bfs",
    }


def test_an_answer_is_read_back_as_it_was(loop: Path) -> None:
    found = schedule(loop, QUICK)
    assert decode(encode(found), Order, origin="test") == found


def test_the_same_problem_has_the_same_answer(loop: Path) -> None:
    one, other = answer_for_file(loop, QUICK), answer_for_file(loop, QUICK)
    assert one.schedule == other.schedule


def test_the_span_is_what_is_asked_for(tmp_path: Path) -> None:
    path = write_problem(tmp_path, [stage(rank) for rank in range(3)], 3, 6)
    found = schedule(path, ScheduleRequest(name="zb-h2", objective="span"))
    assert found.value_ns == found.span_ns < found.makespan_ns
    problem = placed_problem(read(path, ScheduleProblem))
    assert found.lower_bound_ns == order_lower_bound(problem, "span")
    assert schedule(path, replace(QUICK, objective="span")).span_ns <= found.span_ns


def test_an_open_placement_is_the_best_of_three_and_its_bound_holds_for_all(unplaced: Path) -> None:
    given = read(unplaced, ScheduleProblem)
    found = schedule(unplaced, replace(QUICK, seconds=0.9))
    each = [schedule(unplaced, replace(QUICK, placement=shape)) for shape in SHAPES]
    assert found.makespan_ns == min(order.makespan_ns for order in each)
    bounds = [
        order_lower_bound(placed_problem(given, place(shape, 2, 2)), "makespan") for shape in SHAPES
    ]
    assert found.lower_bound_ns == min(bounds)
    assert {other.placement_shape for other in found.named} == set(SHAPES)
    assert [order.placement for order in each] == [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    assert all(order.lower_bound_ns == bound for order, bound in zip(each, bounds, strict=True))


def test_with_one_stage_a_rank_there_is_one_placement(tmp_path: Path) -> None:
    found = schedule(write_problem(tmp_path, [stage(None)] * 3, 3, 3), QUICK)
    assert len({other.name for other in found.named}) == len(found.named)


def test_a_placement_replaces_the_ranks_of_the_file(loop: Path) -> None:
    assert schedule(loop, ScheduleRequest(name="zb-v", placement="v")).placement == (0, 1, 1, 0)
    assert schedule(loop, ScheduleRequest(name="zb-v", placement="open")).placement == (0, 1, 1, 0)
    with pytest.raises(InputError, match="schedule 'zb-v' needs the stages placed as v"):
        schedule(loop, ScheduleRequest(name="zb-v"))


def test_a_named_schedule_without_a_shape_takes_the_best_placement(unplaced: Path) -> None:
    found = schedule(unplaced, ScheduleRequest(name="gpipe"))
    values = [
        schedule(unplaced, ScheduleRequest(name="gpipe", placement=shape)).makespan_ns
        for shape in SHAPES
    ]
    assert found.makespan_ns == min(values)


@pytest.mark.parametrize("name", NAMES)
def test_every_named_schedule_can_be_asked_for(tmp_path: Path, name: str) -> None:
    per_rank = required_placement(name)[1] or 2
    path = write_problem(tmp_path, [stage(None) for _ in range(2 * per_rank)], 2, 4)
    found = schedule(path, ScheduleRequest(name=name))
    assert (found.request, found.name) == (name, name)
    assert found.orders == generate(name, found.placement, 4).actions
    # Without backwards less is done, and without a flush no step ends: a bound has no meaning.
    comparable = name != "forward-only" and name not in ASYNCHRONOUS
    assert (found.lower_bound_ns is not None) == comparable
    assert (found.weight_versions != "synchronous") == (name in ASYNCHRONOUS)


def test_a_named_schedule_over_the_caps_is_answered_with_where_and_by_how_much(
    tmp_path: Path,
) -> None:
    path = write_problem(tmp_path, [stage(0), stage(1)], 2, 4, memory_bytes=[6, 4])
    found = schedule(path, ScheduleRequest(name="1f1b"))
    assert (found.fits, found.proven) == (False, False)
    assert found.violations == ("rank 0: from 0F1 on it holds up to 8 B, 2 B over its cap of 6 B",)
    assert {other.name: other.over_bytes for other in found.named} == {
        **{"gpipe": 12, "1f1b": 2, "interleaved-1f1b": 2, "looped-bfs": 12, "zb-h1": 2, "zb-h2": 6}
    }
    assert found.best_named is None
    searched = schedule(path, QUICK)
    assert (searched.name, searched.fits) == ("search", True)
    assert all(peak <= cap for peak, cap in zip(searched.peak_bytes, (6, 4), strict=True))


def test_what_fits_no_placement_says_so_of_each(tmp_path: Path) -> None:
    path = write_problem(tmp_path, [stage(None)] * 4, 2, 4, memory_bytes=[7, 8])
    with pytest.raises(
        InfeasibleError, match=r"linear: .* on rank 0, whose cap is 7 B; .*; loop: .*; v: "
    ):
        schedule(path, QUICK)
    one = write_problem(tmp_path, [stage(0)], 1, 4, memory_bytes=[3])
    with pytest.raises(
        InfeasibleError, match=r"^no order fits: one microbatch alone holds 4 B on rank 0"
    ):
        schedule(one, QUICK)


def test_an_open_placement_leaves_out_what_cannot_fit(tmp_path: Path) -> None:
    """The large stages 0 and 1 need a rank each, so a linear placement cannot fit."""
    sizes = [8, 8, 1, 1]
    stages = [stage(None, activation_bytes=size, weight_gradient_bytes=0) for size in sizes]
    found = schedule(write_problem(tmp_path, stages, 2, 2, memory_bytes=[9, 9]), QUICK)
    assert found.placement_shape in ("loop", "v")
    assert "linear" not in {other.placement_shape for other in found.named}


def test_the_last_stage_keeps_what_others_recompute(tmp_path: Path) -> None:
    stages = [stage(rank, recompute_ns=9, recompute_bytes=3) for rank in (0, 1)]
    found = schedule(write_problem(tmp_path, stages, 2, 1), ScheduleRequest(name="1f1b"))
    assert found.orders == (("0F0", "0R0", "0B0"), ("1F0", "1B0"))
    assert found.peak_bytes == (7, 7)
    assert schedule(write_problem(tmp_path, stages, 2, 4), QUICK).fits


def test_what_skips_keep_counts(tmp_path: Path) -> None:
    path = write_problem(tmp_path, [stage(rank) for rank in range(3)], 3, 4, skips=[[0, 2, 5]])
    assert schedule(path, ScheduleRequest(name="gpipe")).peak_bytes == (4 * 9, 4 * 4, 4 * 4)
    capped = write_problem(
        tmp_path, [stage(r) for r in range(3)], 3, 4, skips=[[0, 2, 5]], memory_bytes=[18] * 3
    )
    assert schedule(capped, QUICK).fits
    assert (
        schedule(capped, ScheduleRequest(name="gpipe"))
        .violations[0]
        .startswith("rank 0: from 0F2 on it holds up to 36")
    )


def csv_of(folder: Path, found: Schedule) -> Path:
    path = folder / "order.csv"
    path.write_text(write_csv(found), newline="")
    return path


def test_an_order_is_read_checked_and_simulated(loop: Path, tmp_path: Path) -> None:
    made = answer_for_file(loop, QUICK)
    found = schedule(loop, ScheduleRequest(order=csv_of(tmp_path, made.schedule)))
    assert (found.request, found.name, found.orders) == ("csv", "csv", made.order.orders)
    assert (found.makespan_ns, found.lower_bound_ns) == (
        made.order.makespan_ns,
        made.order.lower_bound_ns,
    )


def test_the_ranks_of_an_order_are_taken_where_the_file_leaves_them_open(
    unplaced: Path, tmp_path: Path
) -> None:
    order = csv_of(tmp_path, generate("gpipe", [0, 1, 1, 1], 4))
    found = schedule(unplaced, ScheduleRequest(order=order))
    assert (found.placement, found.placement_shape) == ((0, 1, 1, 1), "own")
    with pytest.raises(
        InputError,
        match="the stages on ranks 0 1 1 1, but the problem has not; use --placement open",
    ):
        schedule(unplaced, ScheduleRequest(order=order, placement="v"))


def test_an_order_over_the_caps_is_simulated_all_the_same(tmp_path: Path) -> None:
    path = write_problem(tmp_path, [stage(0), stage(1)], 2, 4, memory_bytes=[6, 4])
    found = schedule(path, ScheduleRequest(order=csv_of(tmp_path, generate("gpipe", [0, 1], 4))))
    assert [line.split(":")[0] for line in found.violations] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "rank 0: 0B1 is missing"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1\n", "rank 1 stops at 1B1 until 1F1 is done"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n", "the last stage takes its microbatches in order"),
        ("0F0,0F1,0B0,0B1,0B1\n1F0,1B0,1F1,1B1\n", "0B1 appears 2 times"),
    ],
)
def test_an_order_that_cannot_be_run_is_refused(tmp_path: Path, rows: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_order(tmp_path, rows)


def read_order(tmp_path: Path, rows: str) -> Order:
    path, order = write_problem(tmp_path, [stage(0), stage(1)], 2, 2), tmp_path / "order.csv"
    order.write_text(rows)
    return schedule(path, ScheduleRequest(order=order))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            "0F0,0B0\n1F0,1B0\n",
            "2 stages on 2 ranks and 1 microbatch, but the problem has 2 stages on 2 ranks and 2",
        ),
        ("0F0,0R0,0B0\n1F0,1B0\n", r"order.csv: line 1, column 2: 0R0 is not F, I, W or B"),
        ("0F0,zero\n", "order.csv: line 1, column 2: 'zero' is not an action"),
        ("", "order.csv: the CSV is no schedule"),
    ],
)
def test_what_is_no_order_for_the_problem_is_refused(
    tmp_path: Path, rows: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_order(tmp_path, rows)


def test_halves_are_refused_where_the_backward_is_whole(tmp_path: Path) -> None:
    path = write_problem(tmp_path, [stage(0), stage(1)], 2, 4, split_backward=False)
    with pytest.raises(
        InputError,
        match="'zb-h1' has backwards in halves, but the problem says split_backward false",
    ):
        schedule(path, ScheduleRequest(name="zb-h1"))
    with pytest.raises(ScheduleError, match="the backward of stage 0 is not split; use B instead"):
        schedule(path, ScheduleRequest(order=csv_of(tmp_path, generate("zb-h1", [0, 1], 4))))


def test_uneven_stages_have_no_shape(tmp_path: Path) -> None:
    path = write_problem(tmp_path, [stage(0), stage(1), stage(1)], 2, 4)
    found = schedule(path, QUICK)
    assert (found.placement_shape, [other.name for other in found.named]) == ("own", ["gpipe"])
    with pytest.raises(InputError, match="3 stages cannot lie evenly on 2 ranks"):
        schedule(path, ScheduleRequest(placement="loop"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "2f2b"},
            "^unknown schedule '2f2b'; choose from search, gpipe",
        ),
        ({"objective": "speed"}, "^unknown objective 'speed'; choose from makespan, span"),
        (
            {"placement": "zigzag"},
            "^unknown placement 'zigzag'; choose from linear, loop, v, open",
        ),
        ({"seconds": 0.0}, "a time limit of 0 s: give a positive number"),
        ({"seconds": float("nan")}, "a time limit of nan s"),
        (
            {"order": "o.csv", "name": "1f1b"},
            "--order o.csv is an order already: leave --name 1f1b out",
        ),
    ],
)
def test_requests_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ScheduleRequest(**options)


def test_names_of_a_request_may_be_in_upper_case() -> None:
    request = ScheduleRequest(name="ZB-V", objective="Span", placement="V")
    assert request == ScheduleRequest(name="zb-v", objective="span", placement="v")


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Problems of a few stages, placed or not; one microbatch alone may exceed a cap."""
    ranks, per_rank, placed = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([*SHAPES, None])),
    )
    number = st.integers(0, 9)
    count = ranks * per_rank
    on = place(placed, ranks, per_rank) if placed else [None] * count
    held = [(draw(number), draw(number) * draw(st.booleans())) for _ in range(count)]
    stages = [
        stage(
            rank,
            forward_ns=draw(number),
            backward_input_ns=draw(number),
            backward_weight_ns=draw(number),
            activation_bytes=kept,
            recompute_ns=draw(number) if recomputed else 0,
            recompute_bytes=recomputed,
            weight_gradient_bytes=draw(st.integers(0, kept + recomputed)),
        )
        for rank, (kept, recomputed) in zip(on, held, strict=True)
    ]
    return {
        "stages": stages,
        "ranks": ranks,
        "microbatches": draw(st.integers(1, 5)),
        "memory_bytes": draw(
            st.none() | st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks)
        ),
        "split_backward": draw(st.booleans()),
        "transfer_ns": draw(number),
        "skips": [[0, 2, draw(number)]] * draw(st.booleans()) if count > 2 else [],
        "blocking_sends": draw(st.booleans()),
        "shared_links": draw(st.booleans()),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(), st.sampled_from(["makespan", "span"]))
def test_any_problem_has_a_sound_answer_or_none(
    tmp_path: Path, fields: dict[str, Any], objective: str
) -> None:
    """An answer is checked before it is returned; here its value is compared with the others."""
    path = write_problem(tmp_path, **fields)
    try:
        found = schedule(path, ScheduleRequest(objective=objective, seconds=0.02))
    except InfeasibleError:
        assert fields["memory_bytes"] is not None
        return
    assert found.fits
    assert found.lower_bound_ns is not None
    assert found.lower_bound_ns <= found.value_ns
    assert found.best_named is None or found.value_ns <= found.best_named.value_ns
    assert simulated(path, found) == (found.makespan_ns, found.span_ns)


def _known() -> dict[str, int]:
    path = INSTANCES / "best_known.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    return {name: case["best_found_ns"] for name, case in cases.items() if "-p4-" in name}


@pytest.mark.one_case_in(3)
@pytest.mark.skipif(not _known(), reason="the schedule instances are not here")
@pytest.mark.parametrize("name", _known())
def test_published_instances_are_solved_as_well_as_is_known(name: str) -> None:
    found = schedule(INSTANCES / f"{name}.json", ScheduleRequest(seconds=2.0))
    assert found.fits
    assert found.makespan_ns <= 1.005 * _known()[name]
