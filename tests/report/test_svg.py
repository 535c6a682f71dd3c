from __future__ import annotations

import re
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
        "step 92.6 ms, bubble 45.2%",
        "idle",
    ]
    assert {"rank 0", "39.6%", "rank 3", "50.6%", "ms", "forward", "backward", "3"} <= set(texts)
    assert "recompute" not in texts


def test_a_picture_has_the_same_bytes_twice(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert timeline_svg(plan, simulate_plan(plan)) == timeline_svg(plan, simulate_plan(plan))


@pytest.mark.parametrize(
    ("makespan", "unit", "labels"),
    [
        (8_000, "µs", ["0", "1", "2"]),
        (3_000_000, "ms", ["0.0", "0.5", "1.0"]),
        (92_000_000, "ms", ["0", "20", "40"]),
        (90_000_000_000, "s", ["0", "20", "40"]),
    ],
)
def test_the_axis_has_round_times_in_the_unit_of_the_header(
    make_plan: MakePlan, makespan: int, unit: str, labels: list[str]
) -> None:
    idle = Idle(dependency_ns=0, transfer_ns=0)
    timeline = Timeline(((Event(Action.parse("0F0"), 0, makespan),),), (idle,))
    texts = _texts(timeline_svg(make_plan(k=1), timeline))
    assert [text for text in texts[3:] if text in labels][: len(labels)] == labels
    assert unit in texts and f" {unit}, bubble" in texts[1]


def test_relative_times_have_no_seconds(make_plan: MakePlan) -> None:
    plan = make_plan(costs="flops")
    picture = timeline_svg(plan, simulate_plan(plan))
    texts = _texts(picture)
    assert texts[1].endswith(" M units (relative, not seconds), bubble 45.2%")
    assert "M units" in texts and "ms" not in picture.replace("systems", "").split()


def test_regions_are_drawn_as_the_first_part_of_a_backward(make_plan: MakePlan) -> None:
    plan = make_plan(schedule="gpipe", recompute="sqrt")
    picture = timeline_svg(plan, simulate_plan(plan))
    assert "recompute" in _texts(picture)
    parts = re.findall(
        r'width="([0-9.]+)" height="32" rx="[0-9.]+" fill="url\(#recompute\)"', picture
    )
    backwards = re.findall(r'width="([0-9.]+)" height="32" rx="[0-9.]+" fill="#d2741f"', picture)
    stage = plan.stages[0]
    share = stage.recompute_ns / (stage.recompute_ns + stage.backward_ns)
    assert len(parts) == 3 * plan.microbatches, "the last stage recomputes nothing"
    assert float(parts[0]) / float(backwards[0]) == pytest.approx(share, abs=0.03)


def test_recompute_is_hatched_and_later_stages_of_a_rank_are_lower(make_plan: MakePlan) -> None:
    plan = make_plan(schedule="interleaved-1f1b", stages_per_rank=2, recompute="stage")
    picture = ElementTree.fromstring(timeline_svg(plan, simulate_plan(plan)))
    assert picture.find(f".//{NAMESPACE}pattern[@id='recompute']") is not None
    looks: dict[tuple[str, str], set[tuple[str, float, str]]] = {}
    for bar in picture.iter(f"{NAMESPACE}rect"):
        hint = bar.findtext(f"{NAMESPACE}title")
        if hint is not None:
            stage, kind = hint[0], hint[1]
            bottom = (float(bar.attrib["y"]) + float(bar.attrib["height"])) % 40
            look = bar.attrib["height"], bottom, bar.attrib["fill"]
            looks.setdefault((stage, kind), set()).add(look)
    heights = {key: [height for height, *_ in look] for key, look in looks.items()}
    assert heights[("0", "F")] == heights[("0", "R")] == heights[("1", "B")] == ["32"]
    assert heights[("2", "F")] == heights[("2", "R")] == heights[("3", "B")] == ["22"]
    # They stand on one line, and a recompute looks like nothing else.
    assert len({bottom for look in looks.values() for _, bottom, _ in look}) == 1
    assert {fill for look in looks.values() for *_, fill in look if fill.startswith("url")} == {
        "url(#recompute)"
    }
    assert "numbers: microbatches; lower bars: the later stages of a rank" in _texts(
        timeline_svg(plan, simulate_plan(plan))
    )
