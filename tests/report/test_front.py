"""The chart of memory and time of the settings that a joint search planned."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.ir.plan import Plan
from pipecompile.ir.setting import (
    JointSearch,
    OtherSettings,
    Setting,
    SettingResult,
    SettingStatus,
)
from pipecompile.report.front import FrontChart, front_chart
from pipecompile.report.joint import others_table, settings_table
from pipecompile.report.plan_page import plan_page
from pipecompile.report.summary import summary
from pipecompile.schedule.simulator import simulate_plan
from tests.report.pages import Page

MakePlan = Callable[..., Plan]
Values = list[tuple[int, int]]


def with_settings(plan: Plan, values: Values) -> Plan:
    """The plan as if a joint search had listed settings with these steps and bytes."""
    results = tuple(
        SettingResult(
            setting=Setting(
                ranks=2,
                stages_per_rank=1,
                replicas=1,
                microbatches=number,
                schedule="1f1b",
                recompute="none",
            ),
            status="planned",
            bound_ns=0,
            step_ns=step,
            memory_bytes=held,
            bubble=0.5,
        )
        for number, (step, held) in enumerate(values, 1)
    )
    counts = {"planned": len(results)}
    joint = JointSearch(
        devices="2xh100", settings=len(results), bound_ns=0, gap=1.0, counts=counts, best=results
    )
    return msgspec.structs.replace(plan, joint=joint)


@pytest.fixture(scope="module")
def plan(make_plan: MakePlan) -> Plan:
    return make_plan()


def drawn(plan: Plan, values: Values) -> FrontChart:
    chart = front_chart(with_settings(plan, values))
    assert chart is not None
    return chart


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=8))
def test_the_front_has_the_points_that_no_other_beats(plan: Plan, values: Values) -> None:
    chart = drawn(plan, values)
    points = {point.text.rstrip("+"): point for point in chart.points}
    assert len(points) == len(set(values))
    for text, point in points.items():
        step, held = values[int(text) - 1]
        better = [(s, h) for s, h in values if s <= step and h <= held and (s, h) != (step, held)]
        assert point.is_on_front == (not better)
        # Longer steps are higher up, and more memory is further to the right.
        for other, place in points.items():
            assert (values[int(other) - 1][0] > step) == (place.y < point.y)
            assert (values[int(other) - 1][1] > held) == (place.x > point.x)
    assert all(15 <= x <= 95 for x, _ in chart.memory_ticks)
    assert all(8 <= y <= 80 for y, _ in chart.time_ticks)


def test_ticks_are_round_and_in_one_unit(plan: Plan) -> None:
    chart = drawn(plan, [(2_000_000, 3 << 30), (2_900_000, 1 << 30)])
    assert [text for _, text in chart.memory_ticks] == ["1 GiB", "2 GiB", "3 GiB"]
    assert [text for _, text in chart.time_ticks] == ["2.0 ms", "2.5 ms"]


def test_lines_of_the_front_are_stairs(plan: Plan) -> None:
    chart = drawn(plan, [(10, 30), (20, 20), (30, 10), (30, 30)])
    assert all((x1 == x2) != (y1 == y2) for x1, y1, x2, y2 in chart.lines)
    assert len(chart.lines) == 4


def test_the_page_has_chart_and_table_of_a_joint_search_alone(plan: Plan) -> None:
    heading = "Memory and time of other settings"
    assert front_chart(plan) is None
    assert heading not in plan_page(plan, simulate_plan(plan))
    chosen = with_settings(plan, [(10, 30), (20, 20), (10, 30)])
    text = plan_page(chosen, simulate_plan(chosen))
    page = Page()
    page.feed(text)
    assert page.open == []
    section = text.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]
    assert section.count("<circle") == 2
    assert 'class="chosen"><title>10 ns, 30 B\n1: 1 replica × 2 ranks' in section
    assert section.count("<tr>") == 4


def test_the_head_says_by_which_times_the_bound_holds(plan: Plan) -> None:
    """Whole stages that are measured after a search give another step than the search had."""
    step = plan.prediction.step_ns
    same, other = (summary(with_settings(plan, [(each, 30), (20, 20)])) for each in (step, 10))
    assert "a step below 0 ns, gap" in same and "by the times of nodes" not in same
    assert "a step below 0 ns by the times of nodes, by which this one takes 10 ns, gap" in other
    assert "that were planned, by the times of nodes, the first one is" in "\n".join(
        settings_table(with_settings(plan, [(10, 30), (20, 20)]))
    )


def test_the_other_settings_are_counted_by_what_ruled_them_out(plan: Plan) -> None:
    def other(status: SettingStatus, schedule: str, bounds: dict[int, int]) -> OtherSettings:
        return OtherSettings(
            status=status,
            ranks=2,
            stages_per_rank=1,
            replicas=1,
            schedule=schedule,
            recompute="none",
            microbatches=tuple(bounds),
            bounds_ns=tuple(bounds.values()),
        )

    listed = with_settings(plan, [(plan.prediction.step_ns, 20)])
    assert listed.joint is not None
    assert list(others_table(listed)) == []
    others = (
        other("bound", "gpipe", {2: 50, 4: 40}),
        other("bound", "zb-h1", {1: 60}),
        other("memory", "zb-h2", {8: 0}),
    )
    counts: dict[SettingStatus, int] = {"planned": 1, "bound": 3, "memory": 1}
    joint = msgspec.structs.replace(listed.joint, settings=5, counts=counts, others=others)
    alone = list(settings_table(msgspec.structs.replace(plan, joint=joint)))
    assert alone[0] == "the setting that was planned"
    assert len(alone) == 3
    assert list(others_table(msgspec.structs.replace(plan, joint=joint))) == [
        "the other settings: none has a step below the bound in its row",
        "outcome                 settings replicas ranks microbatches schedule    recompute bound",
        "cannot be shorter              3        1     2       1 to 4 gpipe/zb-h1 none      40 ns",
        "cannot fit their memory        1        1     2            8 zb-h2       none",
    ]
