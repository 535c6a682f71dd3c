"""What stages recompute, by policy or to fit their memory: gradients stay, peaks fall, and the
plan says so.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import example, same

from pipecompile import InfeasibleError, InputError, pipecompile
from pipecompile.api.options import options_for
from pipecompile.api.plan import make_plan
from pipecompile.api.soundness import findings
from pipecompile.api.verification import compared, reference_for, verify
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.plan import Plan
from pipecompile.ir.stage import EncodedNodes
from tests.sweeps import sweep


def planned(name: str, **options: Any) -> Plan:
    target = example(name)
    chosen = options_for(target, **{"k": 2, "microbatches": 4, "costs": "flops", **options})
    return make_plan(target, chosen, capture_target(target, chosen, verify=False))


def peaks(plan: Plan) -> list[int]:
    return [rank.total.bound for rank in plan.prediction.memory]


@pytest.mark.sweep
@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("name", "policy"),
    [("unet", "block"), ("gpt2", "sqrt"), sweep("unet", "sqrt"), sweep("gpt2", "block")],
)
def test_a_step_with_regions_is_the_unsplit_step(name: str, policy: str) -> None:
    plan, comparisons = verify(
        example(name),
        self_check=False,
        k=2,
        microbatches=4,
        costs="flops",
        schedule="1f1b",
        recompute=policy,
    )
    assert plan.stages[0].regions and not plan.stages[-1].regions
    assert all(
        difference.equal for comparison in comparisons for difference in comparison.differences
    )


@pytest.mark.parametrize(
    ("name", "share", "others"), [sweep("gpt2", 0.8, None), ("unet", 0.95, "1GiB")]
)
def test_what_does_not_fit_is_recomputed(name: str, share: float, others: str | None) -> None:
    """The least extra time that keeps every rank within its cap; gradients are those of the unsplit
    model.
    """
    fitting = planned(name)
    needed, pin = peaks(fitting), fitting.assignment
    cap = int(share * max(needed))
    memory = [cap if size == max(needed) else others for size in needed] if others else cap
    plan = planned(name, memory=memory, recompute="auto", pin=pin)
    caps = plan.options.caps(2)
    assert caps is not None and all(
        size <= given for size, given in zip(peaks(plan), caps, strict=True)
    )
    assert set(plan.regions) == {rank for rank, size in enumerate(needed) if size > caps[rank]}
    assert compared(example(name), plan=plan, self_check=False)[1].passed
    recompute_ns = sum(stage.recompute_ns for stage in plan.stages)
    assert 0 < recompute_ns < sum(stage.forward_ns for stage in plan.stages) // 2


def normed() -> Target:
    """Running statistics and dropout, in five blocks."""
    torch.manual_seed(0)
    parts = (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5))
    blocks = [copy.deepcopy(nn.Sequential(*parts)) for _ in range(5)]
    made = {
        "model": nn.Sequential(*blocks, nn.Linear(16, 4)),
        "sample_input": torch.randn(128, 16, generator=torch.Generator().manual_seed(1)),
        "targets": torch.arange(128) % 4,
        "loss_fn": nn.functional.cross_entropy,
    }
    return Target.of(made, "normed")


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_regions_are_offered_where_nothing_less_fits(recompute: str) -> None:
    """The last stage is over its cap, and only `auto` recomputes anything of it: that is
    said, and true.
    """
    fitting = planned("unet", schedule="gpipe")
    first, last = peaks(fitting)
    options: dict[str, Any] = {
        "schedule": "gpipe",
        "memory": [first, int(0.95 * last)],
        "pin": fitting.assignment,
    }
    with pytest.raises(InfeasibleError, match=r"; this would fit: recompute=auto$"):
        planned("unet", **options, recompute=recompute)
    assert planned("unet", **options, recompute="auto").stages[-1].regions


SINGLE = ("gpipe", "1f1b", "zb-h1", "zb-h2")
SEVERAL = ("interleaved-1f1b", "looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v")
WHOLE_BACKWARDS = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
EXACT = (
    *(
        (policy, schedule)
        for policy in ("stage", "except-last")
        for schedule in (*SINGLE, *SEVERAL)
    ),
    *((policy, schedule) for policy in ("block", "sqrt") for schedule in WHOLE_BACKWARDS),
    *(("auto", schedule) for schedule in (*SINGLE, *SEVERAL)),
)


@pytest.mark.one_case_in(12)
@pytest.mark.parametrize(("policy", "schedule"), EXACT)
def test_every_policy_is_exact_under_every_schedule_that_allows_it(
    policy: str, schedule: str
) -> None:
    """Loss, gradients and running statistics are those of the unsplit model."""
    target = normed()
    options = {
        "k": 4,
        "microbatches": 4,
        "schedule": schedule,
        "costs": "flops",
        "recompute": policy,
    }
    options |= {"stages_per_rank": 2} if schedule in SEVERAL else {}
    options |= tight(target, options) if policy == "auto" else {}
    options |= {"loss_fn": target.loss_fn, "sample_target": target.targets, "self_check": False}
    pipeline = pipecompile(target.model, target.call, **options)
    kinds = {stage.recompute for stage in pipeline.plan.stages} - {"none"}
    if policy in ("stage", "except-last"):
        assert kinds == {policy}
    elif policy == "auto":  # all but for the last microbatch takes less, where that fits
        assert (
            "regions" in kinds
            if schedule in WHOLE_BACKWARDS
            else kinds and kinds <= {"stage", "except-last"}
        )
    else:
        assert kinds == {"regions"}
    loss = pipeline.step(target.call, target.targets)
    gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    assert same((loss, gradients, dict(pipeline.named_buffers())), unsplit())


class Counting(TorchDispatchMode):
    """How often an operator runs."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self.operator
        return func(*args, **(kwargs or {}))


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_what_is_recomputed_runs_twice_for_each_microbatch(schedule: str) -> None:
    """Also where both halves of a backward need it."""
    target = normed()
    options = {
        "k": 4,
        "microbatches": 4,
        "schedule": schedule,
        "costs": "flops",
        "recompute": "stage",
    }
    options |= {"stages_per_rank": 2} if schedule in SEVERAL else {}
    options |= {"loss_fn": target.loss_fn, "sample_target": target.targets, "self_check": False}
    pipeline = pipecompile(target.model, target.call, **options)
    plan = pipeline.plan
    runs = [
        2 if plan.stages[stage].recompute == "stage" else 1
        for name, stage in plan.assignment.items()
        if is_tanh(name)
    ]
    assert len(runs) == 5 and 2 in runs
    with Counting(torch.ops.aten.tanh.default) as counting:
        pipeline.step(target.call, target.targets)
    assert counting.count == 4 * sum(runs)


