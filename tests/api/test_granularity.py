"""Plans of a real model cut at every level of its tree."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from examples import models
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.soundness import findings
from pipecompile.errors import InputError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import GRANULARITIES, Plan, Provenance
from pipecompile.ir.serialization import decode, encode
from pipecompile.planner.draft import draft
from pipecompile.report.summary import summary


@lru_cache
def _target() -> Target:
    return Target.of(models.gpt2(), "gpt2")


@lru_cache
def _graph() -> CostGraph:
    options = options_for(_target(), k=3, microbatches=4, costs="flops")
    captured = capture_target(_target(), options, verify=False)
    return cost_graph(_target(), options.costs, options.microbatches, captured)


def _plan(granularity: str, **choices: Any) -> Plan:
    choices = {"k": 3, "microbatches": 4, "costs": "flops", "granularity": granularity, **choices}
    return draft(
        _graph(),
        options_for(_target(), **choices),
        graph_digest="",
        capture=Provenance(verified=False),
        microbatch_shapes=[],
    )


def _split_layers(plan: Plan) -> int:
    """How many layers of the model lie in more than one stage."""
    stages: dict[str, set[int]] = {}
    for name, stage in plan.assignment.items():
        if name.startswith("transformer_h_"):
            stages.setdefault(name[: len("transformer_h_0")], set()).add(stage)
    return sum(len(stage_set) > 1 for stage_set in stages.values())


def test_the_granularity_is_part_of_the_plan_and_coarser_cuts_are_no_better() -> None:
    plans = {granularity: _plan(granularity) for granularity in GRANULARITIES}
    for granularity, plan in plans.items():
        assert plan.options.granularity == granularity
        assert findings(plan) == []
        assert decode(encode(plan), Plan, origin="plan") == plan
    values = {granularity: plan.search.value for granularity, plan in plans.items()}
    assert values["operators"] <= values["modules"] <= values["blocks"]
    assert values["operators"] <= values["auto"] <= values["blocks"]
    assert plans["auto"].search.bound <= values["operators"]
    assert _split_layers(plans["blocks"]) == 0 < _split_layers(plans["operators"])
    assert "cut between blocks" in summary(plans["blocks"])
    assert "cut between" not in summary(plans["operators"])


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    "choices",
    [
        {"objective": "step-time"},
        {"schedule": "search"},
        {"schedule": "interleaved-1f1b", "k": 4, "stages_per_rank": 2},
    ],
    ids=["step-time", "searched", "several stages a rank"],
)
def test_blocks_stay_whole_under_every_objective_schedule_and_placement(
    choices: dict[str, Any],
) -> None:
    blocks, auto = _plan("blocks", **choices), _plan("auto", **choices)
    assert findings(blocks) == findings(auto) == []
    assert _split_layers(blocks) == 0
    assert auto.search.value <= blocks.search.value


def test_other_granularities_are_refused() -> None:
    with pytest.raises(
        InputError,
        match="unknown granularity 'layers'; choose from operators, modules, blocks",
    ):
        options_for(_target(), k=2, granularity="layers")
