"""The runtime under torchrun, on torch.distributed.pipelining.

This is the only module that knows torch's private names there. torch walks through the list of
actions, which is the schedule that was simulated and checked, and calls back for each of them;
rank_step.py performs it:

    schedule row        0F0      0SEND_F0   0B0             0R0
    action of torch     FORWARD  SEND_F     FULL_BACKWARD   UNSHARD
    performed by        RankStep, with the messages of messages.py

torch's own stages would infer shapes at boundaries by a step on uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Schedule
from pipecompile.runtime.agreement import Agreement
from pipecompile.runtime.messages import Boundaries, Messages
from pipecompile.runtime.rank_step import (
    ActionObserver,
    Minibatch,
    RankStep,
    Reducer,
    StepResult,
    recomputed_microbatches,
)
from pipecompile.runtime.stage import EagerStage
from pipecompile.runtime.watch import StepWatch

__all__ = ["DistributedPipeline", "SizedStages"]

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


class SizedStages(NamedTuple):
    """The stages of this rank for one size of microbatches, and what enters each stage of all."""

    stages: Mapping[int, EagerStage]
    boundaries: Boundaries


class DistributedPipeline:
    """The stages of this rank; they perform schedules with the other ranks of the pipeline.

    `boundaries[s]` are the tensors that enter stage s, for stage 0 the model's inputs. `group` is
    the process group of the pipeline, None for all ranks.
    """

    def __init__(
        self,
        stages: Mapping[int, EagerStage],
        device: torch.device,
        boundaries: Boundaries,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._stages = dict(stages)
        self._device = device
        self._boundaries = boundaries
        self._group = group
        self._walks: dict[Schedule, _ActionWalk] = {}
        self._messages_by_placement: dict[tuple[int, ...], Messages] = {}

    def run(
        self,
        schedule: Schedule,
        batch: Minibatch,
        agreement: Agreement,
        watch: StepWatch,
        *,
        reducer: Reducer | None = None,
        observers: Sequence[ActionObserver] = (),
        with_loss: bool = False,
        remainder: SizedStages | None = None,
    ) -> StepResult | None:
        """Perform this rank's row of `schedule`, with no message before the ranks' `agreement`.

        Return what the last stage returns; None on ranks without it. `reducer` is told when the
        gradients of a stage are complete. A schedule without backwards returns the model's output
        tensors, or if it is `with_loss` losses. `remainder` are the stages for the last microbatch
        if that is smaller than the others.
        """
        runtime, messages = self._walk(schedule), self._messages(schedule)
        last = schedule.microbatches - 1
        messages.begin(
            watch.deadline,
            agreement,
            None if remainder is None else (last, remainder.boundaries),
        )
        row = schedule.rows[runtime.rank]
        trains = any(action.kind in BACKWARDS for action in row)
        rank_step = RankStep(
            self._stages,
            len(self._boundaries),
            batch,
            recomputed_microbatches(row),
            messages=messages,
            reducer=reducer,
            observers=[watch, *observers],
            trains=trains,
            with_loss=with_loss,
            remainder=None if remainder is None else remainder.stages,
        )
        _perform_by(runtime, rank_step)
        with torch.set_grad_enabled(trains):
            runtime._step_microbatches([()] * schedule.microbatches)
        watch.actions_are_done()
        rank_step.finish()
        return rank_step.result()

    def _messages(self, schedule: Schedule) -> Messages:
        """Return the messages between the ranks of a placement."""
        if schedule.placement not in self._messages_by_placement:
            group = self._group or dist.group.WORLD
            assert group is not None
            peers = [dist.get_global_rank(group, rank) for rank in schedule.placement]
            messages = Messages(self._boundaries, peers, self._device, self._group)
            self._messages_by_placement[schedule.placement] = messages
        return self._messages_by_placement[schedule.placement]

    def _walk(self, schedule: Schedule) -> _ActionWalk:
        """Return torch's runtime for a schedule, which is created only once."""
        if schedule not in self._walks:
            stages = [
                PipelineStage(
                    stage.module, index, len(self._boundaries), self._device, group=self._group
                )
                for index, stage in sorted(self._stages.items())
            ]
            runtime = _ActionWalk(  # type: ignore[no-untyped-call]
                stages, schedule.microbatches, scale_grads=False
            )
            # torch's own way to set the rows validates what was validated already, and refuses rows
            # without backwards.
            runtime.pipeline_order_with_comms = {
                rank: [_translate(action) for action in row]
                for rank, row in enumerate(schedule.rows)
            }
            self._walks[schedule] = runtime
        return self._walks[schedule]


def _perform_by(runtime: _ActionWalk, rank_step: RankStep) -> None:
    """Let `rank_step` perform every action that torch walks to."""

    def perform(action: _Action, context: Any) -> None:
        kind = OWN_KINDS[action.computation_type]
        rank_step.perform(Action(action.stage_index, kind, action.microbatch_index))

    # The method to register a function does not take the kinds that send and receive.
    runtime._comp_type_to_function_map = dict.fromkeys(OWN_KINDS, perform)


def _translate(action: Action) -> _Action:
    return _Action(action.stage, KINDS[action.kind], action.microbatch)
