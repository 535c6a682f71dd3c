"""What stages compute again, by policy or to fit their memory: gradients stay, peaks fall, and the plan says so."""

from __future__ import annotations

from typing import Any

import pytest
from zoo import example

from pipecompile import InfeasibleError, InputError
from pipecompile.api.capturing import capture_target
from pipecompile.api.compile import make_plan
from pipecompile.api.options import options_for
from pipecompile.api.verify import verify
from pipecompile.ir.plan import Plan


def planned(name: str, **options: Any) -> Plan:
    target = example(name)
    chosen = options_for(target, **{"k": 2, "microbatches": 4, "costs": "flops", **options})
    return make_plan(target, chosen, capture_target(target, chosen, verify=False))


def peaks(plan: Plan) -> list[int]:
    return [rank.total.bound for rank in plan.prediction.memory]


@pytest.mark.parametrize("policy", ["block", "sqrt"])
@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_a_step_with_regions_is_the_unsplit_step(name: str, policy: str) -> None:
    plan, comparisons = verify(
        example(name), self_check=False, k=2, microbatches=4, costs="flops", schedule="1f1b", recompute=policy
    )
    assert plan.stages[0].regions and not plan.stages[-1].regions
    assert all(difference.equal for comparison in comparisons for difference in comparison.differences)


@pytest.mark.parametrize(("name", "share", "others"), [("gpt2", 0.8, None), ("unet", 0.95, "1GiB")])
def test_what_does_not_fit_is_computed_again(name: str, share: float, others: str | None) -> None:
    """The least extra time that keeps every rank within its cap; gradients are those of the unsplit model."""
    fitting = planned(name)
    needed, pin = peaks(fitting), fitting.assignment
    cap = int(share * max(needed))
    memory = [cap if size == max(needed) else others for size in needed] if others else cap
    with pytest.raises(InfeasibleError):
        planned(name, memory=memory, pin=pin)
    plan, comparisons = verify(
        example(name), self_check=False, k=2, microbatches=4, costs="flops", memory=memory, recompute="auto", pin=pin
    )
    caps = plan.options.caps(2)
    assert caps is not None and all(size <= given for size, given in zip(peaks(plan), caps, strict=True))
    assert set(plan.regions) == {rank for rank, size in enumerate(needed) if size > caps[rank]}
    assert all(difference.equal for comparison in comparisons for difference in comparison.differences)
    again = sum(stage.recompute_ns for stage in plan.stages)
    assert 0 < again < sum(stage.forward_ns for stage in plan.stages) // 2


def test_nothing_is_computed_again_where_all_fits() -> None:
    assert planned("gpt2", recompute="auto").regions == {}
    assert planned("gpt2", recompute="auto", memory="1GiB").regions == {}


def test_schedules_that_split_backwards_recompute_whole_stages() -> None:
    options = {"schedule": "zb-h1", "k": 3, "pin": planned("gpt2", k=3).assignment}
    plain, again = peaks(planned("gpt2", **options)), peaks(planned("gpt2", **options, recompute="stage"))
    assert again[0] < plain[0] and max(plain) == plain[0]
    plan = planned("gpt2", **options, memory=max(again), recompute="auto")
    assert not plan.regions and plan.stages[0].recompute == "stage" and plan.stages[-1].recompute == "none"
    assert max(peaks(plan)) <= max(again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "block", "schedule": "zb-h1"}, "recompute='block' is not possible under schedule 'zb-h1'"),
        ({"recompute": "auto", "k": 4, "schedule": "zb-v"}, "ranks of one stage each"),
        (
            {"recompute": "except-last", "schedule": "search"},
            "recompute='except-last' is not possible under schedule 'search'",
        ),
        (
            {"recompute": "some"},
            "recompute='some' is not known; choose one of auto, none, stage, except-last, block, sqrt",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned("sequential", **options)
