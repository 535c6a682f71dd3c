"""Stages measured as their rank runs them: which times there are, and what is left behind
(nothing).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.plan import make_plan
from pipecompile.errors import PipecompileError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.plan import Plan, Provenance
from pipecompile.ir.schedule import Kind
from pipecompile.planner.draft import draft
from pipecompile.profiling.stage_correction import DoesNotFitError
from pipecompile.training import stage_timer as measuring
from pipecompile.training.stage_timer import StageTimer
from tests.zoo import example

CPU = torch.device("cpu")
WHOLE = {Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE}
HALVES = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


def planned(target: Target) -> Plan:
    """By measured costs, with all that this runs."""
    options = options_for(target, k=2, microbatches=2, costs="measured")
    return make_plan(target, options, capture_target(target, options, verify=False))


def measured(target: Target, **options: object) -> list[set[Kind]]:
    """The kinds of action that were measured, stage by stage; all take some time."""
    chosen = options_for(target, k=2, microbatches=2, costs="flops", **options)
    captured = capture_target(target, chosen, verify=False)
    costs = cost_graph(target, "flops", 2, captured)
    plan = draft(
        costs, chosen, graph_digest="", capture=Provenance(verified=False), microbatch_shapes=[(4,)]
    )
    times = StageTimer(target, captured, CPU)(plan)
    assert all(value > 0 for each in times for value in each.values())
    return [set(each) for each in times]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", ["unet", "gpt2"])
def test_model_gradients_and_random_state_stay_as_they_were(name: str) -> None:
    target = example(name)
    state = {key: value.clone() for key, value in target.model.state_dict().items()}
    first = next(target.model.parameters())
    first.grad = gradient = torch.ones_like(first)
    random = torch.get_rng_state()

    measured(target)

    assert first.grad is gradient
    assert [p for p in target.model.parameters() if p.grad is not None] == [first]
    torch.testing.assert_close(dict(target.model.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert target.model.training


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("options", "first", "last"),
    [
        ({}, WHOLE, WHOLE),
        ({"schedule": "zb-h1"}, WHOLE | HALVES, WHOLE | HALVES),
        ({"recompute": "stage"}, WHOLE | {Kind.RECOMPUTE}, WHOLE),
        ({"recompute": "except-last"}, WHOLE | {Kind.RECOMPUTE}, WHOLE),
    ],
    ids=["whole", "halves", "recompute", "except last"],
)
def test_what_is_measured_is_what_the_schedule_does(
    options: dict[str, str], first: set[Kind], last: set[Kind]
) -> None:
    assert measured(example("sequential"), **options) == [first, last]


def test_without_a_target_the_loss_is_left_out() -> None:
    target = example("sequential")
    assert measured(Target(target.model, target.call, target.loss_fn)) == [WHOLE, WHOLE]
    assert measured(Target(target.model, target.call)) == [WHOLE, WHOLE]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIPECOMPILE_CACHE", str(tmp_path))


@pytest.mark.usefixtures("cache")
def test_an_optimizer_in_the_backward_does_not_step() -> None:
    target = example("sequential")
    state = {key: value.clone() for key, value in target.model.state_dict().items()}
    calls: list[str] = []
    for name, parameter in target.model.named_parameters():
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        parameter.register_post_accumulate_grad_hook(partial(stepped, optimizer, calls, name))
        parameter.register_hook(lambda _: calls.append("gradient"))

    planned(target)

    assert calls == []
    torch.testing.assert_close(dict(target.model.state_dict()), state, rtol=0, atol=0)
    assert target.loss_fn is not None
    target.loss_fn(target.model(*target.call.args), target.targets).backward()
    assert set(calls) == {"gradient", *(name for name, _ in target.model.named_parameters())}


def stepped(optimizer: torch.optim.Optimizer, calls: list[str], name: str, _: torch.Tensor) -> None:
    optimizer.step()
    calls.append(name)


@pytest.mark.usefixtures("cache")
def test_it_plans_without_gradients_around_it() -> None:
    with torch.no_grad():
        assert all(stage.backward_ns for stage in planned(example("sequential")).stages)


def full(*_: object) -> NoReturn:
    raise torch.OutOfMemoryError("on purpose")


@pytest.mark.usefixtures("cache")
def test_stages_that_do_not_fit_are_planned_by_their_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = example("sequential")
    monkeypatch.setattr(measuring, "measure_stages", full)
    plan = planned(target)
    assert "stage correction is left out: the stages of rank 0 do not fit on cpu" in caplog.text
    nodes = cost_graph(
        target, "measured", 2, capture_target(target, plan.options, verify=False)
    ).by_name
    for stage in plan.stages:
        assert stage.forward_ns == sum(nodes[name].forward_ns for name in stage.nodes)


def test_a_rank_whose_stages_fail_otherwise_is_heard_above_one_whose_stages_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "measure_stages", full)
    monkeypatch.setattr(
        measuring.world, "gather", lambda own: [own, PipecompileError("rank 1 failed")]
    )
    with pytest.raises(PipecompileError, match="rank 1 failed"):
        measured(example("sequential"))
    monkeypatch.setattr(
        measuring.world, "gather", lambda own: [{}, DoesNotFitError("rank 1 is full")]
    )
    monkeypatch.setattr(measuring.StageTimer, "_own", lambda *_: {})
    with pytest.raises(DoesNotFitError, match="rank 1 is full"):
        measured(example("sequential"))