def is_tanh(node: str) -> bool:
    return node.endswith("_2")


@cache
def unsplit() -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
    """What a step of four microbatches leaves on the model in one piece, under the same seeds."""
    target = normed()
    chosen = options_for(target, k=1, microbatches=4, schedule="gpipe", costs="flops")
    plan = make_plan(target, chosen, capture_target(target, chosen, verify=False))
    reference = reference_for(target, plan)
    loss = reference.step(target, 4)
    gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
    return loss, gradients, dict(reference.model.named_buffers())


def tight(target: Target, options: dict[str, Any]) -> dict[str, Any]:
    """A cut, and for its ranks half of what recompute of whole stages would save."""
    plans = []
    for recompute in ("none", "stage"):
        pin = {"pin": plans[0].assignment} if plans else {}
        chosen = options_for(target, **{**options, **pin, "recompute": recompute})
        plans.append(make_plan(target, chosen, capture_target(target, chosen, verify=False)))
    memory = [
        (plain + recomputed) // 2 for plain, recomputed in zip(*map(peaks, plans), strict=True)
    ]
    return {"memory": memory, "pin": plans[0].assignment}


@pytest.mark.sweep
def test_nothing_is_recomputed_where_all_fits() -> None:
    assert planned("unet", recompute="auto").regions == {}
    assert planned("unet", recompute="auto", memory="1GiB").regions == {}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("microbatches", "kind"), [(2, "stage"), (4, "regions")])
