"""Steps of many draws at once, against a naive simulation of each draw by itself."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.ir.plan import Plan
from pipecompile.schedule.noisy_steps import Factors, Noise, steps_of_draws, steps_under_noise
from pipecompile.schedule.problem import Network, PlacedProblem
from pipecompile.schedule.simulator import simulate_plan
from tests.schedule.naive import naive_times
from tests.schedule.strategies import orders, problems
from tests.schedule.test_selection import chain, planned

KINDS = ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns", "recompute_ns")
TIMES = [(20, 30, 25), (40, 10, 15), (5, 60, 30), (30, 30, 30), (25, 12, 40), (8, 9, 10)]


def drawn(problem: PlacedProblem, factors: list[float]) -> PlacedProblem:
    """Return the problem whose stages take so many times as long."""
    costs = [
        replace(each, **{kind: round(getattr(each, kind) * factor) for kind in KINDS})
        for each, factor in zip(problem.costs, factors, strict=True)
    ]
    return replace(problem, costs=tuple(costs))


@settings(max_examples=100)
@given(problems(networks=st.just(Network())), st.data())
def test_each_draw_takes_what_a_naive_simulation_of_it_takes(
    problem: PlacedProblem, data: st.DataObject
) -> None:
    schedule = data.draw(orders(problem))
    some = st.lists(st.floats(0, 4), min_size=problem.stages, max_size=problem.stages)
    draws = data.draw(st.lists(some, min_size=1, max_size=4))
    steps = steps_of_draws(problem, schedule, list(np.array(draws).T))
    expected = [naive_times(drawn(problem, each), schedule).makespan_ns for each in draws]
    assert steps.tolist() == expected


def test_factors_have_the_mean_and_the_spread_that_are_asked_for() -> None:
    factors = Noise(0.2, 20_000, 1).of_device(3)
    assert factors.mean() == pytest.approx(1, abs=0.01)
    assert factors.std() == pytest.approx(0.2, rel=0.03)
    assert factors.min() > 0


def test_a_name_has_the_same_draws_wherever_it_lies_and_another_name_others() -> None:
    noise = Noise(0.1, 50, 0)
    alone = noise.of_nodes([("a", 7)])
    assert np.allclose(alone, Noise(0.1, 50, 0).of_nodes([("a", 900), ("free", 0)]))
    assert not np.allclose(alone, noise.of_nodes([("b", 7)]))
    assert not np.allclose(alone, Noise(0.1, 50, 1).of_nodes([("a", 7)]))
    both = noise.of_nodes([("a", 30), ("b", 10)])
    assert np.allclose(both, 0.75 * alone + 0.25 * noise.of_nodes([("b", 7)]))
    assert np.array_equal(noise.of_nodes([]), np.ones(50))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v"])
@pytest.mark.parametrize("recompute", ["none", "stage", "except-last"])
def test_without_noise_every_draw_is_the_predicted_step(schedule: str, recompute: str) -> None:
    plan = planned(chain(TIMES), schedule=schedule, recompute=recompute)
    steps = steps_under_noise(plan, {"n0": 3}, Noise(0, 3, 0))
    assert steps.tolist() == [plan.prediction.step_ns] * 3
    assert plan.prediction.step_ns == simulate_plan(plan).makespan_ns


def test_replicas_wait_for_the_slowest_one() -> None:
    plan, noise = planned(chain(TIMES), k=3, microbatches=6), Noise(0.1, 40, 0)
    ones: dict[str, int] = {}
    both = _replicated(plan, 2)
    apart = [steps_under_noise(plan, ones, _Shifted(0.1, 40, 0, first=first)) for first in (0, 3)]
    assert np.array_equal(steps_under_noise(both, ones, noise), np.maximum(*apart))


class _Shifted(Noise):
    """The noise of one replica: its devices are counted from `first`."""

    def __init__(self, share: float, draws: int, seed: int, *, first: int) -> None:
        super().__init__(share, draws, seed)
        object.__setattr__(self, "first", first)

    def of_device(self, number: int) -> Factors:
        return super().of_device(number + getattr(self, "first", 0))


def _replicated(plan: Plan, replicas: int) -> Plan:
    options = msgspec.structs.replace(plan.options, replicas=replicas)
    return msgspec.structs.replace(plan, replicas=replicas, options=options)
