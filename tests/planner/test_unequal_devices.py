"""Joint searches over devices of several kinds, against all orders, settings and cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.api.choices import requested_options
from pipecompile.api.costs import of_ranks
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Link, Links, links_of_pairs
from pipecompile.ir.plan import Options, Plan, Provenance
from pipecompile.planner.joint_search import JointLimits, joint_plan
from pipecompile.planner.partition_problem import simulated_step_ns
from pipecompile.planner.setting_bounds import Work, least_step_ns
from pipecompile.planner.setting_space import SettingSpace
from pipecompile.planner.target_costs import Source
from pipecompile.planner.unequal_devices import UnequalDevices
from tests.api.sized_costs import ChainNode, SizedChain, contiguous_cuts

SAMPLES = 4
CAPS = {"h100": 80 << 30, "a100": 40 << 30}
ALL = JointLimits(effort=10_000, top=10_000)


@dataclass(frozen=True)
class UnequalChain:
    """A chain whose nodes take other times on each kind of device."""

    kinds: Mapping[str, SizedChain]

    def check(self, plan: Plan) -> None:
        """Any plan is of this chain."""

    def source(self, options: Options) -> Source:
        """Nothing but a name."""
        return Source("chain", Provenance(verified=False), ())

    def graph(self, options: Options) -> CostGraph:
        """Return the chain on the devices that the costs list."""
        return of_ranks(
            options.costs, lambda kind: self.kinds[kind.removeprefix("roofline:")].graph(options)
        )


@st.composite
def unequal_chains(draw: st.DrawFn) -> UnequalChain:
    times = st.tuples(*[st.integers(1, 20)] * 3)
    sizes = draw(st.lists(st.sampled_from([1, 100]), min_size=3, max_size=4))
    nodes = {
        kind: tuple(ChainNode(0, *draw(times), parameter_bytes=8, bytes=size) for size in sizes)
        for kind in CAPS
    }
    return UnequalChain({kind: SizedChain(own, SAMPLES) for kind, own in nodes.items()})


def space(*names: str, fixed: Mapping[str, Any] | None = None) -> SettingSpace:
    options = requested_options(k=1, costs="roofline:h100", memory="80GB", recompute="none")
    unequal = UnequalDevices(names, CAPS)
    given = {"recompute": "none", **(fixed or {})}
    return SettingSpace(len(names), SAMPLES, options, given, unequal)


def links_between(names: tuple[str, ...]) -> Links:
    """Slow links between two kinds."""
    near, far = (Link(bandwidth_bytes_per_s=10**rate, latency_ns=2) for rate in (10, 9))
    return links_of_pairs([[near if a == b else far for b in names] for a in names])


@settings(max_examples=4, deadline=None)
@given(unequal_chains(), st.sampled_from([("h100", "a100"), ("h100", "a100", "a100")]))
def test_the_plan_is_within_its_gap_of_the_best_of_all_orders_settings_and_cuts(
    chain: UnequalChain, names: tuple[str, ...]
) -> None:
    where, links = space(*names), links_between(names)
    steps = []
    for setting in where.settings():
        options = where.options(setting)
        graph = chain.graph(msgspec.structs.replace(options, microbatches=setting.parts))
        own = [
            simulated_step_ns(graph, cut, options, where.links(links, setting))
            for cut in contiguous_cuts(len(graph.nodes), setting.k)
        ]
        assert all(least_step_ns(Work.of(graph), setting) <= step for step in own)
        steps += own
    plan = joint_plan(where, chain, links, "devices", ALL)
    assert plan.joint is not None
    assert plan.joint.bound_ns <= min(steps) <= plan.prediction.step_ns
    assert plan.prediction.step_ns <= 1.25 * min(steps)


def test_the_bound_is_by_the_speed_of_all_ranks() -> None:
    fast = SizedChain((ChainNode(),) * 4, SAMPLES)
    slow = SizedChain((ChainNode(0, 40, 40, 40),) * 4, SAMPLES)
    chain = UnequalChain({"h100": fast, "a100": slow})
    options = requested_options(k=2, microbatches=SAMPLES, costs="roofline:h100,a100")
    # 120 ns on the fast rank alone and 480 on the slow one: 1 / (1/120 + 1/480) together.
    assert Work.of(chain.graph(options)).busiest_ns == 96
    assert Work.of(chain.graph(options)).of_part(2).busiest_ns == 48


def test_each_replica_has_the_same_kinds_in_either_order() -> None:
    names = ("h100", "h100", "a100", "a100")
    found = {(each.replicas, each.kinds) for each in space(*names).settings()}
    assert found == {
        (1, "2xh100,2xa100"),
        (1, "2xa100,2xh100"),
        (2, "1xh100,1xa100"),
        (2, "1xa100,1xh100"),
    }
    assert {each.stages_per_rank for each in space(*names).settings()} == {1}
    # Three of one kind are not the same share of two replicas.
    assert {each.replicas for each in space("h100", *["a100"] * 3).settings()} == {1}


def test_options_and_links_are_those_of_the_ranks() -> None:
    names = ("h100", "h100", "a100", "a100")
    devices = UnequalDevices(names, CAPS)
    where = space(*names)
    setting = next(each for each in where.settings() if each.kinds == "1xa100,1xh100")
    options = where.options(setting)
    assert options.costs == "roofline:1xa100,1xh100"
    assert options.caps(2) == (CAPS["a100"], CAPS["h100"])
    # The latency from device i to device j is 10 × i + j: ranks are devices 2, 0, 3 and 1.
    table = [[Link(latency_ns=10 * i + j) for j in range(4)] for i in range(4)]
    links = devices.links(links_of_pairs(table), setting.kinds, 2)
    assert [links.link(0, rank).latency_ns for rank in (1, 2, 3)] == [20, 23, 21]
    assert links.link(3, 2).latency_ns == 13


@pytest.mark.parametrize("order", ["h100,a100", "a100,h100"])
def test_a_fixed_setting_of_both_orders_is_no_shorter(order: str) -> None:
    fast = tuple(ChainNode(forward_ns=10 + 3 * n) for n in range(4))
    slow = tuple(replace(node, forward_ns=2 * node.forward_ns) for node in fast)
    chain = UnequalChain({"h100": SizedChain(fast, SAMPLES), "a100": SizedChain(slow, SAMPLES)})
    given = {"microbatches": SAMPLES, "schedule": "1f1b"}
    plan = joint_plan(space("h100", "a100", fixed=given), chain, Links.of(Link()), "devices", ALL)
    options = requested_options(k=2, costs=f"roofline:{order}", **given)
    graph = chain.graph(options)
    steps = [
        simulated_step_ns(graph, cut, options, Links.of(Link())) for cut in contiguous_cuts(4, 2)
    ]
    assert plan.prediction.step_ns <= min(steps)