def test_whole_stages_recompute_where_waiting_ranks_make_that_faster(
    microbatches: int, kind: str
) -> None:
    """With few microbatches ranks wait for most of a step, and may recompute meanwhile."""
    target = normed()
    options = {"k": 4, "microbatches": microbatches, "schedule": "1f1b", "costs": "flops"}
    options |= tight(target, options)
    plans = []
    for recompute in ("auto", "stage"):
        chosen = options_for(target, **options, recompute=recompute)
        plans.append(make_plan(target, chosen, capture_target(target, chosen, verify=False)))
    auto, stage = plans
    assert {stage.recompute for stage in auto.stages} == {kind, "none"}
    assert auto.prediction.step_ns <= stage.prediction.step_ns


@pytest.mark.sweep
def test_schedules_that_split_backwards_recompute_whole_stages() -> None:
    options = {"schedule": "zb-h1", "k": 3, "pin": planned("gpt2", k=3).assignment}
    plain, recomputed = (
        peaks(planned("gpt2", **options)),
        peaks(planned("gpt2", **options, recompute="stage")),
    )
    assert recomputed[0] < plain[0] and max(plain) == plain[0]
    plan = planned("gpt2", **options, memory=max(recomputed), recompute="auto")
    assert (
        not plan.regions
        and plan.stages[0].recompute in ("stage", "except-last")
        and plan.stages[-1].recompute == "none"
    )
    assert max(peaks(plan)) <= max(recomputed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recompute": "block", "schedule": "zb-h1"},
            "recompute='block' is not possible under schedule 'zb-h1'",
        ),
        (
            {"recompute": "some"},
            "unknown recompute 'some'; choose from auto, none, stage, except-last, block, sqrt",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned("sequential", **options)


class TiedUnderAutocast(nn.Module):
    """The first and the last layer read one weight, in one autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            values = self.embedding(tokens)
            for layer in self.layers:
                values = layer(values)
            logits: Tensor = self.head(values).float()
        return logits


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("policy", ["block", "sqrt"])
def test_what_the_cut_parts_need_not_lie_in_one_region(policy: str) -> None:
    """Readers of a parameter that autocast casts go together only within their stage."""
    gradients = []
    for recompute in ("none", policy):
        torch.manual_seed(0)
        model, tokens = TiedUnderAutocast(), torch.arange(8)
        pipeline = pipecompile(
            model,
            tokens,
            k=2,
            loss_fn=nn.functional.cross_entropy,
            costs="flops",
            recompute=recompute,
            pin={"embedding": 0, "head": 1},
            self_check=False,
            microbatches=2,
        )
        pipeline.step(tokens, tokens)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert any("embedding" in region for region in pipeline.plan.stages[0].regions)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regions": ()}, "stage 0 recomputes by 'regions', but has 0 regions"),
        ({"regions": (("nobody",),)}, "stage 0 has nobody … as a region"),
        ({"recompute_bound_ns": 1 << 40}, "ns more, but at least 1099511627776"),
    ],
)
def test_edited_regions_are_found_out(changes: dict[str, Any], message: str) -> None:
    plan = planned("sequential", recompute="sqrt")
    assert findings(plan) == []
    first, last = plan.stages
    (finding,) = findings(replace(plan, stages=(replace(first, **changes), last)))
    assert message in finding.message
    assert finding.message.endswith("the file was edited; plan again")
    assert (finding.code, finding.rank, finding.passed) == ("stage", 0, False)


def test_regions_and_runs_in_two_places_are_found_out() -> None:
    plan = planned("sequential", recompute="sqrt")
    first, last = plan.stages
    region = first.regions[0]
    twice = replace(first, regions=(*first.regions, region))
    run = EncodedNodes(nodes=region, encodings=("mask",), forward_ns=0, backward_ns=0)
    for stage, message in (
        (twice, "in two regions"),
        (replace(first, encoded_runs=(run,)), "do not allow"),
    ):
        (finding,) = findings(replace(plan, stages=(stage, last)))
        assert message in finding.message
    unasked = replace(plan, options=replace(plan.options, recompute="none"))
    assert "recomputes by 'regions', but recompute is 'none'" in findings(unasked)[0].message
    allowed = replace(
        plan,
        stages=(replace(first, encoded_runs=(run,)), last),
        options=replace(plan.options, encodings=("mask",)),
    )
    assert "saves twice, or recomputes it too" in findings(allowed)[0].message
