"""Models on the meta device and of fake tensors: planned and costed like those in memory, never
run.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from examples import models
from pipecompile.api.choices import requested_options
from pipecompile.api.compilation import pipecompile
from pipecompile.api.options import options_for
from pipecompile.api.plan import make_plan
from pipecompile.api.profile import profiled
from pipecompile.api.verification import verify
from pipecompile.errors import InputError
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.graph.model_state import without_values
from pipecompile.ir.serialization import encode
from pipecompile.report.summary import summary
from tests.sweeps import sweep

FLOPS = requested_options(k=1, costs="flops", microbatches=2)


def target(name: str) -> Target:
    return Target.of(getattr(models, name)(), name)


def on_meta(given: Target, *, inputs: bool = True) -> Target:
    """The same without values, and with those of the minibatch where `inputs` is not set; what is
    tied stays so.
    """
    state = (*given.model.parameters(), *given.model.buffers())
    model = copy.deepcopy(given.model, {id(tensor): without_values(tensor) for tensor in state})
    return without_inputs(replace(given, model=model)) if inputs else replace(given, model=model)


def without_inputs(given: Target) -> Target:
    args, kwargs, targets = pytree.tree_map_only(
        Tensor,
        lambda tensor: tensor.to("meta"),
        (given.call.args, given.call.kwargs, given.targets),
    )
    return replace(given, call=Arguments(args, kwargs), targets=targets)


def faked(given: Target) -> Target:
    """Under a FakeTensorMode of the user's own."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = copy.deepcopy(given.model)
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                table.update(
                    {
                        key: mode.from_tensor(value)
                        for key, value in table.items()
                        if value is not None
                    }
                )
    return replace(given, model=model)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("name", "inputs"), [("llama", False), ("gpt2", True), sweep("resnet50", True), ("unet", True)]
)
def test_costs_are_those_of_the_model_in_memory(name: str, inputs: bool) -> None:
    given = target(name)
    expected, _ = profiled(given, FLOPS)
    found, profile = profiled(on_meta(given, inputs=inputs), FLOPS)
    assert encode(found) == encode(
        expected
    )  # the digest of the graph included: the plan fits a model in memory
    assert not profile.verified


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("name", "without"), [("sequential", without_inputs), ("gpt2", faked)])
def test_fakes_of_the_user_and_inputs_on_meta_will_do(name: str, without: object) -> None:
    given = target(name)
    expected, _ = profiled(given, FLOPS)
    found, profile = profiled(without(given), FLOPS)  # type: ignore[operator]
    assert encode(found) == encode(expected)
    assert not profile.verified


def test_a_plan_of_a_capture_that_could_not_be_run_says_so() -> None:
    subject = on_meta(target("llama"))
    options = options_for(subject, k=2, costs="flops")
    plan = make_plan(subject, options, capture_target(subject, options, verify=True))
    assert not plan.capture.verified
    assert "unverified capture" in summary(plan)


def test_what_runs_the_model_is_refused() -> None:
    given = target("sequential")
    subject = on_meta(given)
    with pytest.raises(InputError, match=r"costs='measured' runs the model.*flops or roofline"):
        profiled(subject, requested_options(k=1, costs="measured"))
    with pytest.raises(InputError, match="verify runs the model"):
        verify(subject, k=2, costs="flops", microbatches=2)
    with pytest.raises(InputError, match="costs='measured' runs the model"):
        pipecompile(subject.model, given.call, k=2, microbatches=2)


class Biased(nn.Module):
    """Makes tensors on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        offsets = torch.arange(4, device=value.device, dtype=value.dtype)
        return self.linear(value) + offsets + torch.zeros(4, device=self.linear.weight.device)


def test_tensors_that_the_forward_makes_follow_the_model() -> None:
    given = Target(Biased(), Arguments((torch.randn(4, 4),), {}))
    expected, _ = profiled(given, FLOPS)
    found, _ = profiled(on_meta(given), FLOPS)
    assert encode(found) == encode(expected)
