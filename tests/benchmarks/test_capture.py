from __future__ import annotations

import json
import os
from typing import Any

import pytest

from benchmarks import capture
from benchmarks.capture import CHECKS, DOCS, MARKS, OURS, RESULT, WAYS, attempt, table, totals
from benchmarks.capture_rivals import (
    Rival,
    capture_by_export,
    capture_by_pipelining,
    differences_of_rival,
)
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from tests.zoo import first
from tests.zoo.models import MODELS


def test_the_docs_show_the_figures() -> None:
    shown = DOCS.read_text().split(MARKS[0])[1].split(MARKS[1])[0]
    assert shown.strip() == table(json.loads(RESULT.read_text())["models"])


def test_every_model_of_the_zoo_has_figures() -> None:
    assert list(json.loads(RESULT.read_text())["models"]) == list(MODELS)


def test_ours_is_exact_in_the_figures_or_refused_which_is_rare() -> None:
    answers = [row[OURS] for row in json.loads(RESULT.read_text())["models"].values()]
    captured = [answer["checks"] for answer in answers if answer["captured"]]
    assert all(checks == dict.fromkeys(CHECKS, "exact") for checks in captured)
    assert len(answers) - len(captured) <= len(answers) / 30


def _captured(train: str, **checks: str) -> dict[str, Any]:
    return {
        "captured": True,
        "checks": {"train": train, "batch": "exact", "eval": "refused: Error: no"} | checks,
    }


def test_totals_count_what_is_wrong_without_an_error_once() -> None:
    nothing = {"captured": False, "error": "Error: no"}
    rows = [
        dict.fromkeys(WAYS, nothing)
        | {OURS: _captured("exact", eval="exact"), "torch.export": _captured("wrong: a")},
        dict.fromkeys(WAYS, nothing) | {"torch.export": _captured("wrong: a", batch="wrong: b")},
    ]
    lines = dict(zip(WAYS, totals({"one": rows[0], "two": rows[1]}), strict=True))
    assert lines[OURS].split(None, 1)[1] == (
        "captured 1/2, train 1, another batch 1, after .eval() –, captured for eval 1, "
        "silently wrong 0"
    )
    assert lines["torch.export"].split(None, 1)[1] == (
        "captured 2/2, train 0, another batch 1, after .eval() 0, captured for eval 0, "
        "silently wrong 2"
    )


def test_a_crash_and_a_long_wait_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "crash", lambda: os._exit(3))
    assert attempt(OURS, "crash") == {"captured": False, "error": "the process ended with code 3"}
    monkeypatch.setattr(capture, "SECONDS", 0.0)
    assert attempt(OURS, "skips")["error"] == "no answer within 0 s"


def _model(name: str) -> tuple[Any, Arguments]:
    target = Target.of(MODELS[name](), name)
    return target.model.train(), first(4, target.call)


def test_rivals_are_judged_by_the_names_of_the_model() -> None:
    model, call = _model("skips")
    assert differences_of_rival(model, capture_by_export(model, call), call) == []
    assert differences_of_rival(model, capture_by_pipelining(model, call), call) == []


def test_a_rival_that_is_wrong_is_found() -> None:
    model, call = _model("ties")
    assert (
        differences_of_rival(
            model, Rival(model, lambda call: model(*call.args, **call.kwargs)), call
        )
        == []
    )
    assert "gradients" in " ".join(
        differences_of_rival(model, capture_by_pipelining(model, call), call)
    )
