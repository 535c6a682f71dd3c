"""What a notebook shows of a plan."""

from __future__ import annotations

import re
from base64 import b64decode
from xml.etree import ElementTree

import msgspec
import pytest

from pipecompile.ir.plan import Plan
from pipecompile.report import plan_card
from tests.report.pages import Page
from tests.report.transformers import transformer_plan

SVG = "{http://www.w3.org/2000/svg}"


def lines(card: str, colour: str) -> list[str]:
    """The lines of the picture that have a colour, one for each action."""
    data = re.search(r"base64,([^\"]+)", card)
    assert data is not None
    for path in ElementTree.fromstring(b64decode(data[1])).iter(f"{SVG}path"):
        if path.attrib["stroke"] == colour:
            return path.attrib["d"].split("M")[1:]
    return []


def test_a_card_is_small_whole_and_disturbs_nothing() -> None:
    plan = transformer_plan(64, 16, 126)
    card = plan._repr_html_()
    page = Page()
    page.feed(card)
    assert page.open == []
    assert {"script", "style", "link", "iframe"}.isdisjoint(page.seen)
    assert " id=" not in card and "http" not in card.replace("http://www.w3.org", "")
    assert len(card) < 100_000


def test_each_action_is_a_line() -> None:
    plan = transformer_plan(4, 6, 8)
    card = plan._repr_html_()
    assert "1f1b: 4 stages on 4 ranks, 6 microbatches" in card
    assert f"bubble {plan.prediction.bubble:.1%}" in card
    assert len(lines(card, "#4f83cc")) == len(lines(card, "#d2741f")) == 4 * 6
    assert lines(card, "#5f9a60") == []
    ends = [sum(map(int, re.findall(r"\d+", line)[::2])) for line in lines(card, "#d2741f")]
    # Rank 0 ends with the step, at the right edge; a line is 2 of 2000 shorter than its action.
    assert max(ends) == 2000 - 2
    assert card.count("<tr>") == 1 + 4 and "<td>3</td><td>3</td>" in card


def test_too_many_actions_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = transformer_plan(4, 6, 8)
    monkeypatch.setattr(plan_card, "_MOST_ACTIONS", 2 * 4 * 6)
    assert "<img" in plan._repr_html_()
    monkeypatch.setattr(plan_card, "_MOST_ACTIONS", 2 * 4 * 6 - 1)
    card = plan._repr_html_()
    assert "<img" not in card and "48 actions in a step" in card


def test_names_in_a_card_are_escaped() -> None:
    plan = transformer_plan(2, 2, 2)
    first = msgspec.structs.replace(plan.stages[0], modules=("<script>",))
    card = msgspec.structs.replace(plan, stages=(first, plan.stages[1]))._repr_html_()
    assert "<script" not in card and "&lt;script&gt;" in card


def test_the_repr_is_one_line() -> None:
    plan: Plan = transformer_plan(4, 6, 8)
    assert repr(plan) == "Plan(4 stages on 4 ranks, 1f1b, 6 microbatches, costs roofline:h100)"
