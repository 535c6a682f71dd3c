from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InputError
from pipecompile.ir.schedule import Schedule
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.problem import Skip, StageCosts
from pipecompile.schedule.transfers import add_transfers
from tests.schedule.cases import equal, order


@given(
    st.sampled_from(["gpipe", "1f1b", "forward-only"]),
    st.integers(1, 6),
    st.integers(1, 9),
    st.booleans(),
    st.randoms(),
)
def test_what_is_lowered_is_sound(
    name: str, stages: int, microbatches: int, recompute: bool, rng: random.Random
) -> None:
    """For all times, zero included, and wherever gradients flow."""
    problem = replace(
        equal(range(stages), microbatches),
        costs=tuple(StageCosts(*(rng.choice([0, 1, 7]) for _ in range(5))) for _ in range(stages)),
        gradient=tuple(rng.random() < 0.8 for _ in range(stages - 1)),
    )
    schedule = generate(name, range(stages), microbatches, recompute)
    lowered = add_transfers(problem, schedule)
    assert check_schedule(lowered, problem) == []
    assert check_schedule(lowered) == []
    assert lowered.compute == schedule.compute


def test_messages_stand_where_they_are_made(lowered: Callable[..., Schedule]) -> None:
    assert lowered("gpipe", 2, 2).actions == (
        (
            "0F0",
            "0SEND_F0",
            "0F1",
            "0SEND_F1",
            "0RECV_B0",
            "0RECV_B1",
            "0B0",
            "0B1",
            "0REDUCE_GRAD",
        ),
        (
            "1RECV_F0",
            "1RECV_F1",
            "1F0",
            "1F1",
            "1B0",
            "1SEND_B0",
            "1B1",
            "1SEND_B1",
            "1REDUCE_GRAD",
        ),
    )


def test_steps_stay_behind_what_they_follow_and_schedules_without_a_common_one_reduce_nothing() -> (
    None
):
    rows = [
        "0F0@0 0B0@0 0STEP0@1 0F1@1 0B1@1 0STEP1@2",
        "1F0@0 1B0@0 1STEP0@1 1F1@1 1B1@1 1STEP1@2",
    ]
    schedule = order(rows, [0, 1], 2, "stashed")
    lowered = add_transfers(equal([0, 1], 2), schedule)
    assert lowered.weight_versions == "stashed"
    assert " ".join(lowered.actions[1]) == (
        "1RECV_F0 1F0@0 1B0@0 1SEND_B0 1STEP0@1 1RECV_F1 1F1@1 1B1@1 1SEND_B1 1STEP1@2"
    )


def test_a_stage_is_reduced_once_its_last_gradient_is_there() -> None:
    """The sum over replicas overlaps with another stage of the rank that still computes."""
    lowered = add_transfers(
        equal([0, 0], 2), order(["0F0 1F0 0F1 1F1 1I0 1I1 1W0 1W1 0B0 0B1"], [0, 0], 2)
    )
    assert " ".join(lowered.actions[0]).endswith("1W1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD")


def test_a_message_that_skips_stages_is_refused() -> None:
    problem = equal(range(3), 1, skips=(Skip(0, 2, 1, 1, 1),))
    with pytest.raises(
        InputError, match=r"from stage 0 to stage 2 skips the stages between, .* relay the tensor"
    ):
        add_transfers(problem, generate("gpipe", range(3), 1, False))


def test_an_evaluation_reduces_nothing(lowered: Callable[..., Schedule]) -> None:
    assert lowered("forward-only", 2, 1).actions == (("0F0", "0SEND_F0"), ("1RECV_F0", "1F0"))


def test_no_gradient_is_sent_where_none_flows() -> None:
    schedule = generate("gpipe", range(2), 1, False)
    lowered = add_transfers(replace(equal(range(2), 1), gradient=(False,)), schedule)
    assert "0RECV_B0" not in lowered.actions[0]
    assert "1SEND_B0" not in lowered.actions[1]


def test_stages_on_one_rank_exchange_no_messages() -> None:
    lowered = add_transfers(equal([0, 0], 1), order(["0F0 1F0 1B0 0B0"], [0, 0], 1))
    assert lowered.actions == (("0F0", "1F0", "1B0", "1REDUCE_GRAD", "0B0", "0REDUCE_GRAD"),)
    assert check_schedule(lowered) == []
