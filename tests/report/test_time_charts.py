"""The data of charts over time: unpacked, it is the timeline, and the memory of the prediction."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from itertools import accumulate
from typing import Any

import pytest

from pipecompile.ir.plan import Plan
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.report.memory import memory_bounds
from pipecompile.report.time_charts import NamedTimeline, chart_data, kinds_drawn, memory_rows
from pipecompile.schedule.simulator import simulate_plan
from tests.report.transformers import transformer_plan

KINDS = RankMemory.__struct_fields__


def unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(b64decode(text)))


def moments(columns: list[list[Any]]) -> list[tuple[str, int, int]]:
    """The actions of columns with their starts and ends."""
    end, found = 0, []
    for stage, kind, microbatch, wait, length in zip(*columns, strict=True):
        start = end + wait
        end = start + length
        found.append((f"{stage}{kind}{'' if microbatch is None else microbatch}", start, end))
    return found


def charted(plan: Plan) -> Any:
    timeline = simulate_plan(plan)
    memory = memory_rows(plan, timeline, KINDS, memory_bounds(plan), [None] * plan.ranks)
    return unpacked(chart_data([NamedTimeline("predicted", timeline, {})], memory, plan.time_unit))


PLANS = {
    "1f1b": lambda: transformer_plan(4, 6, 8),
    "zb-h1": lambda: transformer_plan(3, 6, 8, schedule="zb-h1"),
    "interleaved-1f1b": lambda: transformer_plan(
        6, 6, 8, schedule="interleaved-1f1b", stages_per_rank=2
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_actions_come_back_as_they_were(name: str) -> None:
    plan = PLANS[name]()
    (drawn,) = charted(plan)["timelines"]
    for columns, row in zip(drawn["ranks"], simulate_plan(plan).events, strict=True):
        assert moments(columns) == [(str(e.action), e.start_ns, e.end_ns) for e in row]
    assert sum(drawn["idle"]) / plan.ranks == pytest.approx(plan.prediction.bubble)


@pytest.mark.parametrize("name", PLANS)
def test_the_most_that_is_drawn_is_the_predicted_peak(name: str) -> None:
    plan = PLANS[name]()
    for drawn, predicted in zip(
        charted(plan)["memory"]["ranks"], plan.prediction.memory, strict=True
    ):
        held = list(zip(*map(accumulate, drawn["bytes"]), strict=True))
        peak = tuple(getattr(predicted, kind).expected for kind in KINDS)
        assert peak in held and sum(peak) == max(map(sum, held))
        names, starts, ends = zip(*moments(drawn["actions"]), strict=True)
        assert list(starts) == sorted(starts) and list(ends) == sorted(ends)
        assert names[-1].endswith("STEP") and ends[-1] == plan.prediction.step_ns


def test_units_are_those_of_the_plan() -> None:
    assert charted(transformer_plan(2, 2, 2))["units"] == [
        ["s", 1e9],
        ["ms", 1e6],
        ["µs", 1e3],
        ["ns", 1.0],
    ]
    relative = charted(transformer_plan(2, 2, 2, time_unit="relative"))["units"]
    assert relative == [["G units", 1e9], ["M units", 1e6], ["k units", 1e3], ["units", 1.0]]


def test_the_key_has_the_kinds_that_are_drawn() -> None:
    timeline = simulate_plan(PLANS["zb-h1"]())
    split = ["forward", "input backward", "weight backward"]
    assert kinds_drawn([NamedTimeline("", timeline, {})]) == split
    assert kinds_drawn([NamedTimeline("", timeline, {0: 0.5})]) == [*split, "recompute"]
