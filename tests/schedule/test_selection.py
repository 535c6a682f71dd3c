"""Plans under every schedule: placements, searches, what fits, what is refused. No PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.api.soundness import findings
from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.plan import Options, Plan, Provenance
from pipecompile.ir.schedule import Kind, Schedule
from pipecompile.ir.serialization import encode
from pipecompile.ir.size import size_text
from pipecompile.planner.draft import draft
from pipecompile.report.summary import summary
from pipecompile.schedule import selection as ordering
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named_orders import ASYNCHRONOUS, NAMES, SPLIT
from pipecompile.schedule.robustness import is_gain_robust
from pipecompile.schedule.selection import placements
from pipecompile.schedule.simulator import simulate_plan
from pipecompile.schedule.stages import problem_of_plan
from tests.sweeps import examples

SYNCHRONOUS = [name for name in NAMES if name not in ASYNCHRONOUS and name != "forward-only"]
MIB = 1 << 20
# In 4 stages of EVEN two microbatches of 4 MiB each, beside the 8 outputs that were sent.
TIGHT = 16 * MIB


def violations(plan: Plan) -> list[str]:
    return [finding.message for finding in findings(plan)]


def chain(times: list[tuple[int, int, int]], *, halves: bool = True) -> CostGraph:
    """Return nodes in a row with these times of F, I and W; each saves one MiB."""
    nodes = tuple(
        Node(
            name=f"n{index}",
            forward_ns=forward,
            backward_ns=first + second,
            backward_input_ns=first if halves else None,
            backward_weight_ns=second if halves else None,
            parameter_bytes=0,
            saved_bytes=MIB,
            group=None,
            saved=(index,),
        )
        for index, (forward, first, second) in enumerate(times)
    )
    tensors = tuple(
        Tensor(producer=a.name, consumers=(b.name,), bytes=0, gradient_bytes=0, storage=i)
        for i, (a, b) in enumerate(pairwise(nodes))
    )
    return CostGraph(allocator="cpu", nodes=nodes, tensors=tensors, storages=(MIB,) * len(nodes))


@pytest.fixture(autouse=True, scope="module")
def _little_search() -> Iterator[None]:
    """The tests do not depend on the budget of the search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "SEARCH_SECONDS", 0.2)
        yield


def options(**changes: Any) -> Options:
    asked = {
        "k": 4,
        "microbatches": 8,
        "schedule": "1f1b",
        "objective": "variance",
        "recompute": "none",
    }
    return Options(**{**asked, "memory_bytes": None, "costs": "flops", **changes})


def planned(graph: CostGraph, **changes: Any) -> Plan:
    made = draft(
        graph,
        options(**changes),
        graph_digest="0" * 64,
        capture=Provenance(verified=True),
        microbatch_shapes=[(1,)],
    )
    assert violations(made) == []
    return made


