"""Stages measured as their rank runs them: which times there are, and what is left behind (nothing)."""

from __future__ import annotations

import pytest
import torch

from pipecompile.api.compile import capture_target, options_for
from pipecompile.api.costing import cost_graph
from pipecompile.api.measuring import Stopwatch
from pipecompile.api.planning import draft
from pipecompile.api.target import Target
from pipecompile.ir.schedule import Kind
from tests.zoo import example

CPU = torch.device("cpu")
WHOLE = {Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE}
HALVES = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


def measured(target: Target, **options: object) -> list[set[Kind]]:
    """The kinds of action that were measured, stage by stage; all take some time."""
    chosen = options_for(target, k=2, microbatches=2, costs="flops", **options)
    captured = capture_target(target, chosen, verify=False)
    costs = cost_graph(target, "flops", 2, captured)
    plan = draft(costs, chosen, graph_digest="", verified=False, microbatch_shapes=[(4,)])
    times = Stopwatch(target, captured, CPU)(plan)
    assert all(value > 0 for each in times for value in each.values())
    return [set(each) for each in times]


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


@pytest.mark.parametrize(
    ("options", "first", "last"),
    [
        ({}, WHOLE, WHOLE),
        ({"schedule": "zb-h1"}, WHOLE | HALVES, WHOLE | HALVES),
        ({"recompute": "stage"}, WHOLE | {Kind.RECOMPUTE}, WHOLE),
    ],
    ids=["whole", "halves", "recompute"],
)
def test_what_is_measured_is_what_the_schedule_does(options: dict[str, str], first: set[Kind], last: set[Kind]) -> None:
    assert measured(example("sequential"), **options) == [first, last]


def test_without_a_target_the_loss_is_left_out() -> None:
    target = example("sequential")
    assert measured(Target(target.model, target.call, target.loss_fn)) == [WHOLE, WHOLE]
    assert measured(Target(target.model, target.call)) == [WHOLE, WHOLE]
