"""Stages that save in other forms: where they are chosen, and steps that are those without, under every schedule."""

from __future__ import annotations

import copy
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional
from zoo import same

from pipecompile import InfeasibleError, InputError
from pipecompile.api.capturing import capture_target
from pipecompile.api.compile import make_plan, pipecompile
from pipecompile.api.costing import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.planning import predicted
from pipecompile.api.target import Target
from pipecompile.api.verify import verify
from pipecompile.frontend.signature import Arguments
from pipecompile.ir.lives import Lives
from pipecompile.ir.plan import Plan
from pipecompile.memory.saving import offers

SCHEDULES = (
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v",
)  # fmt: skip


class Block(nn.Module):
    """Batch normalisation, ReLU that nothing but pooling reads, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, image: Tensor) -> Tensor:
        image = self.norm(self.convolution(image))
        return image + functional.dropout(functional.max_pool2d(image.relu(), 3, 1, 1), 0.3)


def target() -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Flatten(), nn.Linear(1024, 3))
    images = torch.randn(8, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    return Target(model, Arguments((images,), {}), lambda output, _: output.square().mean(), None)


def planned(**options: Any) -> Plan:
    subject = target()
    chosen = options_for(subject, **{"k": 2, "microbatches": 4, "costs": "flops", **options})
    return make_plan(subject, chosen, capture_target(subject, chosen, verify=False))


def peaks(plan: Plan) -> list[int]:
    return [rank.total.bound for rank in plan.prediction.memory]


@cache
def reference() -> tuple[Plan, Lives, tuple[list[Tensor], list[Tensor]]]:
    """A plan, the storages of its graph, and what it trains to."""
    plan, subject = planned(k=4), target()
    captured = capture_target(subject, plan.options, verify=False)
    return plan, Lives(cost_graph(subject, "flops", plan.microbatches, captured)), trained(plan)


def formed(plan: Plan) -> Plan:
    """All stages save in all exact forms, whether they fit or not."""
    before, stages = list[str](), []
    for stage in plan.stages:
        found = offers(reference()[1], before, stage.nodes, ("mask", "relu", "pool"))
        stages.append(replace(stage, saving=tuple(offer.saving for offer in found)))
        before += stage.nodes
    prediction = predicted(stages, plan.schedule, plan.links, None, plan.allocator)
    search = replace(plan.search, values={**plan.search.values, "step_ns": prediction.step_ns})
    return replace(plan, stages=tuple(stages), prediction=prediction, search=search)


def trained(plan: Plan) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and buffers after two steps."""
    subject = target()
    pipeline = pipecompile(subject.model, subject.call, loss_fn=subject.loss_fn, plan=plan, self_check=False)
    for _ in range(2):
        pipeline.step(subject.call)
    gradients = [p.grad for p in subject.model.parameters() if p.grad is not None]
    return gradients, [buffer.clone() for buffer in subject.model.buffers()]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_the_same_under_every_schedule(schedule: str) -> None:
    plain, _, wanted = reference()
    changed = formed(planned(k=4, schedule=schedule, pin=plain.assignment))
    assert {policy for s in changed.stages for run in s.saving for policy in run.policies} == {"mask", "relu", "pool"}
    got = trained(changed)
    assert len(got[0]) == len(list(target().model.parameters()))
    assert same(got, wanted)


def test_a_stage_that_does_not_fit_saves_otherwise_and_trains_the_same() -> None:
    fitting = planned()
    pin, cap = fitting.assignment, int(0.85 * max(peaks(fitting)))
    with pytest.raises(InfeasibleError):
        planned(memory=cap, pin=pin)
    options = {"k": 2, "microbatches": 4, "costs": "flops", "memory": cap, "pin": pin}
    plan, comparisons = verify(target(), self_check=False, saving=("relu", "pool", "mask"), **options)
    assert max(peaks(plan)) <= cap
    assert plan.options.saving == ("mask", "relu", "pool") and not plan.regions
    assert {len(stage.saving) > 0 for stage in plan.stages} == {True, False}  # where it fits nothing is done
    assert all(comparison.distance is None for comparison in comparisons)
    assert all(difference.equal for comparison in comparisons for difference in comparison.differences)
    more = plan.prediction.step_ns - fitting.prediction.step_ns
    assert 0 < more <= 4 * sum(run.ns for stage in plan.stages for run in stage.saving) * 2


def test_what_takes_less_time_is_taken_and_nothing_where_all_fits() -> None:
    fitting = planned()
    pin, every = fitting.assignment, ("mask", "relu", "pool")
    for share in (0.95, 0.8, 0.7):
        cap = int(share * max(peaks(fitting)))
        again = planned(memory=cap, pin=pin, recompute="auto")
        both = planned(memory=cap, pin=pin, recompute="auto", saving=every)
        extra = [sum(s.recompute_ns + sum(run.ns for run in s.saving) for s in p.stages) for p in (both, again)]
        assert extra[0] <= extra[1]
        assert max(peaks(both)) <= cap
        named = [set(chain(*s.regions)) & {n for run in s.saving for n in run.nodes} for s in both.stages]
        assert not any(named)
    assert planned(memory="1GiB", recompute="auto", saving=every).savings == {}
    assert planned(saving=every).savings == {}


def test_half_precision_is_for_what_nothing_exact_lets_fit_and_is_said_not_to_be_exact() -> None:
    fitting = planned()
    options = {"k": 2, "microbatches": 4, "costs": "flops", "pin": fitting.assignment}
    exact = planned(**options, memory=int(0.85 * max(peaks(fitting))), saving=("mask", "relu", "pool", "half"))
    assert "half" not in {policy for s in exact.stages for run in s.saving for policy in run.policies}
    cap = int(0.7 * max(peaks(fitting)))
    with pytest.raises(InfeasibleError):
        planned(**options, memory=cap, saving=("mask", "relu", "pool"))
    plan, comparisons = verify(
        target(), self_check=False, memory=cap, saving=("mask", "relu", "pool", "half"), **copy.copy(options)
    )
    assert max(peaks(plan)) <= cap
    for comparison in comparisons:
        assert comparison.passed and comparison.distance is not None and 2**-12 < comparison.distance < 2**-6
        assert all(difference.equal for difference in comparison.differences if difference.kind == "buffer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saving": ("zip",)}, "saving='zip' is not known; choose one of mask, relu, pool, offload, half"),
        ({"saving": "mask"}, "saving='mask' is not a list of names"),
        ({"saving": ("mask",), "recompute": "block"}, "saving goes with recompute none or auto, not with 'block'"),
        ({"saving": ("mask",), "k": 4, "schedule": "zb-v"}, "saving chooses for ranks of one stage each"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(**options)
