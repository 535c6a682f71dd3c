"""Joint searches against all settings with all cuts, and what they promise."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.api.choices import requested_options
from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.links import FREE, Link, Links
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.serialization import encode
from pipecompile.ir.setting import Setting
from pipecompile.partition.budget import QUICK, CutEffort
from pipecompile.planner import joint_search, setting_space
from pipecompile.planner.draft import draft
from pipecompile.planner.finished_plans import Answer, FinishedPlan, answer_of
from pipecompile.planner.joint_search import JointLimits, joint_plan
from pipecompile.planner.likely_order import FAILURES
from pipecompile.planner.partition_problem import simulated_step_ns
from pipecompile.planner.setting_bounds import Work, extra_ns, least_step_ns
from pipecompile.planner.setting_space import SettingSpace
from pipecompile.schedule.noisy_steps import Noise, steps_under_noise
from tests.api.sized_costs import ChainNode, SizedChain, chains, contiguous_cuts

SAMPLES = 8
ALL = JointLimits(effort=10_000, top=10_000)
SOURCE = SizedChain((), SAMPLES).source(requested_options(k=1, costs="flops"))._asdict()
LINKS = Links.of(Link(bandwidth_bytes_per_s=10**9, latency_ns=3))


def space(devices: int, fixed: dict[str, Any] | None = None, **choices: Any) -> SettingSpace:
    options = requested_options(k=1, costs="flops", **choices)
    return SettingSpace(devices, SAMPLES, options, fixed or {})


def searched(
    chain: SizedChain, where: SettingSpace, limits: JointLimits = ALL, links: Links = LINKS
) -> Plan:
    return joint_plan(where, chain, links, f"{where.devices}xflops", limits)


def graph_of(chain: SizedChain, options: Options) -> Any:
    return chain.graph(replace(options, microbatches=options.replicas * options.microbatches))


def even_chain(nodes: int = 6, **changes: int) -> SizedChain:
    return SizedChain((ChainNode(**changes),) * nodes, SAMPLES)


def uneven_chain() -> SizedChain:
    nodes = (ChainNode(4, forward_ns=3 + 5 * (n % 3), weight_ns=n) for n in range(6))
    return SizedChain(tuple(nodes), SAMPLES)


def shortest_ns(chain: SizedChain, where: SettingSpace, setting: Setting) -> int:
    """The shortest step of all cuts under a setting, `-1` without any cut."""
    options = where.options(setting)
    cuts = contiguous_cuts(len(chain.nodes), setting.k)
    graph = graph_of(chain, options)
    return min((simulated_step_ns(graph, cut, options, LINKS) for cut in cuts), default=-1)


@settings(max_examples=5, deadline=None)
@given(chains(SAMPLES), st.integers(1, 4))
def test_the_plan_is_within_its_gap_of_the_best_of_all_settings_and_cuts(
    chain: SizedChain, devices: int
) -> None:
    where = space(devices)
    steps = {each: shortest_ns(chain, where, each) for each in where.settings()}
    best = min((step for step in steps.values() if step >= 0), default=None)
    if best is None:
        return
    plan = searched(chain, where)
    assert plan.joint is not None
    assert plan.joint.bound_ns <= best <= plan.prediction.step_ns
    assert plan.joint.bound_ns == pytest.approx(plan.prediction.step_ns * (1 - plan.joint.gap))
    # What is not planned is not likely to be shorter: a guess, which is seldom wrong by much.
    assert plan.prediction.step_ns <= 1.25 * best


@settings(max_examples=150, deadline=None)
@given(chains(SAMPLES), st.integers(1, 4), st.data())
def test_no_cut_under_a_setting_is_shorter_than_its_bound(
    chain: SizedChain, devices: int, data: st.DataObject
) -> None:
    where = space(devices)
    setting = data.draw(st.sampled_from(where.settings()))
    graph = graph_of(chain, where.options(setting))
    shortest = shortest_ns(chain, where, setting)
    if shortest >= 0:
        assert least_step_ns(Work.of(graph), setting) <= shortest


@settings(max_examples=50, deadline=None)
@given(chains(SAMPLES), st.integers(1, 3))
def test_work_of_a_part_is_no_more_than_that_of_a_microbatch_of_its_size(
    chain: SizedChain, doublings: int
) -> None:
    whole, part = (
        Work.of(chain.graph(requested_options(k=1, microbatches=parts, costs="flops")))
        for parts in (1, 2**doublings)
    )
    guess = whole.of_part(2**doublings)
    assert guess.forward_ns <= part.forward_ns
    assert guess.backward_ns <= part.backward_ns
    assert guess.largest_ns <= part.largest_ns


@settings(max_examples=25, deadline=None)
@given(chains(SAMPLES), st.floats(0.3, 1.2), st.data())
def test_what_must_be_recomputed_bounds_plans_under_a_cap(
    chain: SizedChain, share: float, data: st.DataObject
) -> None:
    free = space(2, {"replicas": 1, "stages_per_rank": 1})
    setting = data.draw(st.sampled_from(free.settings()))
    graph = graph_of(chain, free.options(setting))
    try:
        loose = drafted(chain, free.options(setting))
    except InfeasibleError:
        return
    cap = int(share * max(rank.total.bound for rank in loose.prediction.memory))
    options = replace(free.options(setting), memory_bytes=cap, recompute="auto")
    extra = extra_ns(graph, options)
    try:
        plan = drafted(chain, options)
    except InfeasibleError:
        return
    assert extra is not None
    assert least_step_ns(Work.of(graph), setting, extra) <= plan.prediction.step_ns


def drafted(chain: SizedChain, options: Options, links: Links = LINKS) -> Plan:
    return draft(
        graph_of(chain, options),
        options,
        **chain.source(options)._asdict(),
        links=links,
        effort=QUICK,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_with_a_setting_fixed_it_is_never_slower_than_that_plan(
    schedule: str, microbatches: int
) -> None:
    chain = uneven_chain()
    fixed = {"replicas": 1, "schedule": schedule, "microbatches": microbatches}
    where = space(2, fixed)
    (setting,) = where.settings()
    plan = draft(
        graph_of(chain, where.options(setting)),
        where.options(setting),
        **chain.source(where.base)._asdict(),
        links=LINKS,
    )
    joint = searched(chain, where)
    assert joint.prediction.step_ns <= plan.prediction.step_ns
    assert (joint.schedule.name, joint.microbatches) == (schedule, microbatches)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_left_open_has_no_longer_a_step_than_if_it_is_given(seed: int) -> None:
    # Seven and six nodes: eight stages are not possible, and say nothing of memory.
    chain = random_chain(seed)
    plan = searched(chain, space(4), JointLimits())
    for fixed in ({"replicas": 1}, {"microbatches": 4}, {"stages_per_rank": 1}):
        given = searched(chain, space(4, fixed), JointLimits())
        assert plan.prediction.step_ns <= given.prediction.step_ns


def test_over_slow_links_what_is_left_open_has_no_longer_a_step_than_if_it_is_given() -> None:
    # A message of one sample takes 103 ns, and a stage 30 ns. Under gpipe, whose step is the
    # longest where links are free, messages wait for each other only at the ends.
    chain = SizedChain((ChainNode(bytes=100, parameter_bytes=100_000),) * 4, SAMPLES)
    plan = searched(chain, space(4), JointLimits())
    given = searched(chain, space(4, {"schedule": "gpipe"}), JointLimits())
    assert plan.prediction.step_ns <= given.prediction.step_ns


def test_settings_of_a_number_of_replicas_without_a_cut_leave_effort_to_others() -> None:
    # Three nodes of 100 MB with their gradients: two ranks of 195 MB hold as much in sum, though
    # one of them has two nodes. On four ranks each is alone.
    heavy = (ChainNode(parameter_bytes=50_000_000),) * 3
    chain = SizedChain((*heavy, ChainNode(), ChainNode()), SAMPLES)
    plan = searched(chain, space(4, memory=322_000_000), JointLimits(effort=8), FREE)
    assert plan.joint is not None
    assert plan.joint.counts["no cut"] == FAILURES
    assert plan.joint.counts["planned"] > 2


def random_chain(seed: int) -> SizedChain:
    random = Random(seed)
    nodes = (
        ChainNode(
            random.randint(0, 20),
            *(random.randint(1, 20) for _ in range(3)),
            parameter_bytes=random.choice([0, 1000, 10_000]),
            bytes=random.choice([1, 8, 100]),
        )
        for _ in range(random.randint(6, 10))
    )
    return SizedChain(tuple(nodes), SAMPLES)


def test_more_stages_than_a_graph_can_have_are_refused_without_a_plan() -> None:
    plan = searched(random_chain(1), space(4, {"replicas": 1}))
    assert plan.joint is not None
    refused = [each for each in plan.joint.others if each.status == "refused"]
    assert {each.ranks * each.stages_per_rank for each in refused} == {8}
    assert all("at most 7 stages" in each.reason for each in refused)
    assert "no cut" not in plan.joint.counts


def test_what_no_effort_would_be_spent_on_is_told_from_what_was_not_tried() -> None:
    where = space(4, {"replicas": 1})
    plans = [searched(uneven_chain(), where, JointLimits(effort)) for effort in (1, 10_000)]
    ended, whole = (plan.joint.counts if plan.joint else {} for plan in plans)
    assert ended["not tried"] > 0
    assert "not tried" not in whole and whole["unlikely"] > 0


def test_what_is_fixed_is_kept() -> None:
    fixed = {"replicas": 2, "schedule": "gpipe", "recompute": "stage", "objective": "max-load"}
    plan = searched(even_chain(), space(4, fixed, objective="max-load"))
    options = plan.options
    assert (plan.replicas, plan.ranks, options.schedule) == (2, 2, "gpipe")
    assert (options.recompute, options.objective) == ("stage", "max-load")


def test_the_same_effort_gives_the_same_plan_and_less_of_it_tries_less() -> None:
    chain = uneven_chain()
    where = space(4, {"replicas": 1})
    plans = [searched(chain, where, JointLimits(effort=effort)) for effort in (2, 2, 30)]
    assert encode(plans[0]) == encode(plans[1])
    joints = [plan.joint for plan in plans]
    tried = [joint.counts["planned"] for joint in joints if joint is not None]
    assert tried[0] <= 2 < tried[2]


def test_a_setting_with_many_actions_takes_several_parts_of_the_effort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain, where, planned = uneven_chain(), space(4, {"replicas": 1}), []
    for actions in (8192, 1):
        monkeypatch.setattr(setting_space, "EFFORT_ACTIONS", actions)
        joint = searched(chain, where, JointLimits(effort=2)).joint
        assert joint is not None
        planned.append(joint.counts["planned"])
    assert planned == [2, 1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_with_many_actions_the_answer_is_as_short_as_by_the_simulated_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick plans have another objective then; the last ones do not."""
    fixed = {"replicas": 1, "schedule": "1f1b", "microbatches": 8}
    chain = random_chain(seed)
    alone = searched(chain, space(4, {**fixed, "objective": "step-time"}, objective="step-time"))
    monkeypatch.setattr(setting_space, "EFFORT_ACTIONS", 1)
    many = searched(chain, space(4, fixed))
    assert many.prediction.step_ns <= alone.prediction.step_ns


