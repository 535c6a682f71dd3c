from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Action, Event, Idle, Timeline
from pipecompile.report.svg import timeline_svg
from pipecompile.schedule.simulator import simulate_plan

MakePlan = Callable[..., Plan]
NAMESPACE = "{http://www.w3.org/2000/svg}"


def _texts(picture: str) -> list[str]:
    return [
        element.text or "" for element in ElementTree.fromstring(picture).iter(f"{NAMESPACE}text")
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_action_is_drawn_inside_the_picture(make_plan: MakePlan, schedule: str) -> None:
    plan = make_plan(schedule=schedule, microbatches=16, recompute="stage")
    picture = ElementTree.fromstring(timeline_svg(plan, simulate_plan(plan)))
    bars = [
        bar for bar in picture.iter(f"{NAMESPACE}rect") if bar.find(f"{NAMESPACE}title") is not None
    ]
    assert len(bars) == sum(map(len, plan.schedule.compute))
    assert min(float(bar.attrib["width"]) for bar in bars) > 0
    assert max(float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in bars) <= 1000


def test_the_words_of_a_picture(make_plan: MakePlan) -> None:
    plan = make_plan()
    texts = _texts(timeline_svg(plan, simulate_plan(plan)))
    assert texts[:3] == [
        "1f1b: 4 stages on 4 ranks, 4 microbatches",
        "step 92.1 ms, bubble 44.9%",
        "idle",
    ]
    assert {"rank 0", "39.3%", "rank 3", "50.4%", "ms", "forward", "backward", "3"} <= set(texts)
    assert "recompute" not in texts


def test_a_picture_has_the_same_bytes_twice(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert timeline_svg(plan, simulate_plan(plan)) == timeline_svg(plan, simulate_plan(plan))


@pytest.mark.parametrize(
    ("makespan", "labels"),
    [
        (8_000, ["0.000", "0.001", "0.002"]),
        (3_000_000, ["0.0", "0.5", "1.0"]),
        (92_000_000, ["0", "20", "40"]),
        (90_000_000_000, ["0", "20,000", "40,000"]),
    ],
)
def test_the_axis_has_round_times(make_plan: MakePlan, makespan: int, labels: list[str]) -> None:
    idle = Idle(dependency_ns=0, transfer_ns=0)
    timeline = Timeline(((Event(Action.parse("0F0"), 0, makespan),),), (idle,))
    texts = _texts(timeline_svg(make_plan(k=1), timeline))
    assert [text for text in texts if text in labels][: len(labels)] == labels
