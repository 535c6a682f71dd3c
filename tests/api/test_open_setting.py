"""Plans of `k` alone: what is chosen, beside all settings and beside the plain defaults."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from pipecompile import InfeasibleError, Plan, pipecompile
from pipecompile.api.check import check_plan
from pipecompile.api.open_setting import plan_of, plan_with_choice
from pipecompile.api.options import options_for
from pipecompile.api.plan import make_plan
from pipecompile.api.plan_request import plan_request
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE
from pipecompile.ir.serialization import encode
from pipecompile.ir.setting import JointSearch
from pipecompile.profiling.stage_correction import Draft
from pipecompile.report.summary import summary
from pipecompile.training.stage_timer import StageTimer

WIDTH, SAMPLES = 64, 16
COSTS = "roofline:h100"


def chain(layers: int = 8, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layer = (nn.BatchNorm1d(WIDTH),) if norm else ()
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *layer) for _ in range(layers)]
    return nn.Sequential(*blocks)


def target_of(model: nn.Module, samples: int = SAMPLES) -> Target:
    batch = torch.randn(samples, WIDTH)
    return Target(model, arguments_of(model, batch), nn.functional.mse_loss, batch)


def chosen(target: Target, costs: str = COSTS, **options: Any) -> Plan:
    return plan_of(target, plan_request(costs=costs, **options), FREE, self_check=False)


def fixed(target: Target, costs: str = COSTS, **options: Any) -> Plan:
    """The plan by hand."""
    complete = options_for(target, costs=costs, **options)
    return make_plan(target, complete, capture_target(target, complete, verify=False))


def test_the_step_is_the_shortest_of_all_settings_by_hand() -> None:
    target = target_of(chain())
    plan = chosen(target, k=2)
    tried = [
        fixed(target, k=2, microbatches=number, schedule=schedule).prediction.step_ns
        for number in (2, 4, 8)
        for schedule in ("1f1b", "zb-h1")
    ]
    assert plan.prediction.step_ns == min(tried)
    assert plan.joint is not None
    assert plan.joint.bound_ns <= min(tried)
    assert plan.prediction.step_ns < fixed(target, k=2, microbatches=2).prediction.step_ns
    assert "chosen     what was left open" in summary(plan)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_where_only_ranks_are_given_stages_on_each_are_chosen_too(memory: str | None) -> None:
    target = target_of(chain(16), samples=4096)
    plan = chosen(target, "flops", ranks=2, memory=memory)
    by_k = chosen(target, "flops", k=2, memory=memory)
    several = [
        fixed(target, "flops", ranks=2, microbatches=number, schedule=schedule, memory=memory)
        for number in (2, 4, 8)
        for schedule in ("zb-v", "v-half", "v-min")
    ]
    shortest = min(each.prediction.step_ns for each in (by_k, *several))
    assert plan.prediction.step_ns <= shortest < by_k.prediction.step_ns
    assert (plan.ranks, plan.k, plan.options.stages_per_rank) == (2, 4, None)
    assert [finding.passed for finding in check_plan(plan)] == [True] * len(check_plan(plan))


def test_a_plan_by_hand_with_what_was_chosen_is_the_same_plan() -> None:
    target = target_of(chain())
    plan = chosen(target, k=4)
    setting = plan.options
    again = chosen(
        target, k=4, microbatches=setting.microbatches, schedule=setting.schedule, recompute="none"
    )
    with_choice, by_hand = (json.loads(encode(each)) for each in (plan, again))
    assert with_choice.pop("joint") is not None
    assert by_hand.pop("joint", None) is None
    assert with_choice == by_hand
    assert [finding.passed for finding in check_plan(plan)] == [True] * len(check_plan(plan))


@pytest.mark.parametrize(("samples", "number"), [(7, 7), (6, 6), (9, 9), (10, 5), (1, 1), (17, 17)])
def test_a_batch_that_k_does_not_divide_is_cut(samples: int, number: int) -> None:
    plan = chosen(target_of(chain(), samples), k=4)
    assert plan.microbatches % number == 0


@pytest.mark.sweep
def test_recompute_is_chosen_where_nothing_fits_without() -> None:
    target = target_of(chain(), samples=4094)  # 2 × 23 × 89: two microbatches, or many
    # The costs of a CPU, whose ranks hold little besides what is saved.
    choices = {"k": 2, "costs": "flops", "schedule": "1f1b"}
    memory = fixed(target, microbatches=2, **choices).prediction.memory
    least = max(rank.total.bound for rank in memory)
    plan = chosen(target, memory=least * 7 // 10, **choices)
    assert plan.options.recompute == "auto"
    assert all(rank.total.bound <= least * 7 // 10 for rank in plan.prediction.memory)
    with pytest.raises(InfeasibleError, match=r"none of \d+ settings fits, this is of .* 2 microb"):
        chosen(target, memory=least // 10, **choices)


def test_a_batch_norm_keeps_the_microbatches_that_it_would_have() -> None:
    target = target_of(chain(norm=True))
    by_microbatch, by_minibatch = chosen(target, k=2), chosen(target, k=2, batch_norm="minibatch")
    assert by_microbatch.joint is not None
    assert by_minibatch.joint is not None
    assert by_microbatch.microbatches == 2
    assert (by_microbatch.joint.settings, by_minibatch.joint.settings) == (2, 6)


class NoSingles(nn.Module):
    """It does not run on one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of `WIDTH`, two at least."""
        if rows.shape[0] < 2:
            raise ValueError("one sample")
        return self.last(torch.tanh(self.first(rows)))


def test_a_model_that_does_not_run_on_smaller_microbatches_has_the_plain_defaults() -> None:
    plan = chosen(target_of(NoSingles(), 8), k=2)
    assert (plan.microbatches, plan.schedule.name, plan.joint) == (2, "1f1b", None)


@pytest.mark.parametrize(("slower", "kept"), [("zb-h1", "1f1b"), ("1f1b", "zb-h1")])
def test_by_whole_stages_the_step_is_no_longer_than_that_of_the_plain_defaults(
    slower: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(chain())
    found = fixed(target, "measured", k=2, microbatches=2, schedule="zb-h1")
    joint = JointSearch(devices="", settings=1, bound_ns=0, gap=0.0, counts={"planned": 1})
    steps = {}

    def by_whole_stages(graph: CostGraph, draft: Draft, timer: StageTimer) -> Plan:
        plan = draft(graph)
        step_ns = (1 + (plan.schedule.name == slower)) * 10**9
        steps[plan.schedule.name] = step_ns
        return replace(plan, prediction=replace(plan.prediction, step_ns=step_ns))

    monkeypatch.setattr("pipecompile.api.plan.correct_stages", by_whole_stages)
    captured = capture_target(target, found.options, verify=False)
    request = plan_request(k=2, costs="measured")
    plan = plan_with_choice(target, request, captured, FREE, replace(found, joint=joint))
    assert plan.schedule.name == kept
    assert plan.prediction.step_ns == min(steps.values())
    # The search did not choose the plain defaults.
    assert (plan.joint is None) == (kept == "1f1b")


def test_a_step_of_the_chosen_plan_is_the_unsplit_one() -> None:
    model = chain(4)
    unsplit, batch = copy.deepcopy(model), torch.randn(SAMPLES, WIDTH)
    pipeline = pipecompile(model, batch, k=2, costs=COSTS, loss_fn=nn.functional.mse_loss)
    number = pipeline.plan.microbatches
    loss = pipeline.step(batch, batch)
    for rows in batch.chunk(number):
        (nn.functional.mse_loss(unsplit(rows), rows) / number).backward()
    assert torch.isfinite(torch.as_tensor(loss))
    for own, wanted in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(own.grad, wanted.grad, rtol=1e-6, atol=1e-7)
