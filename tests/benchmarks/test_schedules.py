from __future__ import annotations

import json

import pytest

from benchmarks import schedules
from pipecompile.schedule.search import best_named, search


@pytest.mark.parametrize("setting", json.loads(schedules.TABLE_5.read_text())["rows"][:1])
def test_rates_of_table_5_are_those_published(
    setting: schedules.Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "SECONDS", 0.3)
    ours, published = dict(schedules._rates(setting)), setting["published"]
    for name in ("1F1B", "ZB-H1", "ZB-H2"):
        assert ours[name] == published[name]
    assert ours["ZB-1p"] <= published["ZB-1p"]
    assert ours["1F1B-I"] == pytest.approx(published["1F1B-I"], abs=0.004)


def test_a_makespan_above_a_named_or_known_one_is_a_violation() -> None:
    problem = schedules._linked((0, 1), 4, [schedules.StageCosts(3, 6, 3, 3)] * 2, 1)
    result = search(problem, seconds=0.1)
    best = best_named(result.named)
    assert best is not None
    assert not list(schedules._violations("x", result, best, result.value_ns, 1.0))
    assert len(list(schedules._violations("x", result, best, result.value_ns // 2, 11.0))) == 2


@pytest.mark.parametrize("costs", ["equal", "±20 %"])
def test_large_problems_are_the_same_each_time(costs: str) -> None:
    one, other = schedules._large(costs, "1f1b's"), schedules._large(costs, "1f1b's")
    assert one == other
    assert one.caps == (2 * one.ranks,) * one.ranks


def test_absent_instances_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedules, "INSTANCES", schedules.ROOT / "nowhere")
    assert schedules.instances() == schedules.placements() == []
    assert "skipped" in capsys.readouterr().out