def test_a_time_limit_ends_the_search_with_the_best_plan_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where, clock = space(4, {"replicas": 1}), count()
    whole = searched(uneven_chain(), where)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    ended = searched(uneven_chain(), where, JointLimits(seconds=4.0))
    assert whole.joint is not None
    assert ended.joint is not None
    assert 1 <= ended.joint.counts["planned"] < whole.joint.counts["planned"]
    assert ended.joint.counts["not tried"] > whole.joint.counts.get("not tried", 0)
    assert ended.joint.gap >= whole.joint.gap


@pytest.mark.parametrize("replicas", [1, None])
def test_one_setting_is_planned_although_the_time_is_up_before(replicas: int | None) -> None:
    """What is costed first may be another size than that of the setting which is planned."""
    fixed = {} if replicas is None else {"replicas": replicas}
    joint = searched(uneven_chain(), space(4, fixed), JointLimits(seconds=0.0)).joint
    assert joint is not None
    assert joint.counts["planned"] == 1


def test_recompute_is_chosen_where_memory_needs_it() -> None:
    chain = even_chain(bytes=10**7, parameter_bytes=1000)
    fixed = {"replicas": 1, "microbatches": 4, "schedule": "1f1b"}
    loose = searched(chain, space(2, fixed), links=FREE)
    needed = max(rank.total.bound for rank in loose.prediction.memory)
    tight = searched(chain, space(2, fixed, memory=needed - 3 * 10**7), links=FREE)
    assert loose.options.recompute == "none"
    assert tight.options.recompute != "none"
    assert tight.prediction.step_ns > loose.prediction.step_ns


