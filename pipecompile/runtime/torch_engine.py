"""The second engine: torch.distributed.pipelining walks through the actions of a rank.

This is the only module that knows torch's private names there. torch takes the list of actions,
which is the schedule that was simulated and checked, and calls back for each of them; rank_step.py
performs it:

    schedule row        0F0      0SEND_F0   0B0             0R0
    action of torch     FORWARD  SEND_F     FULL_BACKWARD   UNSHARD
    performed by        RankStep, with the messages of messages.py

torch's own stages would infer shapes at boundaries by a step on uninitialised memory. A step of the
engine of our own, a loop over the same actions, takes less: torch notes each action for its
profiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.runtime.rank_step import RankStep
from pipecompile.runtime.stage import EagerStage

__all__ = ["TorchEngine"]

# torch has no recompute action. UNSHARD stands for it: torch only hands it on.
KINDS = {
    Kind.FORWARD: _ComputationType.FORWARD,
    Kind.BACKWARD: _ComputationType.FULL_BACKWARD,
    Kind.BACKWARD_INPUT: _ComputationType.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT: _ComputationType.BACKWARD_WEIGHT,
    Kind.RECOMPUTE: _ComputationType.UNSHARD,
    Kind.SEND_FORWARD: _ComputationType.SEND_F,
    Kind.RECEIVE_FORWARD: _ComputationType.RECV_F,
    Kind.SEND_BACKWARD: _ComputationType.SEND_B,
    Kind.RECEIVE_BACKWARD: _ComputationType.RECV_B,
    Kind.REDUCE: _ComputationType.REDUCE_GRAD,
}
OWN_KINDS = {theirs: ours for ours, theirs in KINDS.items()}


class _ActionWalk(_PipelineScheduleRuntime):
    """torch's walk through the actions of a rank, without what it prepares for its own stages."""

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Neither infer shapes nor make buffers."""


class TorchEngine:
    """Performs schedules of the `stages` of this rank, of `count` in all, by torch's runtime."""

    def __init__(
        self,
        stages: Mapping[int, EagerStage],
        count: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._stages = stages
        self._count = count
        self._device = device
        self._group = group
        self._walks: dict[Schedule, _ActionWalk] = {}

    def perform(self, schedule: Schedule, rank_step: RankStep) -> None:
        """Let `rank_step` perform every action of this rank's row."""

        def perform(action: _Action, context: Any) -> None:
            kind = OWN_KINDS[action.computation_type]
            rank_step.perform(Action(action.stage_index, kind, action.microbatch_index))

        walk = self._walk(schedule)
        # The method to register a function does not take the kinds that send and receive.
        walk._comp_type_to_function_map = dict.fromkeys(OWN_KINDS, perform)
        walk._step_microbatches([()] * schedule.microbatches)

    def _walk(self, schedule: Schedule) -> _ActionWalk:
        """Return torch's runtime for a schedule, which is created only once."""
        if schedule not in self._walks:
            stages = [
                PipelineStage(stage.module, index, self._count, self._device, group=self._group)
                for index, stage in sorted(self._stages.items())
            ]
            walk = _ActionWalk(  # type: ignore[no-untyped-call]
                stages, schedule.microbatches, scale_grads=False
            )
            # torch's own way to set the rows validates what was validated already, and refuses rows
            # without backwards.
            walk.pipeline_order_with_comms = {
                rank: [_translate(action) for action in row]
                for rank, row in enumerate(schedule.rows)
            }
            self._walks[schedule] = walk
        return self._walks[schedule]


def _translate(action: Action) -> _Action:
    return _Action(action.stage, KINDS[action.kind], action.microbatch)
