"""What workers do in the test of what a rank holds after each of its actions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from pipecompile.api.compilation import pipecompile
from pipecompile.ir.schedule import COMPUTE, Action
from pipecompile.memory_model.rank import memory_of_actions

WIDTH, ROWS = 192, 96
SCALARS = 4096  # bytes: losses, digests, flags
LATE = 0.01  # seconds for each action, of which others take less than a tenth
TRIALS = 5  # the profiler loses events on a busy machine


class _Marks:
    """An observer that marks in the profile where each action begins, once its message is there.

    It may make a rank late, so that all messages are there before it comes to them.
    """

    def __init__(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds

    def begin_step(self) -> None:
        """A step begins."""

    def end_step(self, *_: Any) -> None:
        """It is over."""

    def begin(self, action: Action) -> None:
        """`action` may have to wait."""
        time.sleep(self._delay_seconds)

    def ready(self, action: Action) -> None:
        """`action` computes from here on."""
        if action.kind in COMPUTE:
            with record_function(f"at {action}"):
                pass

    def end(self, action: Action) -> None:
        """`action` is done."""


def held_at_actions(
    schedule: str, microbatches: int, recompute: str, late: int | None = None, **shape: Any
) -> str:
    """Compare what this rank holds when each action begins with what the plan says, both beyond
    what it holds at its first action. Return what differs, "" if nothing does. The rank `late` is
    slow. `shape` are the pipeline's stages and ranks, two of them unless given.
    """
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    batch = torch.randn(ROWS * microbatches, WIDTH)
    pipeline = pipecompile(
        nn.Sequential(*layers),
        batch,
        **(shape or {"ranks": 2}),
        microbatches=microbatches,
        schedule=schedule,
        recompute=recompute,
        loss_fn=nn.functional.mse_loss,
        sample_target=torch.zeros_like(batch),
        costs="flops",
        self_check=False,
    )
    marks = _Marks(LATE if dist.get_rank() == late else 0)
    pipeline._recorders.append(marks)  # type: ignore[arg-type]
    row = pipeline.plan.schedule.compute[dist.get_rank()]
    moments = memory_of_actions(pipeline.plan, dist.get_rank())
    computing = [memory for snapshot, memory in moments if snapshot.kind in COMPUTE]
    held = [memory.total.expected - memory.workspace.expected for memory in computing]
    expected = [each - held[0] for each in held]
    pipeline.step(batch, torch.zeros_like(batch))
    for _ in range(TRIALS):
        pipeline.zero_grad()
        measured = _measured(lambda: pipeline.step(batch, torch.zeros_like(batch)), row)
        wrong = [
            f"{action}: {own} bytes, but {wanted} in the plan"
            for action, own, wanted in zip(row, measured, expected, strict=True)
            if abs(own - wanted) > SCALARS
        ]
        flag = torch.tensor(len(wrong))
        dist.all_reduce(flag)
        if not flag:
            break
    return "\n".join(wrong)


def _measured(step: Any, row: Sequence[Action]) -> list[int]:
    """What lives where each action begins, beyond what lives at the first one."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    names = {f"at {action}": index for index, action in enumerate(row)}
    lives = accumulate(event.nbytes() if event.name() == "[memory]" else 0 for event in events)
    at = [0] * len(row)
    for event, live in zip(events, lives, strict=True):
        if event.name() in names:
            at[names[event.name()]] = live
    return [live - at[0] for live in at]
