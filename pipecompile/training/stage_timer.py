"""What the stages of a plan take on the devices that will run them.

Each rank measures its own stages, all ranks at the same time, so that ranks which share memory or
cores slow each other down as they do in a step. `profiling/stage_correction.py` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipecompile.codegen.stages import StageModule
from pipecompile.cost_models.device_transfer import moved_to
from pipecompile.errors import InputError, PipecompileError
from pipecompile.frontend.target import Target, model_loss
from pipecompile.frontend.target_capture import Captured
from pipecompile.graph.loss_module import hold_loss
from pipecompile.graph.model_state import named_state
from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.action_order import dependency_order
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Kind
from pipecompile.ir.serialization import decode, encode
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.profiling.scaled_costs import Times
from pipecompile.profiling.stage_correction import DoesNotFitError
from pipecompile.runtime import world
from pipecompile.runtime.gradients import fresh_gradients
from pipecompile.runtime.stage import EagerStage, Loss
from pipecompile.runtime.stage_loss import StageLoss
from pipecompile.runtime.stage_times import (
    StageWorkload,
    measure_stages,
    with_split_backwards,
    with_whole_backwards,
)
from pipecompile.schedule.dependencies import compute_dependencies
from pipecompile.schedule.named_orders import MAY_SPLIT
from pipecompile.schedule.stages import problem_of_plan
from pipecompile.training.program import Program
from pipecompile.training.user_loss import loss_of

__all__ = ["StageTimer"]

OVERHEAD_REPEATS = 9


@dataclass(frozen=True)
class StageTimer:
    """Measures the stages of plans for one captured model on `device`.

    Rank 0 calls it, and `dismiss` when it is done; the others `assist` until then.
    """

    target: Target
    captured: Captured
    device: torch.device

    def __call__(self, plan: Plan) -> Sequence[Times]:
        """Return the times of the stages of `plan`, each measured by the rank that it lies on."""
        world.broadcast(encode(plan))
        return self._gathered(plan)

    def dismiss(self) -> None:
        """Let the other ranks go on."""
        world.broadcast(b"")

    def assist(self) -> None:
        """Measure the stages of the plans that rank 0 sends, until it dismisses this rank."""
        while message := world.broadcast(b""):
            with suppress(DoesNotFitError):  # rank 0 goes on without these times
                self._gathered(decode(message, Plan, origin="rank 0"))

    def _gathered(self, plan: Plan) -> Sequence[Times]:
        """Return the times of all stages; if a rank fails, the same error on every rank."""
        own: dict[int, Times] | Exception
        failure: Exception | None = None
        try:
            own = self._own(plan)
        except torch.OutOfMemoryError:
            own = DoesNotFitError(f"the stages of rank {world.rank()} do not fit on {self.device}")
        except Exception as error:  # raised below: the other ranks wait for an answer first
            own = PipecompileError(
                f"rank {world.rank()} could not measure its stages: {type(error).__name__}: {error}"
            )
            failure = error
        parts = world.gather(own)
        errors = [part for part in parts if isinstance(part, Exception)]
        if errors:
            # Planning goes on if a stage does not fit, so any other error is raised before that
            # one.
            raise failure or min(errors, key=lambda error: isinstance(error, DoesNotFitError))
        times = dict[int, Times]()
        for part in parts:
            if isinstance(part, dict):
                times |= part
        return [times[index] for index in range(plan.k)]

    def _own(self, plan: Plan) -> dict[int, Times]:
        """Return the times of the stages of this rank.

        They are measured together, because they share its caches; one by one if the model lies on
        another device, which then need not have room for all of them.
        """
        mine = [
            index
            for index, rank in enumerate(plan.schedule.placement)
            # A plan for 4 ranks may be made by 2 processes, or by one: then they share its ranks.
            if rank % world.size() == world.rank()
        ]
        is_on_device = self.device.type == self.target.device.type
        program, times = self._program(plan), dict[int, Times]()
        with program.mode():
            works = self._works(plan, program, mine)
            for group in [mine] if is_on_device else [[index] for index in mine]:
                with self._state_on_device(*(program.stages[index] for index in group)):
                    times |= _timed(plan, {index: works.pop(index) for index in group}, self.device)
        if mine:
            last = times[mine[-1]]
            # What a rank takes once a step is in one of its stages, so that it counts once.
            reduce_ns = last[Kind.REDUCE] + self._step_overhead_ns(plan, program)
            times[mine[-1]] = {**last, Kind.REDUCE: reduce_ns}
        return times

    def _step_overhead_ns(self, plan: Plan, program: Program) -> int:
        """Return what a step takes on a rank before the first action and after the last one."""
        times = []
        for _ in range(OVERHEAD_REPEATS):
            start = time.perf_counter_ns()
            self.target.cut_targets(plan.microbatches)
            self.target.microbatches(plan.microbatches)
            with program.mode(), fresh_gradients(program.parameters):
                pass
            times.append(time.perf_counter_ns() - start)
        return round(median(times))

    def _works(self, plan: Plan, program: Program, mine: Sequence[int]) -> dict[int, StageWorkload]:
        """Return the work of these stages for one microbatch: their inputs are what the stages
        before them return.
        """
        values, works, targets = self._inputs, dict[int, StageWorkload](), self._targets(plan)
        # A rank runs all stages before its own ones too: their outputs are its inputs.
        for stage in program.stages[: max(mine, default=-1) + 1]:
            run = EagerStage(
                stage.module,
                gradient_inputs=stage.gradient_inputs,
                buffers=stage.buffers,
                random=stage.random,
            )
            with self._state_on_device(stage):
                # As in a step, and not without gradients: hooks may ask for them.
                outputs, _ = run.forward(values, StreamKey(0, 0, 0))
            if stage.index in mine:
                is_last = stage.index == plan.k - 1
                loss = self._loss(program, outputs) if is_last else None
                run.loss = None if loss is None else StageLoss(loss, self.target.loss_module)
                # Copies, since a stage may write to its inputs.
                inputs = [
                    tuple(value.clone() for value in values) for _ in range(plan.microbatches)
                ]
                gradients = [] if run.loss else _output_gradients(stage, outputs)
                works[stage.index] = StageWorkload(run, inputs, targets, gradients)
            values = outputs
        return works

    def _state_on_device(self, *stages: StageModule) -> AbstractContextManager[None]:
        """Keep the stages' state on the device for the block."""
        state = [value for stage in stages for _, value in named_state(stage.module)]
        return moved_to(
            state, self.device, [buffer for stage in stages for buffer in stage.buffers]
        )

    def _program(self, plan: Plan) -> Program:
        """Return the plan's stages, cut out of a copy of the graph, because cutting rewrites it."""
        module = self.captured.capture.instantiate(self.captured.sample)
        apply_passes(module.graph, [Group(plan.options.groups)])
        hold_loss(module, self.target.loss_module)
        return Program(
            self.captured.capture,
            module,
            plan.assignment,
            plan.regions,
            plan.encoded_runs,
            plan.options.batch_norm,
            self.device,
            plan.copied,
        )

    @cached_property
    def _inputs(self) -> Sequence[Tensor]:
        tensors = self.captured.capture.inputs.flatten(self.captured.sample)
        return tuple(tensor.to(self.device) for tensor in tensors)

    def _targets(self, plan: Plan) -> list[Any]:
        return [
            tree_map_only(Tensor, lambda value: value.to(self.device), part)
            for part in self.target.cut_targets(plan.microbatches)
        ]

    def _loss(self, program: Program, outputs: Sequence[Tensor]) -> Loss | None:
        """Return the loss of the last stage; None if there is none, or if it needs a target that is
        not given.
        """
        if self.target.loss_fn is None:
            try:
                model_loss(program.outputs.unflatten(outputs), None)
            except InputError:
                return None
        elif self.target.targets is None:
            return None
        return partial(loss_of, program.outputs, self.target.trained_by)


