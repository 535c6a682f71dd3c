"""The schedule on torch.distributed.pipelining: the one place that knows its private names.

torch moves the tensors and walks the list of actions; the stages are ours, and so is the list: it is the one that was
simulated and checked. Metadata is static, since torch's inference runs a real step on uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from pipecompile.runtime.gradients import scale
from pipecompile.runtime.stage import BackwardParts, EagerStage, SavedForward

__all__ = ["DistributedPipeline", "BoundaryShape", "tie_groups"]

# torch has no recompute action. UNSHARD stands for it: it does nothing to stages that are not sharded, and is one of
# the kinds whose meaning may be registered.
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
    """Shape, type, and whether it carries a gradient, of one tensor that crosses a boundary."""

    __slots__ = ()

    def example(self) -> Tensor:
        """A tensor of this shape without memory."""
        shape, dtype, gradient = self
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=gradient)


Ties = Sequence[tuple[Tensor, dist.ProcessGroup]]


def tie_groups(
    stages_of: Mapping[str, Sequence[int]], placement: Sequence[int]
) -> dict[str, dist.ProcessGroup]:
    """A process group for each tied parameter, over the ranks that hold it. Every rank must call it alike."""
    ranks_of = {
        name: tuple(sorted({placement[s] for s in stages})) for name, stages in stages_of.items()
    }
    groups = {
        ranks: dist.new_group(list(ranks))
        for ranks in sorted(set(ranks_of.values()))
        if len(ranks) > 1
    }
    return {name: groups[ranks] for name, ranks in ranks_of.items() if ranks in groups}


class _TorchStage(PipelineStage):
    """Lets torch's runtime talk to one of our stages."""

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
        self._live: dict[int, BackwardParts] = {}
        self.moments: Sequence[StreamKey] = ()
        self.targets: Sequence[Any] = ()
        self.recomputed: frozenset[int] = frozenset()
        self.results: dict[int, tuple[Tensor, ...]] = {}

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        for table in (self._saved, self._live, self.results):
            table.clear()

    def _is_local(self, stage: int) -> bool:
        return bool(self.stage_index_to_group_rank[stage] == self.group_rank)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        if not self.is_first and self._is_local(self.stage_index - 1):
            for notes in self.args_recv_info.values():
                _emptied(notes)

    def _create_grad_recv_info(self, act_send_info: dict[int, list[Any]]) -> tuple[Any, ...]:
        notes = super()._create_grad_recv_info(act_send_info)
        return (
            _emptied(notes) if not self.is_last and self._is_local(self.stage_index + 1) else notes
        )

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        received = (
            args
            if self.is_first
            else self._taken(self.args_recv_info[fwd_chunk_id], self.stage_index - 1)
        )
        moment = self.moments[fwd_chunk_id]
        if self.has_backward:
            outputs, self._saved[fwd_chunk_id] = self._core.forward(
                received,
                moment,
                self.targets[fwd_chunk_id],
                recompute=fwd_chunk_id in self.recomputed,
            )
        else:
            outputs = self._core.evaluate(received, moment)
        self.fwd_cache[fwd_chunk_id] = (outputs, [])
        if self.is_last:
            self.results[fwd_chunk_id] = outputs
        return outputs[0] if self.is_last and self.has_backward else outputs

    def recompute_one_chunk(self, microbatch: int) -> None:
        """The forward once more, before the backward."""
        self._core.recompute(self._saved[microbatch])

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self.fwd_cache.pop(bwd_chunk_id)
        received = (
            ()
            if self.is_last
            else self._taken(self.grad_recv_info[bwd_chunk_id], self.stage_index + 1)
        )
        # Popped as it is given, since what nothing else holds goes before parts of gradients are copied.
        if full_backward:
            gradients = self._core.backward(self._saved.pop(bwd_chunk_id), received, {})
        else:
            gradients, self._live[bwd_chunk_id] = self._core.backward_input(
                self._saved.pop(bwd_chunk_id), received
            )
        # Stage 0 sends nothing back; elsewhere a gradient travels as its tensor did.
        for index, gradient in enumerate(gradients):
            gradients[index] = None if self.is_first or gradient is None else _whole(gradient)
        self.bwd_cache[bwd_chunk_id] = () if self.is_first else tuple(gradients)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._core.backward_weight(self._live.pop(bwd_chunk_id), {})

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: all stages of a rank are reduced together, at the end."""

    def _taken(self, notes: Sequence[Any], source: int) -> tuple[Any, ...]:
        """The tensors that torch received, out of its notes on them; None for a gradient that nobody sends."""
        tensors = tuple(note.buffer for note in notes)
        if self._is_local(source):
            _emptied(notes)
        return tensors


def _whole(gradient: Tensor) -> Tensor:
    """In order, and no part of something larger, which would live as long."""
    ordered = gradient.contiguous()
    return ordered if ordered.untyped_storage().nbytes() == ordered.nbytes else ordered.clone()


def _emptied(notes: Any) -> Any:
    """A stage of the same rank hands its own tensors on: there is nothing to receive into, and nothing to keep."""
    for note in notes:
        note.buffer = None
    return notes


class DistributedPipeline:
    """The stages of this rank, ready to perform schedules with the other ranks of the default process group.

    `shapes[s]` are the tensors that enter stage s (for stage 0 the model's inputs); `results` those the last stage
    gives. `ties` are this rank's tied parameters, each with the group of ranks over which its gradient is summed; all
    ranks give them in one order.
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
        self._ends = [*shapes, results]
        self._build: Callable[[int], _TorchStage] = lambda index: _TorchStage(
            stages[index], index, self._count, device, self._ends[index], self._ends[index + 1]
        )
        self._ties = ties
        # A parameter may lie in several stages of this rank: it counts once.
        self._parameters = list(
            dict.fromkeys(p for stage in stages.values() for p in stage.module.parameters())
        )
        self._local = sorted(stages)
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
        """Performs this rank's row; on the last stage's rank returns what it gave for each microbatch."""
        backward = any(action.kind not in (Kind.FORWARD, *_TRANSFERS) for _, action in schedule)
        runtime, stages = self._prepare(schedule, backward)
        count = schedule.microbatches
        for stage in stages:
            stage.has_backward = backward
            stage.clear_runtime_states()
            stage.moments = [StreamKey(seed, step, microbatch) for microbatch in range(count)]
            stage.targets = targets
            stage.recomputed = frozenset(
                a.microbatch
                for _, a in schedule
                if a.kind is Kind.RECOMPUTE
                and a.stage == stage.stage_index
                and a.microbatch is not None
            )
        with torch.set_grad_enabled(backward):
            runtime._step_microbatches(
                [tuple(row) for row in inputs], None, [None] * count, None, False
            )
        if backward:
            self._reduce(count)
        results = [[stage.results[j] for j in range(count)] for stage in stages if stage.is_last]
        return results[0] if results else None

    def _reduce(self, microbatches: int) -> None:
        """Sums the gradients of tied parameters over their ranks, and divides all by the number of microbatches.

        Not before the end: a rank that sums while another still waits for a message of its would wait for ever.
        """
        for parameter, group in self._ties:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
        scale(self._parameters, microbatches)

    def _prepare(
        self, schedule: Schedule, backward: bool
    ) -> tuple[_PipelineScheduleRuntime, list[_TorchStage]]:
        if schedule not in self._prepared:
            stages = [self._build(index) for index in self._local]
            runtime = _PipelineScheduleRuntime(
                stages,
                schedule.microbatches,
                loss_fn=_given_loss if backward else None,
                scale_grads=False,
            )
            runtime.register_custom_function(_ComputationType.UNSHARD, _recompute)
            rows: dict[int, list[Any]] = {  # torch allows None in the one place, not in the other
                rank: [_translate(action) for action in row]
                for rank, row in enumerate(schedule.rows)
            }
            if backward:
                runtime._prepare_schedule_with_comms(rows, format="compute_comms")
            else:  # torch's validation, all that the call adds beside the placement, knows only backwards
                runtime.pipeline_order_with_comms = rows
                for stage in stages:
                    stage.stage_index_to_group_rank = dict(enumerate(schedule.placement))
            self._prepared[schedule] = runtime, stages
        return self._prepared[schedule]


_TRANSFERS = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)


def _translate(action: Action) -> _Action:
    return _Action(action.stage, KINDS[action.kind], action.microbatch)


def _given_loss(output: Tensor, target: None) -> Tensor:
    """The last stage's output is the loss already."""
    return output


def _recompute(action: _Action, ctx: Any) -> None:
    """What UNSHARD stands for here."""
    (stage,) = (s for s in ctx.schedule_ref._stages if s.stage_index == action.stage_index)
    stage.recompute_one_chunk(action.microbatch_index)