def replaced(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with other options."""
    return msgspec.structs.replace(plan, options=msgspec.structs.replace(plan.options, **changes))


EVEN = chain([(20, 20, 20)] * 16)


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("recompute", ["none", "stage", "except-last"])
def test_every_synchronous_schedule_is_planned_where_it_belongs(name: str, recompute: str) -> None:
    made = planned(EVEN, k=8, schedule=name, recompute=recompute)
    assert made.schedule.name == name and made.ordering is None
    assert made.ranks * made.stages_per_rank == 8
    assert check_schedule(made.schedule, problem_of_plan(made)) == []
    assert made.prediction.step_ns == simulate_plan(made).makespan_ns
    halves = any(action.kind is Kind.BACKWARD_WEIGHT for _, action in made.schedule)
    assert halves == (name in SPLIT)
    recomputed = sorted(
        (a.stage, a.microbatch) for _, a in made.schedule if a.kind is Kind.RECOMPUTE
    )
    assert recomputed == list(
        product(range(7), range({"none": 0, "stage": 8, "except-last": 7}[recompute]))
    )


@pytest.mark.parametrize("recompute", ["none", "stage", "except-last"])
def test_cuts_are_compared_by_what_is_recomputed(recompute: str) -> None:
    """All of four microbatches recompute, or three; loads are means over them."""
    made = planned(EVEN, microbatches=4, recompute=recompute)
    assert made.search.values["max_load_ns"] == max(made.prediction.loads_ns)
    assert made.search.values["sum_of_squares_ns2"] == sum(
        load**2 for load in made.prediction.loads_ns
    )


def test_placements_follow_the_schedule_the_options_or_both() -> None:
    loop, v = (0, 1, 0, 1), (0, 1, 1, 0)
    assert placements(options()) == ((0, 1, 2, 3),)
    assert placements(options(schedule="interleaved-1f1b")) == (loop,)
    assert placements(options(schedule="zb-v")) == (v,)
    assert placements(options(schedule="gpipe", stages_per_rank=2, placement="v")) == (v,)
    assert placements(options(schedule="search")) == ((0, 1, 2, 3),)
    assert placements(options(schedule="search", stages_per_rank=2)) == ((0, 0, 1, 1), loop, v)
    assert placements(options(schedule="search", stages_per_rank=2, placement="loop")) == (loop,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"k": 3, "schedule": "zb-v"},
            r"schedule 'zb-v' places 2 stages on a rank, so k=4 gives 2 ranks; for 3 ranks use k=6",
        ),
        (
            {"k": 1, "stages_per_rank": 2},
            r"stages_per_rank=2 places 2 stages on a rank, so k=2 gives 1 rank; for 1 rank use k=2",
        ),
        (
            {"schedule": "zb-v", "placement": "loop"},
            r"schedule 'zb-v' needs the stages placed as v",
        ),
        (
            {"schedule": "zb-h1", "stages_per_rank": 2},
            r"schedule 'zb-h1' needs one stage on each rank",
        ),
        ({"schedule": "dualpipe-v", "microbatches": 3}, r"microbatches"),
        ({"schedule": "1f1bb"}, r"unknown schedule '1f1bb'; did you mean '1f1b'[?] choose from"),
        (
            {"schedule": "zigzag"},
            r"unknown schedule 'zigzag'; choose from gpipe, 1f1b, .*, search$",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(EVEN, **changes)


def test_halves_of_unknown_length_are_not_scheduled() -> None:
    unknown = chain([(20, 20, 20)] * 8, halves=False)
    with pytest.raises(
        InputError, match="do not say how long each half takes; choose other costs, or one of gpipe"
    ):
        planned(unknown, schedule="zb-h1")
    made = planned(unknown, schedule="search")
    assert not any(action.kind is Kind.BACKWARD_WEIGHT for _, action in made.schedule)


TIMES = st.lists(st.tuples(*[st.integers(1, 40)] * 3), min_size=6, max_size=10)


@pytest.mark.sweep
@settings(max_examples=30)
@given(TIMES, st.integers(2, 3), st.integers(2, 5), st.sampled_from([1, 2]))
def test_a_searched_plan_is_no_longer_than_any_named_one(
    times: list[tuple[int, int, int]], ranks: int, microbatches: int, each: int
) -> None:
    asked = {"k": ranks * each, "microbatches": microbatches, "stages_per_rank": each}
    made = planned(chain(times), schedule="search", **asked)
    assert made.ordering is not None
    assert made.ordering.bound_ns <= made.ordering.searched_ns
    assert made.prediction.step_ns <= min(made.ordering.named_ns.values())
    assert made.ordering.is_in_plan == (
        made.schedule.name == "search"
    ) or made.ordering.searched_ns in (made.ordering.named_ns.values())


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("each", [1, 2])
def test_a_search_uses_the_memory_that_there_is(each: int) -> None:
    roomy = planned(EVEN, schedule="search", k=4 * each, stages_per_rank=each)
    tight = planned(EVEN, schedule="search", k=4 * each, stages_per_rank=each, memory_bytes=TIGHT)
    assert max(memory.total.bound for memory in roomy.prediction.memory) > TIGHT
    assert max(memory.total.bound for memory in tight.prediction.memory) <= TIGHT
    assert roomy.prediction.step_ns <= tight.prediction.step_ns


def test_stages_that_share_a_rank_fit_together_or_the_plan_is_refused() -> None:
    made = planned(EVEN, schedule="zb-v", k=8, memory_bytes=40 * MIB)
    assert max(memory.total.bound for memory in made.prediction.memory) <= 40 * MIB
    with pytest.raises(InfeasibleError):
        planned(EVEN, schedule="zb-v", k=8, memory_bytes=12 * MIB)


@pytest.mark.parametrize(("name", "each"), [("1f1b", 1), ("search", 1), ("zb-v", 2)])
def test_each_rank_has_a_cap_of_its_own(name: str, each: int) -> None:
    asked: dict[str, Any] = {"schedule": name, "k": 4 * each}
    free = planned(EVEN, **asked)
    needed = [memory.total.bound for memory in free.prediction.memory]
    caps = (needed[0] * 3 // 4, *(2 * size for size in needed[1:]))
    made = planned(EVEN, **asked, memory_bytes=caps)
    assert all(
        held.total.bound <= cap for held, cap in zip(made.prediction.memory, caps, strict=True)
    )
    assert made.assignment != free.assignment
    one, listed = (
        planned(EVEN, **asked, memory_bytes=size) for size in (max(needed), (max(needed),) * 4)
    )
    assert encode(msgspec.structs.replace(listed, options=one.options)) == encode(one)
    over = replaced(made, memory_bytes=(needed[0] // 2, *caps[1:]))
    assert violations(over)[0].startswith("rank 0 may need ")
    assert violations(over)[0].endswith(f"over its cap of {size_text(needed[0] // 2)}; plan again")


def test_caps_of_some_ranks_are_for_no_others() -> None:
    with pytest.raises(
        InfeasibleError, match=r"a rank may hold 1\.0 MiB, but the best cut"
    ) as caught:
        planned(EVEN, memory_bytes=(MIB,) * 4)
    # The list is for four ranks, so more stages are not among what bounds leave open.
    assert str(caught.value).endswith("; this may fit: recompute=auto")
    with pytest.raises(ValueError, match="memory lists 3 caps, but there are 4 ranks"):
        replaced(planned(EVEN), memory_bytes=(MIB,) * 3)


def test_the_same_input_gives_the_same_bytes() -> None:
    uneven = chain([(20 + 7 * i % 11, 20, 5 * i % 13) for i in range(14)])
    first, second = (planned(uneven, schedule="search", memory_bytes=30 * MIB) for _ in range(2))
    assert encode(first) == encode(second)


def test_a_step_that_memory_keeps_long_is_told_what_recompute_would_give() -> None:
    tight = {"memory_bytes": 9 * MIB}
    made = planned(EVEN, schedule="search", **tight)
    recomputed = planned(EVEN, schedule="1f1b", **tight, recompute="stage")
    assert made.ordering is not None
    assert made.ordering.recomputed_ns == recomputed.prediction.step_ns < made.prediction.step_ns
    assert "memory keeps the ranks waiting: recompute auto would shorten" in summary(made)
    free = planned(EVEN, schedule="search")
    assert free.ordering is not None and free.ordering.recomputed_ns is None


def test_a_plan_that_misstates_the_other_schedules_is_found_out() -> None:
    made = planned(EVEN, schedule="search")
    assert made.ordering is not None
    better = msgspec.structs.replace(made.ordering, named_ns={"gpipe": 1})
    assert violations(msgspec.structs.replace(made, ordering=better)) == [
        "the other schedules are not what the plan's stages give: the file was edited; plan again"
    ]
    with pytest.raises(ValueError, match="must have an ordering if its options ask for a search"):
        msgspec.structs.replace(made, ordering=None).__post_init__()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_in_plan": False}, "the other schedules are not"),
        ({"searched_ns": 1}, "the other schedules are not"),
        ({"bound_ns": 0}, "the other schedules are not"),
    ],
)
def test_an_edited_ordering_is_found_out(changes: dict[str, Any], message: str) -> None:
    made = planned(EVEN, schedule="search", memory_bytes=TIGHT)
    assert made.schedule.name == "search" and made.ordering is not None
    edited = msgspec.structs.replace(
        made, ordering=msgspec.structs.replace(made.ordering, **changes)
    )
    assert any(message in line for line in violations(edited))


def test_an_order_under_anothers_name_is_found_out() -> None:
    made = planned(EVEN)
    renamed = msgspec.structs.replace(
        made,
        schedule=msgspec.structs.replace(made.schedule, name="gpipe"),
        options=msgspec.structs.replace(made.options, schedule="gpipe"),
    )
    moved = msgspec.structs.replace(
        made, options=msgspec.structs.replace(made.options, stages_per_rank=2)
    )
    for edited in (renamed, moved):
        assert violations(edited) == [
            "the schedule is not the one that the plan names and its options ask for: "
            "the file was edited; plan again"
        ]
    step = msgspec.structs.replace(made.search, values={**made.search.values, "step_ns": 1})
    assert violations(msgspec.structs.replace(made, search=step)) == [
        "the search states another step than the prediction: the file was edited; plan again"
    ]


def test_an_evaluation_is_planned_within_its_memory() -> None:
    made = planned(EVEN, schedule="forward-only", memory_bytes=12 * MIB)
    assert max(memory.total.bound for memory in made.prediction.memory) <= 12 * MIB


@settings(max_examples=examples(40))
@given(TIMES, st.integers(2, 4))
def test_searched_with_recompute_is_no_longer_than_the_named_plan(
    times: list[tuple[int, int, int]], microbatches: int
) -> None:
    asked = {"k": 3, "microbatches": microbatches, "recompute": "stage"}
    searched = planned(chain(times), schedule="search", **asked)
    assert searched.ordering is not None
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert (
            searched.ordering.named_ns[name]
            == planned(chain(times), schedule=name, **asked).prediction.step_ns
        )


def test_over_its_cap_a_plan_names_rank_and_action() -> None:
    made = planned(EVEN)
    capped = msgspec.structs.replace(
        made, options=msgspec.structs.replace(made.options, memory_bytes=14 * MIB)
    )
    found = violations(capped)
    assert found and all("over its cap of" in line for line in found)
    assert found[0].startswith("rank 0 may need ")


def test_fewer_microbatches_keep_the_order() -> None:
    made = planned(EVEN, schedule="search", memory_bytes=TIGHT)
    short: Schedule = made.schedule.first_microbatches(3)
    assert short.microbatches == 3 and made.schedule.first_microbatches(8) is made.schedule
    assert check_schedule(short, replace(problem_of_plan(made), microbatches=3, caps=None)) == []


def test_only_a_gain_that_survives_noise_counts() -> None:
    made = planned(chain([(50, 50, 50)] * 8), schedule="zb-h1")
    worse = planned(chain([(50, 50, 50)] * 8), schedule="gpipe")
    problem = problem_of_plan(made)
    assert is_gain_robust(problem, made.schedule, worse.schedule)
    assert not is_gain_robust(problem, worse.schedule, made.schedule)
    assert not is_gain_robust(problem, made.schedule, made.schedule)