def _output_gradients(stage: StageModule, outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients of ones for the outputs of a stage that have any, and None for the others.

    The last stage has no edges that say which outputs have one.
    """
    has_gradient = [edge.has_gradient for edge in stage.outputs]
    if not has_gradient:
        has_gradient = [value.is_floating_point() for value in outputs]
    # Times do not depend on the values of gradients.
    pairs = zip(outputs, has_gradient, strict=True)
    return [torch.ones_like(value) if is_needed else None for value, is_needed in pairs]


def _timed(
    plan: Plan, works: Mapping[int, StageWorkload], device: torch.device
) -> dict[int, Times]:
    """Return the times of the stages, run in the order of the plan: with whole backwards, then with
    split ones if it may have any.
    """
    needs = compute_dependencies(problem_of_plan(plan), plan.schedule)
    order = [
        action
        for _, action in dependency_order(plan.schedule.compute, needs)
        if action.stage in works
    ]
    times = measure_stages(works, with_whole_backwards(order), device)
    if plan.options.schedule not in MAY_SPLIT:
        return dict(times)
    # Regions are recomputed in a backward as a whole.
    splits = {index: work for index, work in works.items() if not plan.stages[index].regions}
    order = [action for action in order if action.stage in splits]
    halves = measure_stages(splits, with_split_backwards(order), device) if splits else {}
    return {index: {**halves.get(index, {}), **times[index]} for index in works}
