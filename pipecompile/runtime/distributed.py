"""The runtime under torchrun, on torch.distributed.pipelining.

This is the only module that knows torch's private names there. torch moves the tensors and walks
through the list of actions. The stages are our own, and the list is the schedule that was simulated
and checked:

    schedule row        0F0      0SEND_F0   0B0             0R0
    action of torch     FORWARD  SEND_F     FULL_BACKWARD   UNSHARD
    method that runs    forward_one_chunk   backward_one_chunk   recompute_one_chunk

The shapes at boundaries are given, because torch's inference of them would run a step on
uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.runtime.gradients import divide_gradients
from pipecompile.runtime.stage import BackwardParts, EagerStage, SavedForward

__all__ = ["BoundaryShape", "DistributedPipeline", "tie_groups"]

# torch has no recompute action. UNSHARD stands for it: stages here are not sharded, and it is one
# of the kinds for which torch lets a function be registered.
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


class BoundaryShape(tuple[tuple[int, ...], torch.dtype, bool]):
    """Shape and type of one tensor that crosses a boundary, and whether it has a gradient."""

    __slots__ = ()

    def example(self) -> Tensor:
        """Return a tensor of this shape without memory."""
        shape, dtype, has_gradient = self
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=has_gradient)


Ties = Sequence[tuple[Tensor, dist.ProcessGroup]]
"""Tied parameters of a rank, each with the ranks over which its gradient is summed."""


def tie_groups(
    stages_of: Mapping[str, Sequence[int]], placement: Sequence[int]
) -> dict[str, dist.ProcessGroup]:
    """Return for each tied parameter the process group of the ranks that hold it.

    Parameters that only one rank holds have none. Every rank must call this with the same
    arguments, since ranks create process groups together.
    """
    ranks_of = {
        name: tuple(sorted({placement[stage] for stage in stages}))
        for name, stages in stages_of.items()
    }
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted(set(ranks_of.values())):
        if len(ranks) > 1:
            groups[ranks] = dist.new_group(list(ranks))
    return {name: groups[ranks] for name, ranks in ranks_of.items() if ranks in groups}


class _TorchStage(PipelineStage):
    """The interface of torch's runtime to an `EagerStage`.

    Names without underscore that begin with `forward_`, `backward_` … are those that torch calls.
    """

    def __init__(
        self,
        core: EagerStage,
        index: int,
        count: int,
        device: torch.device,
        inputs: Sequence[BoundaryShape],
        outputs: Sequence[BoundaryShape],
    ) -> None:
        super().__init__(
            core.module,
            index,
            count,
            device,
            input_args=tuple(shape.example() for shape in inputs),
            output_args=tuple(shape.example() for shape in outputs),
        )
        self._core = core
        self._saved: dict[int, SavedForward] = {}
        self._parts: dict[int, BackwardParts] = {}
        self.stream_keys: Sequence[StreamKey] = ()
        self.targets: Sequence[Any] = ()
        self.recomputed: frozenset[int] = frozenset()
        self.results: dict[int, tuple[Tensor, ...]] = {}

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        for table in (self._saved, self._parts, self.results):
            table.clear()

    def _is_local(self, stage: int) -> bool:
        return bool(self.stage_index_to_group_rank[stage] == self.group_rank)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        # Stages of one rank hand tensors over without a message: torch need not allocate for it.
        if not self.is_first and self._is_local(self.stage_index - 1):
            for receive_infos in self.args_recv_info.values():
                _without_buffers(receive_infos)

    def _create_grad_recv_info(self, act_send_info: dict[int, list[Any]]) -> tuple[Any, ...]:
        receive_infos = super()._create_grad_recv_info(act_send_info)
        if not self.is_last and self._is_local(self.stage_index + 1):
            _without_buffers(receive_infos)
        return receive_infos

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        received = args
        if not self.is_first:
            received = self._received(self.args_recv_info[fwd_chunk_id], self.stage_index - 1)
        stream_key = self.stream_keys[fwd_chunk_id]
        if self.has_backward:
            outputs, self._saved[fwd_chunk_id] = self._core.forward(
                received,
                stream_key,
                self.targets[fwd_chunk_id],
                recompute=fwd_chunk_id in self.recomputed,
            )
        else:
            outputs = self._core.evaluate(received, stream_key)
        # torch sends from this table what the next stage receives.
        self.fwd_cache[fwd_chunk_id] = (outputs, [])
        if self.is_last:
            self.results[fwd_chunk_id] = outputs
        return outputs[0] if self.is_last and self.has_backward else outputs

    def recompute_one_chunk(self, microbatch: int) -> None:
        """Recompute a microbatch before its backward; called for UNSHARD."""
        self._core.recompute(self._saved[microbatch])

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self.fwd_cache.pop(bwd_chunk_id)
        received: tuple[Any, ...] = ()
        if not self.is_last:
            received = self._received(self.grad_recv_info[bwd_chunk_id], self.stage_index + 1)
        # What was saved is popped within the call. No variable here holds it, so it is freed before
        # `_own_storage` copies gradients.
        if full_backward:
            gradients = self._core.backward(self._saved.pop(bwd_chunk_id), received, {})
        else:
            gradients, self._parts[bwd_chunk_id] = self._core.backward_input(
                self._saved.pop(bwd_chunk_id), received
            )
        # Stage 0 sends nothing back. The list is filled in place, so that each gradient is freed as
        # soon as its copy is there.
        for index, gradient in enumerate(gradients):
            if self.is_first or gradient is None:
                gradients[index] = None
            else:
                gradients[index] = _own_storage(gradient)
        self.bwd_cache[bwd_chunk_id] = () if self.is_first else tuple(gradients)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._core.backward_weight(self._parts.pop(bwd_chunk_id), {})

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: all stages of a rank are reduced together, at the end of the step."""

    def _received(self, receive_infos: Sequence[Any], source: int) -> tuple[Any, ...]:
        """Return the tensors from stage `source`; None for a gradient that nobody sends."""
        tensors = tuple(info.buffer for info in receive_infos)
        if self._is_local(source):
            _without_buffers(receive_infos)
        return tensors


