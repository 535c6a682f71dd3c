"""What a check says of a plan whose model, or whose costs, have changed."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from pipecompile.api.open_setting import plan_of
from pipecompile.api.plan_request import plan_request
from pipecompile.api.staleness import staleness
from pipecompile.frontend.target import Target
from pipecompile.ir.finding import Finding
from pipecompile.ir.links import FREE
from pipecompile.ir.plan import Plan
from pipecompile.profiling.stage_correction import Draft

replace = msgspec.structs.replace


def target_with(layers: int = 4, width: int = 16, dropout: float = 0.1) -> Target:
    up, drop, down = nn.Linear(8, width), nn.Dropout(dropout), nn.Linear(width, 8)
    layer = nn.Sequential(OrderedDict(up=up, drop=drop, down=down))
    blocks = [deepcopy(layer) for _ in range(layers)]
    return Target.of(
        {
            "model": nn.Sequential(*blocks, nn.Linear(8, 2)),
            "sample_input": torch.ones(8, 8),
            "targets": torch.ones(8, 2),
            "loss_fn": nn.functional.mse_loss,
        },
        "a test",
    )


def planned(target: Target, costs: str = "roofline:h100", **options: Any) -> Plan:
    requested = plan_request(k=2, microbatches=4, costs=costs, **options)
    return plan_of(target, requested, FREE, self_check=False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(target_with())


def said(findings: Sequence[Finding]) -> list[tuple[str, bool, str]]:
    return [(each.code, each.passed, each.message.partition(" (")[0]) for each in findings]


def test_a_plan_of_the_same_model_is_current(plan: Plan) -> None:
    current = ("stale", True, "current: the model gives this plan")
    assert said(staleness(plan, target_with())) == [current]
    (first, drift) = said(staleness(plan, target_with(), drift=0.05))
    assert (first, drift) == (current, ("drift", True, "times are within 5.0% of the plan's"))


@pytest.mark.parametrize(
    ("changed", "messages"),
    [
        (target_with(dropout=0.2), ["0 … 3 (4 blocks): each 1 of 3 nodes changed (_0_drop)"]),
        (target_with(width=17), ["0 … 3 (4 blocks): each 3 of 3 nodes changed (_0_up, "]),
        # The last Linear was block 4, and is block 5 now.
        (target_with(layers=5), ["4: 1 of 3 nodes changed", "5: came, 1 node"]),
        (target_with(layers=3), ["3: 1 of 1 node changed", "4: went, 1 node"]),
    ],
    ids=["dropout", "width", "one layer more", "one layer less"],
)
def test_a_changed_model_is_named_by_its_blocks(
    plan: Plan, changed: Target, messages: list[str]
) -> None:
    stale, *nodes = staleness(plan, changed)
    assert (stale.code, stale.passed) == ("stale", False)
    assert "made for another graph" in stale.message
    assert len(nodes) == len(messages)
    for finding, message in zip(nodes, messages, strict=True):
        assert (finding.code, finding.passed) == ("nodes", False)
        assert finding.message.startswith(message)


def test_other_connections_of_the_same_nodes_are_a_change() -> None:
    class Branches(nn.Module):
        def __init__(self, swapped: bool) -> None:
            super().__init__()
            self.swapped = swapped
            self.one, self.other, self.last = nn.Tanh(), nn.Tanh(), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = self.one(x), self.other(x)
            one, other = (other, one) if self.swapped else (one, other)
            return self.last(one) + other.sum()

    straight, swapped = (
        dataclasses.replace(target_with(), model=Branches(each)) for each in (False, True)
    )
    stale, nodes = staleness(planned(straight), swapped)
    assert not stale.passed
    assert "connected otherwise" in nodes.message


def test_a_plan_without_digests_is_stale_without_details(plan: Plan) -> None:
    def plain(stage: Any) -> Any:
        return replace(
            stage, module_runs=tuple(replace(run, digests=()) for run in stage.module_runs)
        )

    older = replace(plan, stages=tuple(map(plain, plan.stages)))
    (stale,) = staleness(older, target_with(layers=5))
    assert not stale.passed
    (edited,) = staleness(older, target_with())
    assert "the file was edited" in edited.message


def with_costs_of_yesterday(plan: Plan, factor: float) -> Plan:
    """The plan as if all times of its first block had been other ones."""
    stage = plan.stages[0]
    runs = tuple(
        replace(run, ns=round(run.ns * factor)) if run.module.startswith("0.") else run
        for run in stage.module_runs
    )
    fingerprint = replace(plan.fingerprint, costs="0" * 64)
    stages = (replace(stage, module_runs=runs), *plan.stages[1:])
    return replace(plan, stages=stages, fingerprint=fingerprint)


def test_costs_that_changed_are_named_and_a_drift_lets_them_differ(plan: Plan) -> None:
    older = with_costs_of_yesterday(plan, 1 / 1.1)
    assert said(staleness(older, target_with())) == [
        ("stale", False, "the costs changed"),
        ("drift", False, "0: time +10.0%"),
    ]
    within = said(staleness(older, target_with(), drift=0.11))
    assert within[0] == ("stale", True, "current: the model has the plan's graph")
    assert within[1][:2] == ("drift", True)
    assert "largest drift is +10.0% of 0" in within[1][2]
    over = said(staleness(older, target_with(), drift=0.05))
    assert over[1] == ("drift", False, "0: time +10.0%")


def test_measured_costs_are_compared_only_with_a_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(target_with(), "measured")
    assert said(staleness(plan, target_with())) == [
        ("stale", True, "current: the model gives this plan")
    ]
    cuts = []

    def slower(graph: Any, draft: Draft, timer: Any) -> Plan:
        """The plan by times that are all twice those of `plan`; what is measured is left out."""
        cuts.append(draft(graph).assignment)
        stages = [
            replace(s, module_runs=tuple(replace(r, ns=2 * r.ns) for r in s.module_runs))
            for s in plan.stages
        ]
        return replace(plan, stages=tuple(stages))

    monkeypatch.setattr("pipecompile.api.plan.correct_stages", slower)
    graph, *drifts = staleness(plan, target_with(), drift=0.5)
    assert graph.passed
    assert cuts == [plan.assignment]
    assert {each.code for each in drifts} == {"drift"}
    assert not any(each.passed for each in drifts)
    assert all("time +100.0%" in each.message for each in drifts)
    # The file of a plan whose blocks took nothing has no times to compare by share.
    assert [each.passed for each in staleness(plan, target_with(), drift=2.0)] == [True, True]
