"""Plans of models for devices, from Python and on the command line."""

from __future__ import annotations

import dataclasses
import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from pipecompile import CaptureError, InputError, Plan, pipecompile
from pipecompile.api.check import check_plan
from pipecompile.api.factory import Factory
from pipecompile.api.joint_plan import joint_plan_of
from pipecompile.api.joint_request import joint_request
from pipecompile.cli import commands
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.ir.serialization import read
from tests.zoo import example

WIDTH, SAMPLES = 16, 12
FACTORY = f"""
import torch
from torch import nn

def target():
    blocks = [nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU()) for _ in range(4)]
    batch = torch.zeros({SAMPLES}, {WIDTH})
    return {{
        "model": nn.Sequential(*blocks),
        "sample_input": batch,
        "targets": batch,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": "adamw",
    }}
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(FACTORY)
    return f"{path}:target"


def planned(factory: str, path: Path, *words: str) -> str:
    devices = [] if "--devices" in words else ["--devices", "2xh100"]
    result = CliRunner().invoke(commands, ["plan", factory, *devices, "-o", str(path), *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_says_what_was_chosen_and_a_check_finds_the_plan_current(
    factory: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    text = planned(factory, path, "--effort", "4", "--top", "3")
    assert "devices    2xh100: no setting has a step below" in text
    assert "the best settings that were planned" in text
    plan = read(path, Plan)
    assert plan.joint is not None
    assert len(plan.joint.best) <= 3
    assert plan.ranks * plan.replicas == 2
    assert plan.options.costs == "roofline:h100"
    assert plan.options.memory_bytes == 80_000_000_000
    assert plan.microbatch_shapes[0][0] * plan.microbatches * plan.replicas == SAMPLES
    assert plan.capture.verified
    assert all(finding.passed for finding in check_plan(plan, Factory.of(factory)))


def test_under_noise_settings_are_compared_by_their_regret(factory: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = planned(factory, path, "--effort", "4", "--noise", "5%")
    assert "plans within 2 % of the shortest step of all settings" in text
    assert "of the shortest step of its setting" in text
    assert text.count("noise ") == 1
    plan = read(path, Plan)
    assert plan.joint is not None
    assert plan.joint.robustness is not None
    assert plan.joint.robustness.chosen.nominal_ns == plan.prediction.step_ns
    assert all(finding.passed for finding in check_plan(plan, Factory.of(factory)))


@pytest.mark.parametrize(
    ("model", "fixed"),
    [
        ("unet", {"schedule": "1f1b"}),
        pytest.param("gpt2", {"microbatches": 1}, marks=pytest.mark.sweep),
    ],
)
def test_an_open_number_of_replicas_gives_no_longer_a_step_than_a_given_one(
    model: str, fixed: dict[str, Any]
) -> None:
    plan, given = (
        joint_plan_of(example(model), joint_request("4xh100", **fixed, **more), self_check=False)
        for more in ({}, {"replicas": 2})
    )
    assert plan.prediction.step_ns <= given.prediction.step_ns


def test_json_has_the_table(factory: str, tmp_path: Path) -> None:
    words = ["--effort", "2", "--format", "json", "-q"]
    text = planned(factory, tmp_path / "plan.json", *words)
    assert json.loads(text)["joint"]["best"][0]["status"] == "planned"


class ByKindOfSize(nn.Module):
    """The first way to capture it, with symbolic sizes, gives another graph than the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of shape (N, WIDTH) to one like it."""
        x = self.layers(x)
        return x.tanh() if isinstance(x.shape[0], int) else x.sin().cos()


def test_the_graph_that_is_planned_is_the_one_that_is_proven() -> None:
    batch = torch.randn(SAMPLES, WIDTH)
    pipeline = pipecompile(
        ByKindOfSize(),
        batch,
        devices="2xh100",
        loss_fn=lambda output, _: output.square().mean(),
        effort=2,
    )
    assert pipeline.plan.capture.verified
    assert "for one batch size" in pipeline.plan.capture.method
    pipeline.step(batch)


def test_sizes_that_are_proven_in_turns_in_two_ways_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods = cycle(["one way", "another"])

    def proven(*args: Any, **options: Any) -> Captured:
        captured = capture_target(*args, **options)
        capture = dataclasses.replace(captured.capture, method=next(methods))
        return dataclasses.replace(captured, capture=capture, digest="of another graph")

    monkeypatch.setattr("pipecompile.api.joint_plan.capture_target", proven)
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.randn(SAMPLES, WIDTH)
    with pytest.raises(CaptureError, match=r"are captured in another way \(one way\) .* give"):
        pipecompile(
            model,
            batch,
            devices="2xh100",
            loss_fn=lambda output, _: output.square().mean(),
            effort=1,
        )


def test_a_pipeline_of_what_was_chosen_trains_as_the_model_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    batch, target = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    loss = nn.functional.mse_loss(model(batch), target)
    loss.backward()
    expected = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    model.zero_grad()
    pipeline = pipecompile(
        model,
        batch,
        loss_fn=nn.functional.mse_loss,
        sample_target=target,
        devices="2xh100",
        replicas=1,
        effort=2,
    )
    assert pipeline.plan.ranks == 2
    assert pipeline.step(batch, target) == pytest.approx(loss.item())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"devices": "2xh100,2xa100", "costs": "flops"}, "costs='flops', but devices='2xh100,"),
        ({"devices": "2xh100,2xa100", "memory": "8GB,4GB"}, "whose order along the pipeline is"),
        ({"devices": "2xh100", "objective": "latency"}, "latency has no step that ends with a"),
        ({"devices": "2xh100", "schedule": "pipedream"}, "pipedream has no step that ends"),
        ({"devices": "2xh100", "time_limit": -1.0}, "time_limit=-1.0 must be a number of seconds"),
        ({"devices": "2xh100", "effort": 0}, "effort=0, but a search makes at least one plan"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        joint_request(**choices)


def test_unequal_devices_have_each_its_costs_and_its_memory(factory: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ("--devices", "1xh100,1xl4", "--effort", "2", "--schedule", "1f1b")
    text = planned(factory, path, *words)
    assert "devices    1xh100,1xl4, ranks are 1x" in text
    plan = read(path, Plan)
    assert plan.options.costs in ("roofline:1xh100,1xl4", "roofline:1xl4,1xh100")
    assert sorted(plan.options.caps(2) or ()) == [24_000_000_000, 80_000_000_000]
    assert all(finding.passed for finding in check_plan(plan, Factory.of(factory)))
    request = joint_request("1xh100,1xl4", memory="10GB")
    assert request.unequal is not None
    assert set(request.unequal.caps.values()) == {10**10}


def test_what_is_of_a_joint_search_needs_devices(factory: str) -> None:
    result = CliRunner().invoke(commands, ["plan", factory, "--effort", "3"])
    assert result.exit_code == 2
    assert "effort=3 is of a joint search" in result.output


def test_what_is_given_is_kept_and_the_rest_implied() -> None:
    request = joint_request("2xa100", memory="10GB", recompute="auto", k=2)
    assert request.base.memory_bytes == 10**10
    assert request.base.costs == "roofline:a100"
    assert request.fixed == {"recompute": "auto", "k": 2}
    assert joint_request("2xa100", costs="flops").base.costs == "flops"


def test_relative_units_beside_links_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    joint_request("4xh100", costs="flops")
    assert "costs by flops are relative units, but links take nanoseconds" in caplog.text
    caplog.clear()
    joint_request("4xh100", costs="roofline:h100")
    joint_request("1xh100", costs="roofline:h100")
    assert not caplog.text


def test_choices_that_cannot_be_together_are_named() -> None:
    request = joint_request("4xh100", shard="parameters", replicas=1)
    with pytest.raises(InputError, match="shard='parameters' divides stages over replicas"):
        joint_plan_of(example("sequential"), request, self_check=False)


def test_caps_for_some_ranks_say_how_many_there_are(factory: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ("--devices", "4xh100", "--memory", "8GB,4GB", "--effort", "2")
    assert "devices    4xh100, with 2 ranks as there are caps: no" in planned(factory, path, *words)
    plan = read(path, Plan)
    assert (plan.ranks, plan.options.replicas) == (2, 2)


def test_a_refusal_names_what_to_leave_out() -> None:
    request = joint_request("4xh100", schedule="zb-v", stages_per_rank=1)
    with pytest.raises(InputError, match="leave out stages_per_rank or schedule"):
        request.space(8).settings()
