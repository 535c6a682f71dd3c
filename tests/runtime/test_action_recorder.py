"""What the recorder of a rank adds to its marks."""

from __future__ import annotations

import pytest
import torch

from pipecompile.ir.schedule import Action
from pipecompile.runtime.action_recorder import ActionRecorder, message_bytes
from pipecompile.runtime.messages import BoundaryShape

# Into stage 1: a tensor with a gradient, and one of integers. Into stage 2: one of half precision.
BOUNDARIES = [
    [BoundaryShape(((2, 3), torch.float32, False))],
    [BoundaryShape(((2, 5), torch.float32, True)), BoundaryShape(((7,), torch.int64, False))],
    [BoundaryShape(((), torch.bfloat16, True))],
]


@pytest.mark.parametrize(
    ("action", "size"),
    [
        ("0SEND_F3", 40 + 56),
        ("1RECV_F3", 40 + 56),
        ("1SEND_B3", 40),
        ("0RECV_B3", 40),
        ("1SEND_F0", 2),
        ("1RECV_B0", 2),
        ("1F0", 0),
        ("1B0", 0),
        ("2REDUCE_GRAD", 0),
    ],
)
def test_a_message_has_the_bytes_of_the_tensors_that_cross(action: str, size: int) -> None:
    assert message_bytes(Action.parse(action), BOUNDARIES) == size


def test_only_actions_that_may_wait_have_a_moment_of_their_own_for_that() -> None:
    recorder = ActionRecorder(torch.device("cpu"))
    recorder.begin_step()
    for text in ("1F0", "1W0"):
        action = Action.parse(text)
        for observe in (recorder.begin, recorder.ready, recorder.end):
            observe(action)
    recorder.end_step(4, 1, lambda: [BOUNDARIES])
    (times,) = recorder.times()
    first, second = times.rank.actions
    assert (times.number, times.microbatches) == (4, 1)
    assert first.start_ns < first.ready_ns < first.end_ns < second.start_ns
    assert second.start_ns == second.ready_ns < second.end_ns < times.rank.end_ns


def test_a_step_that_failed_leaves_nothing() -> None:
    recorder = ActionRecorder(torch.device("cpu"))
    recorder.begin_step()
    recorder.begin(Action.parse("0F0"))
    recorder.begin_step()
    recorder.end_step(1, 1, lambda: [BOUNDARIES])
    (times,) = recorder.times()
    assert times.rank.actions == ()
