"""Plans whose cut is a layout."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples import models
from pipecompile import pipecompile
from pipecompile.api.choices import requested_options
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.soundness import findings
from pipecompile.errors import InputError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import LAYOUT_FORMATS, LayoutFormat, Plan, Provenance
from pipecompile.ir.serialization import decode, encode
from pipecompile.layouts.assignment import layers_of
from pipecompile.layouts.export import export_layout
from pipecompile.planner.draft import draft
from pipecompile.report.summary import summary


@lru_cache
def _target() -> Target:
    return Target.of(models.gpt2(), "gpt2")


@lru_cache
def _graph() -> CostGraph:
    options = options_for(_target(), k=2, microbatches=4, costs="flops")
    captured = capture_target(_target(), options, verify=False)
    return cost_graph(_target(), options.costs, options.microbatches, captured)


def _plan(**choices: Any) -> Plan:
    return draft(
        _graph(),
        options_for(_target(), microbatches=4, costs="flops", **choices),
        graph_digest="",
        capture=Provenance(verified=False),
        microbatch_shapes=[],
    )


def _layers() -> int:
    return len(layers_of(_graph()).layers)


def test_the_cut_is_the_layouts_and_the_plan_keeps_its_text() -> None:
    layers = _layers()
    plan = _plan(layout=f"Et|t*{layers - 1}L")
    assert (plan.k, plan.options.layout_format) == (2, "megatron")
    assert plan.options.pin == {}
    assert findings(plan) == []
    stages = plan.assignment
    assert {stages[f"transformer_h_{index}_ln_1"] for index in range(1, layers)} == {1}
    assert (stages["transformer_wte"], stages["transformer_h_0_ln_1"], stages["lm_head"]) == (
        0,
        0,
        1,
    )
    assert decode(encode(plan), Plan, origin="test") == plan
    text = summary(plan)
    assert f"layout     Et|t*{layers - 1}L (megatron)" in text
    assert "proven" not in text


def test_a_layout_over_two_stages_a_rank_is_scheduled() -> None:
    layers = _layers()
    plan = _plan(layout=f"E|t|t*{layers - 1}|L", schedule="interleaved-1f1b", stages_per_rank=2)
    assert (plan.k, plan.ranks) == (4, 2)
    assert findings(plan) == []


@pytest.mark.parametrize("form", LAYOUT_FORMATS)
def test_a_plan_in_the_words_of_each_format_gives_the_same_cut(form: LayoutFormat) -> None:
    plan = _plan(layout=f"Et|t*{_layers() - 1}L")
    exported = export_layout(plan, form)
    assert _plan(layout=exported.text, layout_format=form).stages == plan.stages


def test_a_searched_cut_between_blocks_is_exported_to_modules_and_comes_back() -> None:
    plan = _plan(k=3, granularity="modules")
    again = _plan(layout=export_layout(plan, "json").text)
    assert again.assignment == plan.assignment


def test_a_layout_can_lie_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "layout.txt"
    path.write_text("Et*2|tL\n")
    assert requested_options(layout=str(path)).layout == "Et*2|tL"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"layout": "Et|tL", "k": 3}, "the layout has 2 stages, but k=3; leave that out"),
        ({"layout": "Et|tL", "ranks": 4}, "has 2 stages, but ranks=4, which is k=4"),
        ({"layout": "Et|tL", "pin": {"a": 0}}, "leave out pin, or the layout"),
        ({"layout": "Et|tL", "granularity": "blocks"}, "granularity='blocks' is for cuts that are"),
        ({"layers": "h"}, "layers='h' is of a layout; give layout= too"),
        ({"layout": "Et|xL"}, "of no known form"),
    ],
)
def test_options_that_contradict_a_layout_are_refused(
    choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        requested_options(costs="flops", **choices)


def test_a_layout_for_another_number_of_layers_shows_both() -> None:
    layers = _layers()
    with pytest.raises(
        InputError, match=rf"has {layers + 2} layers, but the model has {layers} \(transformer\.h"
    ):
        _plan(layout=f"Et|t*{layers + 1}L")


def test_a_list_of_modules_in_python_is_the_cut_that_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    pipeline = pipecompile(
        model,
        torch.randn(4, 4),
        microbatches=2,
        layout=[["0", "1"], ["2"]],
        costs="flops",
        loss_fn=nn.functional.mse_loss,
    )
    assert [stage.modules for stage in pipeline.plan.stages] == [("0", "1"), ("2",)]
    loss = pipeline.step(torch.randn(4, 4), torch.randn(4, 4))
    assert torch.isfinite(torch.as_tensor(loss))