@pytest.mark.parametrize("part", [80, 85, 95])
def test_regions_are_tried_although_other_policies_are_more_likely_to_fit(part: int) -> None:
    chain = even_chain(16, bytes=10**7, parameter_bytes=1000)
    fixed = {"replicas": 1, "microbatches": 4, "schedule": "1f1b"}
    loose = searched(chain, space(2, fixed), links=FREE)
    cap = max(rank.total.bound for rank in loose.prediction.memory) * part // 100
    where = space(2, fixed, memory=cap)
    plan = searched(chain, where, JointLimits(effort=3), links=FREE)
    auto = next(each for each in where.settings() if each.recompute == "auto")
    by_hand = drafted(chain, where.options(auto), links=FREE)
    assert plan.prediction.step_ns <= by_hand.prediction.step_ns


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("part", [70, 80, 100])
def test_an_order_without_a_cut_says_nothing_of_one_that_holds_as_much(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_zb_h1(graph: Any, options: Options, **rest: Any) -> Plan:
        if options.schedule == "zb-h1":
            raise InfeasibleError("no cut was found")
        return draft(graph, options, **rest)

    monkeypatch.setattr(joint_search, "draft", without_zb_h1)
    chain = even_chain(16, bytes=10**7, parameter_bytes=1000)
    fixed = {"replicas": 1, "microbatches": 8, "stages_per_rank": 1}
    loose = searched(chain, space(2, fixed | {"schedule": "1f1b"}), links=FREE)
    cap = max(rank.total.bound for rank in loose.prediction.memory) * part // 100
    named = searched(chain, space(2, fixed | {"schedule": "1f1b"}, memory=cap), links=FREE)
    plan = searched(chain, space(2, fixed, memory=cap), links=FREE)
    assert plan.prediction.step_ns <= named.prediction.step_ns


@settings(max_examples=10, deadline=None)
@given(chains(SAMPLES), st.floats(0.4, 1.2))
def test_more_effort_never_gives_a_longer_step(chain: SizedChain, share: float) -> None:
    loose = searched(chain, space(4), JointLimits(effort=1))
    cap = int(share * max(rank.total.bound for rank in loose.prediction.memory))
    where, steps = space(4, memory=cap), list[float]()
    for effort in (1, 2, 4, 8):
        try:
            steps.append(searched(chain, where, JointLimits(effort=effort)).prediction.step_ns)
        except InfeasibleError:
            steps.append(inf)
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("cap", [224_000_000, 188_000_000])
def test_a_search_of_little_effort_finds_what_fits(cap: int) -> None:
    chain = even_chain(bytes=10**7, parameter_bytes=1000)
    plan = searched(chain, space(4, memory=cap), JointLimits(effort=1), links=FREE)
    assert max(rank.total.bound for rank in plan.prediction.memory) <= cap


@settings(max_examples=5, deadline=None)
@given(chains(SAMPLES), st.sampled_from([0.02, 0.2]))
def test_under_noise_the_plan_of_least_regret_of_all_settings_is_chosen(
    chain: SizedChain, noise: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        compared = list[FinishedPlan]()

        def spied(finished: Sequence[FinishedPlan], share: float | None) -> Answer:
            compared[:] = finished
            return answer_of(finished, share)

        patch.setattr(joint_search, "answer_of", spied)
        plan = searched(chain, space(4, noise=noise))
    assert plan.joint is not None
    shortest = min(
        each.plan.prediction.step_ns
        if each.plan.robustness is None
        else each.plan.robustness.fastest.nominal_ns
        for each in compared
    )
    assert plan.prediction.step_ns <= 1.02 * shortest
    quick = min(each.step_ns for each in plan.joint.best if each.step_ns is not None)
    close = {each.setting for each in plan.joint.best if (each.step_ns or inf) <= 1.02 * quick}
    assert close <= {each.setting for each in compared}
    known = plan.joint.robustness
    if known is None:
        assert len({each.setting for each in compared}) == 1
        return
    draws = Noise(noise, known.draws, known.seed)
    near = [each for each in compared if each.plan.prediction.step_ns <= 1.02 * shortest]
    steps = [steps_under_noise(each.plan, each.node_ns, draws).tolist() for each in near]
    regrets = [
        sorted(own - min(every) for own, every in zip(row, zip(*steps, strict=True), strict=True))
        for row in steps
    ]
    nine_of_ten = known.draws * 9 // 10 - 1
    assert known.chosen.regret_ns == min(regret[nine_of_ten] for regret in regrets)
    assert known.chosen.nominal_ns == plan.prediction.step_ns
    # Planning its setting again gives it again, which `check` relies on.
    again = draft(
        graph_of(chain, plan.options),
        plan.options,
        **chain.source(plan.options)._asdict(),
        links=LINKS,
    )
    assert encode(replace(plan, joint=None)) == encode(again)


@settings(max_examples=10, deadline=None)
@given(chains(SAMPLES), st.floats(0.2, 1.2), st.integers(1, 8))
def test_each_setting_is_named_once_with_what_came_of_it(
    chain: SizedChain, share: float, effort: int
) -> None:
    loose = searched(chain, space(4), JointLimits(effort=1))
    cap = int(share * max(rank.total.bound for rank in loose.prediction.memory))
    where = space(4, memory=cap)
    try:
        plan = searched(chain, where, JointLimits(effort=effort, top=2))
    except InfeasibleError:
        return
    assert plan.joint is not None
    named = [(each.setting, each.status, each.bound_ns) for each in plan.joint.best]
    for other in plan.joint.others:
        fields = {name: getattr(other, name) for name in Setting.__struct_fields__}
        for number, bound_ns in zip(other.microbatches, other.bounds_ns, strict=True):
            setting = Setting(**{**fields, "microbatches": number})
            named.append((setting, other.status, bound_ns))
    assert sorted(map(str, where.settings())) == sorted(str(setting) for setting, *_ in named)
    assert Counter(status for _, status, _ in named) == plan.joint.counts
    # Of those that the bound rules out, none is below the step.
    ruled_out = [bound_ns for _, status, bound_ns in named if status == "bound"]
    assert all(bound_ns >= plan.prediction.step_ns for bound_ns in ruled_out)


def test_nothing_fits_is_said_with_the_reasons() -> None:
    chain = even_chain(parameter_bytes=10**9)
    with pytest.raises(InfeasibleError, match=r"no plan was found for 2xflops among \d+ settings"):
        searched(chain, space(2, memory="1GiB"))
    with pytest.raises(InfeasibleError, match=r"cannot fit their memory \(such as 1 replica × 2"):
        searched(chain, space(2, {"replicas": 1}, memory="1GiB"))
    # The sums fit; what a quick search says, that no cut was found, is no reason.
    chain = even_chain(bytes=10**7, parameter_bytes=10**6)
    with pytest.raises(InfeasibleError, match=r"found to fit \(such as .*: a rank may hold 131\.6"):
        searched(chain, space(2, {"replicas": 1}, memory=138_000_000), JointLimits(effort=3))


@pytest.mark.parametrize(
    "fixed", [{"replicas": 1}, {"replicas": 1, "schedule": "1f1b", "microbatches": 4}]
)
def test_reasons_of_settings_do_not_advise_what_the_search_has_tried(fixed: dict[str, Any]) -> None:
    chain = even_chain(bytes=10**7, parameter_bytes=10**6)
    where = space(2, fixed, memory=138_000_000)
    setting = where.settings()[0]
    with pytest.raises(InfeasibleError, match=r"; this would fit: |; this may fit: "):
        draft(graph_of(chain, where.options(setting)), where.options(setting), **SOURCE)
    with pytest.raises(InfeasibleError) as refusal:
        searched(chain, where, JointLimits(effort=3))
    message = str(refusal.value)
    assert "a rank may hold 131.6" in message
    assert not re.search(r"(may|would) fit:|recompute[ =]auto or|more ranks", message)
    assert "more memory or a smaller batch, or fix fewer options; the least memory" in message


@pytest.mark.parametrize("fixed", [{}, {"recompute": "none"}, {"schedule": "1f1b"}])
def test_a_cap_that_is_a_little_too_small_is_answered_with_one_that_does(
    fixed: dict[str, Any],
) -> None:
    chain = even_chain(bytes=10**7, parameter_bytes=10**6)
    fixed = {"replicas": 1} | fixed
    with pytest.raises(InfeasibleError) as refusal:
        searched(chain, space(2, fixed, memory=138_000_000), JointLimits(effort=3))
    found = re.search(
        r"found to do is .* \(([\d,]+) bytes\) a rank, under 1 repl", str(refusal.value)
    )
    assert found is not None
    cap = int(found[1].replace(",", ""))
    assert 138_000_000 < cap < 2 * 138_000_000
    plan = searched(chain, space(2, fixed, memory=cap), JointLimits(effort=3))
    assert max(rank.total.bound for rank in plan.prediction.memory) <= cap


def test_a_cap_that_is_far_too_small_is_refused_by_short_searches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    efforts = list[CutEffort]()

    def noted(*args: Any, effort: CutEffort, **rest: Any) -> Plan:
        efforts.append(effort)
        return draft(*args, effort=effort, **rest)

    monkeypatch.setattr(joint_search, "draft", noted)
    chain = even_chain(bytes=10**7, parameter_bytes=10**6)
    with pytest.raises(InfeasibleError):
        searched(chain, space(2, {"replicas": 1}, memory=138_000_000))
    assert max(effort.seconds for effort in efforts) == QUICK.seconds
    assert any(effort.is_explained for effort in efforts)


def test_what_no_rank_can_hold_for_any_model_is_refused_without_a_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(*args: object, **options: object) -> Plan:
        pytest.fail("no cut is needed to know that")

    monkeypatch.setattr(joint_search, "draft", cut)
    # Ranks between two others take 151 MiB before they hold anything, and these have 133.
    where = space(4, {"replicas": 1}, memory=140_000_000)
    reason = r"\d+ cannot fit .* 4 ranks have 0 B besides up to 151.0 MiB a rank that allocator"
    with pytest.raises(InfeasibleError, match=reason):
        searched(even_chain(), where)
    # The first rank of two takes 119 MiB: the rest of 133 is less than all states.
    chain = even_chain(parameter_bytes=10**7)
    with pytest.raises(InfeasibleError, match=r"states take 114.4 MiB, and 2 ranks have 28.3 MiB"):
        searched(chain, space(2, {"replicas": 1}, memory=140_000_000))


def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"no setting of 4 devices and a batch of 8 has replicas=3"
    ):
        space(4, {"replicas": 3}).settings()


def test_settings_use_all_devices_and_divide_the_batch() -> None:
    found = space(4).settings()
    assert {(each.replicas, each.ranks) for each in found} == {(1, 4), (2, 2), (4, 1)}
    assert all(SAMPLES % each.parts == 0 for each in found)
    assert {each.recompute for each in found} == {"none"}
    assert {each.recompute for each in space(4, memory="1GiB").settings()} > {"auto"}
    assert len(set(found)) == len(found)


def test_limits_are_open_by_default() -> None:
    assert JointLimits().seconds == inf


def test_links_that_cost_nothing_are_fine() -> None:
    plan = searched(even_chain(), space(2), links=FREE)
    assert plan.joint is not None
    assert plan.joint.gap < 0.5
