"""The choice under noise: against a naive Monte Carlo, and what holds for any plans."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.api.soundness import findings
from pipecompile.ir.plan import Plan
from pipecompile.ir.robustness import NoisyStep, Robustness
from pipecompile.ir.serialization import decode, encode
from pipecompile.planner.draft import node_times
from pipecompile.planner.scheduled_stages import predicted
from pipecompile.schedule.robust_choice import robust_choice
from pipecompile.schedule.stages import problem_of_plan
from tests.schedule.naive import naive_times
from tests.schedule.test_noisy_steps import drawn
from tests.schedule.test_selection import chain, options, planned

K, MICROBATCHES = 3, 5
GRAPH = chain([(20, 20, 20)] * 6)


@cache
def base() -> Plan:
    return planned(GRAPH, k=K, microbatches=MICROBATCHES)


def plan_of(times: Sequence[int]) -> Plan:
    """Return a plan whose stages take so long forward, and twice as long backward."""
    plan = base()
    stages = tuple(
        msgspec.structs.replace(stage, forward_ns=time, backward_ns=2 * time)
        for stage, time in zip(plan.stages, times, strict=True)
    )
    prediction = predicted(stages, plan.schedule, plan.links, None, plan.allocator)
    return msgspec.structs.replace(plan, stages=stages, prediction=prediction)


PLANS = st.lists(
    st.lists(st.integers(950, 1050), min_size=K, max_size=K).map(plan_of), min_size=1, max_size=4
)
NOISES = st.floats(0, 0.3)


class _NaiveRow(NamedTuple):
    place: int
    step: NoisyStep


def naive_rows(
    plans: Sequence[Plan], node_ns: Mapping[str, int], noise: float, draws: int
) -> list[_NaiveRow]:
    """Return what each plan within 2 % of the shortest is worth: one draw after another."""
    sigma = math.sqrt(math.log(1 + noise * noise))
    names = [f"device {rank}" for rank in range(K)] + [f"node {name}" for name in node_ns]
    vectors = {}
    for name in names:
        source = random.Random(f"0 {name}")
        vectors[name] = [
            math.exp(source.normalvariate(-sigma * sigma / 2, sigma)) for _ in range(draws)
        ]
    shortest = min(plan.prediction.step_ns for plan in plans)
    close = [i for i, plan in enumerate(plans) if plan.prediction.step_ns <= 1.02 * shortest]
    steps = {index: list[int]() for index in close}
    for draw in range(draws):
        for index in close:
            plan = plans[index]
            factors = []
            for stage, rank in zip(plan.stages, plan.schedule.placement, strict=True):
                total = sum(node_ns[name] for name in stage.nodes)
                of_nodes = sum(
                    node_ns[name] * vectors[f"node {name}"][draw] for name in stage.nodes
                )
                factors.append(vectors[f"device {rank}"][draw] * (of_nodes / total))
            problem = drawn(problem_of_plan(plan), factors)
            steps[index].append(naive_times(problem, plan.schedule).makespan_ns)
    best = [min(row[draw] for row in steps.values()) for draw in range(draws)]

    def ninth_of_ten(values: Sequence[int]) -> int:
        return next(v for v in sorted(values) if sum(w <= v for w in values) >= 0.9 * len(values))

    return [
        _NaiveRow(
            index,
            NoisyStep(
                nominal_ns=plans[index].prediction.step_ns,
                p90_ns=ninth_of_ten(row),
                regret_ns=ninth_of_ten([a - b for a, b in zip(row, best, strict=True)]),
            ),
        )
        for index, row in steps.items()
    ]


@settings(max_examples=8)
@given(PLANS, NOISES)
def test_the_choice_is_that_of_a_naive_monte_carlo(plans: list[Plan], noise: float) -> None:
    choice = robust_choice(plans, [node_times(GRAPH)] * len(plans), noise, draws=15)
    rows = naive_rows(plans, node_times(GRAPH), noise, 15)
    of_chosen = {row.place: row.step for row in rows}[choice.place]
    assert choice.robustness.chosen == of_chosen
    assert choice.robustness.candidates == len(rows)
    assert of_chosen.regret_ns == min(row.step.regret_ns for row in rows)
    fastest = [
        row.step for row in rows if row.step.nominal_ns == min(r.step.nominal_ns for r in rows)
    ]
    assert choice.robustness.fastest in fastest


@settings(max_examples=40)
@given(PLANS, NOISES, st.integers(0, 3))
def test_the_choice_is_close_to_the_fastest_and_has_no_more_regret(
    plans: list[Plan], noise: float, seed: int
) -> None:
    index, robustness = robust_choice(
        plans, [node_times(GRAPH)] * len(plans), noise, draws=30, seed=seed
    )
    shortest = min(plan.prediction.step_ns for plan in plans)
    assert plans[index].prediction.step_ns <= 1.02 * shortest
    assert robustness.chosen.nominal_ns == plans[index].prediction.step_ns
    assert robustness.fastest.nominal_ns == shortest
    assert robustness.chosen.regret_ns <= robustness.fastest.regret_ns
    if noise == 0:
        assert robustness.chosen == robustness.fastest


@settings(max_examples=20)
@given(PLANS)
def test_without_noise_the_fastest_is_chosen(plans: list[Plan]) -> None:
    index, robustness = robust_choice(plans, [node_times(GRAPH)] * len(plans), 0.0, draws=3)
    shortest = min(plan.prediction.step_ns for plan in plans)
    assert plans[index].prediction.step_ns == shortest
    step = NoisyStep(nominal_ns=shortest, p90_ns=shortest, regret_ns=0)
    assert robustness.chosen == robustness.fastest == step


def test_a_plan_that_is_a_little_slower_may_have_less_regret() -> None:
    # The even plan has the shortest step, and more work: whichever device is slow, it pays most.
    plans = [plan_of([940, 1020, 950]), plan_of([960, 990, 990])]
    index, robustness = robust_choice(plans, [node_times(GRAPH)] * len(plans), 0.1)
    assert index == 0
    assert robustness.chosen.nominal_ns > robustness.fastest.nominal_ns
    assert robustness.chosen.regret_ns < robustness.fastest.regret_ns / 5
    assert robustness.chosen.p90_ns < robustness.fastest.p90_ns


SOURCE = random.Random(3)
UNEVEN = chain([(SOURCE.randint(5, 60),) * 3 for _ in range(40)])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "search"])
def test_a_plan_under_noise_is_at_most_two_percent_slower(schedule: str) -> None:
    calm = planned(UNEVEN, schedule=schedule)
    noisy = planned(UNEVEN, schedule=schedule, noise=0.08)
    assert noisy.robustness is not None and calm.robustness is None
    assert noisy.robustness.candidates > 1
    assert noisy.prediction.step_ns <= 1.02 * calm.prediction.step_ns
    assert encode(noisy) == encode(planned(UNEVEN, schedule=schedule, noise=0.08))
    assert decode(encode(noisy), Plan, origin="test") == noisy


def test_zero_noise_gives_a_plan_that_is_no_slower() -> None:
    step = planned(UNEVEN, noise=0.0).prediction.step_ns
    assert step <= planned(UNEVEN).prediction.step_ns


def test_what_fixes_the_cut_is_kept_under_noise() -> None:
    pins = {f"n{index}": index // 10 for index in range(40)}
    noisy = planned(UNEVEN, noise=0.1, pin=pins)
    assert noisy.assignment == pins
    assert noisy.robustness is not None and noisy.robustness.candidates == 1


def test_a_plan_whose_noise_was_edited_is_refused() -> None:
    plan = planned(UNEVEN, noise=0.1)
    assert plan.robustness is not None
    with pytest.raises(ValueError, match=r"chosen under 0\.1"):
        msgspec.structs.replace(plan, options=options(k=4, noise=0.2))
    step = plan.robustness.chosen
    slower = msgspec.structs.replace(step, nominal_ns=step.nominal_ns * 103 // 100)
    with pytest.raises(ValueError, match="more than 2 % longer"):
        Robustness(noise=0.1, draws=1, seed=0, candidates=2, chosen=slower, fastest=step)
    other = msgspec.structs.replace(step, nominal_ns=step.nominal_ns + 1)
    edited = msgspec.structs.replace(plan.robustness, chosen=other)
    assert any(
        "noise" in finding.message
        for finding in findings(msgspec.structs.replace(plan, robustness=edited))
    )