def _own_storage(gradient: Tensor) -> Tensor:
    """Return the gradient contiguous and not as a part of a larger storage, which it would keep."""
    contiguous = gradient.contiguous()
    if contiguous.untyped_storage().nbytes() == contiguous.nbytes:
        return contiguous
    return contiguous.clone()


def _without_buffers(receive_infos: Iterable[Any]) -> None:
    """Drop the receive buffers for tensors of the same rank, which are handed over themselves."""
    for info in receive_infos:
        info.buffer = None


class DistributedPipeline:
    """The stages of this rank; they perform schedules with the other ranks of the process group.

    `shapes[s]` are the tensors that enter stage s, for stage 0 the model's inputs, and `results`
    those that the last stage returns. All ranks list their `ties` in the same order.
    """

    def __init__(
        self,
        stages: Mapping[int, EagerStage],
        device: torch.device,
        shapes: Sequence[Sequence[BoundaryShape]],
        results: Sequence[BoundaryShape],
        ties: Ties,
    ) -> None:
        self._count = len(shapes)
        self._stages = dict(stages)
        self._device = device
        self._boundaries = [*shapes, results]
        self._ties = ties
        # A parameter that several stages of this rank hold is divided once.
        self._parameters = list(
            dict.fromkeys(p for stage in stages.values() for p in stage.module.parameters())
        )
        self._prepared: dict[Schedule, tuple[_PipelineScheduleRuntime, list[_TorchStage]]] = {}

    def run(
        self,
        schedule: Schedule,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        *,
        seed: int,
        step: int,
    ) -> list[tuple[Tensor, ...]] | None:
        """Perform this rank's row of `schedule`.

        On the rank of the last stage, return the results of that stage for each microbatch; on
        other ranks, return None. Random numbers are drawn from streams of `seed` and `step`.
        """
        has_backward = any(a.kind not in (Kind.FORWARD, *_TRANSFERS) for _, a in schedule)
        runtime, stages = self._prepare(schedule, has_backward)
        count = schedule.microbatches
        for stage in stages:
            stage.has_backward = has_backward
            stage.clear_runtime_states()
            stage.stream_keys = [StreamKey(seed, step, microbatch) for microbatch in range(count)]
            stage.targets = targets
            stage.recomputed = _recomputed_microbatches(schedule, stage.stage_index)
        with torch.set_grad_enabled(has_backward):
            runtime._step_microbatches(
                [tuple(row) for row in inputs], None, [None] * count, None, False
            )
        if has_backward:
            self._reduce(count)
        results = [[stage.results[j] for j in range(count)] for stage in stages if stage.is_last]
        return results[0] if results else None

    def _reduce(self, microbatches: int) -> None:
        """Sum the gradients of tied parameters over their ranks and divide all by `microbatches`.

        This comes at the end of the step. A rank that sums earlier could wait for ever for a rank
        that itself waits for a message of the first one.
        """
        for parameter, group in self._ties:
            if parameter.grad is None:  # every rank of the group must take part in the sum
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
        divide_gradients(self._parameters, microbatches)

    def _prepare(
        self, schedule: Schedule, has_backward: bool
    ) -> tuple[_PipelineScheduleRuntime, list[_TorchStage]]:
        """Return torch's runtime for a schedule, and its stages; they are created only once."""
        if schedule not in self._prepared:
            stages = [self._torch_stage(index) for index in sorted(self._stages)]
            runtime = _PipelineScheduleRuntime(
                stages,
                schedule.microbatches,
                loss_fn=_loss_of_last_stage if has_backward else None,
                scale_grads=False,
            )
            runtime.register_custom_function(_ComputationType.UNSHARD, _recompute)
            # `Any`, because torch declares None for an item in one of the two uses below.
            rows: dict[int, list[Any]] = {
                rank: [_translate(action) for action in row]
                for rank, row in enumerate(schedule.rows)
            }
            if has_backward:
                runtime._prepare_schedule_with_comms(rows, format="compute_comms")
            else:
                # That call sets the placement and validates the rows, and its validation requires
                # backwards. An evaluation has none.
                runtime.pipeline_order_with_comms = rows
                for stage in stages:
                    stage.stage_index_to_group_rank = dict(enumerate(schedule.placement))
            self._prepared[schedule] = runtime, stages
        return self._prepared[schedule]

    def _torch_stage(self, index: int) -> _TorchStage:
        return _TorchStage(
            self._stages[index],
            index,
            self._count,
            self._device,
            self._boundaries[index],
            self._boundaries[index + 1],
        )


_TRANSFERS = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)


def _recomputed_microbatches(schedule: Schedule, stage: int) -> frozenset[int]:
    """Return the microbatches that `stage` recomputes."""
    return frozenset(
        action.microbatch
        for _, action in schedule
        if action.kind is Kind.RECOMPUTE and action.stage == stage and action.microbatch is not None
    )


def _translate(action: Action) -> _Action:
    return _Action(action.stage, KINDS[action.kind], action.microbatch)


def _loss_of_last_stage(output: Tensor, target: None) -> Tensor:
    """Return the output of the last stage, which is the loss already."""
    return output


def _recompute(action: _Action, ctx: Any) -> None:
    """Perform a recompute action, which torch knows as UNSHARD."""
    stages = {stage.stage_index: stage for stage in ctx.schedule_ref._stages}
    stage = stages[action.stage_index]
    stage.recompute_one_chunk(action.microbatch_index)
