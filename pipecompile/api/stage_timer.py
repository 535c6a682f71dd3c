"""What the stages of a plan take on the devices that will run them.

Each rank measures its own stages, all ranks at the same time, so that ranks which share memory or cores slow each other
down as they do in a step. `stage_correction` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pipecompile.api.capture import Captured
from pipecompile.api.program import Program
from pipecompile.api.target import Target, model_loss
from pipecompile.codegen.stages import StageModule
from pipecompile.cost_models.placement import lent
from pipecompile.errors import InputError, PipecompileError
from pipecompile.graph.model_state import named_state
from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Kind
from pipecompile.ir.serialization import decode, encode
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.profiling.scaling import Times
from pipecompile.runtime import world
from pipecompile.runtime.gradients import fresh_gradients
from pipecompile.runtime.microbatch import split
from pipecompile.runtime.stage import EagerStage, Loss
from pipecompile.runtime.timing import Work, halved, timed, whole
from pipecompile.schedule.dependencies import compute_dependencies, dependency_order
from pipecompile.schedule.named import MAY_SPLIT
from pipecompile.schedule.stages import problem_of_plan

__all__ = ["DoesNotFitError", "StageTimer"]

FRAMES = 9


@dataclass(frozen=True)
class StageTimer:
    """Measures the stages of plans for one captured model on `device`.

    Rank 0 calls it, and `dismiss` when it is done; the others `assist` until then.
    """

    target: Target
    captured: Captured
    device: torch.device

    def __call__(self, plan: Plan) -> Sequence[Times]:
        """The times of the stages of `plan`, each measured by the rank that it lies on."""
        world.broadcast(encode(plan))
        return self._gathered(plan)

    def dismiss(self) -> None:
        """Lets the other ranks go on."""
        world.broadcast(b"")

    def assist(self) -> None:
        """Measures what rank 0 asks for."""
        while message := world.broadcast(b""):
            with suppress(DoesNotFitError):  # rank 0 goes on without these times
                self._gathered(decode(message, Plan, origin="rank 0"))

    def _gathered(self, plan: Plan) -> Sequence[Times]:
        own: dict[int, Times] | Exception
        failure: Exception | None = None
        try:
            own = self._own(plan)
        except torch.OutOfMemoryError:
            own = DoesNotFitError(f"the stages of rank {world.rank()} do not fit on {self.device}")
        except Exception as error:  # the others wait for an answer, whatever it is
            own = PipecompileError(
                f"rank {world.rank()} could not measure its stages: {type(error).__name__}: {error}"
            )
            failure = error
        parts = world.gathered(own)
        errors = [part for part in parts if isinstance(part, Exception)]
        if errors:  # on every rank alike; that a stage does not fit is the least of them
            raise failure or min(errors, key=lambda error: isinstance(error, DoesNotFitError))
        times = {
            index: each for part in parts if isinstance(part, dict) for index, each in part.items()
        }
        return [times[index] for index in range(plan.k)]

    def _own(self, plan: Plan) -> dict[int, Times]:
        """The stages of this rank: together, as they share its caches, or one by one if the model lies elsewhere."""
        mine = [
            index
            for index, rank in enumerate(plan.schedule.placement)
            if rank % world.size() == world.rank()
        ]
        program, times = self._program(plan), dict[int, Times]()
        with program.mode():
            works = self._works(plan, program, mine)
            for group in (
                [mine]
                if self.device.type == self.target.device.type
                else [[index] for index in mine]
            ):
                with self._at_hand(*(program.stages[index] for index in group)):
                    times |= _timed(plan, {index: works.pop(index) for index in group}, self.device)
        if mine:
            last = dict(times[mine[-1]])
            times[mine[-1]] = {
                **last,
                Kind.REDUCE: last[Kind.REDUCE] + self._frame_ns(plan, program),
            }
        return times

    def _frame_ns(self, plan: Plan, program: Program) -> int:
        """What a step does of its own before the first action and after the last one, once a rank."""
        times = []
        for _ in range(FRAMES):
            start = time.perf_counter_ns()
            split(self.target.targets, plan.microbatches)
            split((self.target.call.args, self.target.call.kwargs), plan.microbatches)
            with program.mode(), fresh_gradients(self.target.model.parameters()):
                pass
            times.append(time.perf_counter_ns() - start)
        return round(median(times))

    def _works(self, plan: Plan, program: Program, mine: Sequence[int]) -> dict[int, Work]:
        """What these stages work on: what comes out of the stages before, for a microbatch."""
        values, works, targets = self._inputs, dict[int, Work](), self._targets(plan)
        for stage in program.stages[: max(mine, default=-1) + 1]:
            run = EagerStage(
                stage.module,
                gradient_inputs=stage.gradient_inputs,
                buffers=stage.buffers,
                random=stage.random,
            )
            with self._at_hand(stage):
                outputs = run.evaluate(values, StreamKey(0, 0, 0))
            if stage.index in mine:
                is_last = stage.index == plan.k - 1
                run.loss = self._loss(program, outputs) if is_last else None
                wanted = [edge.gradient for edge in stage.outputs] or [
                    value.is_floating_point() for value in outputs
                ]
                seeds = [
                    torch.ones_like(v) if grad else None
                    for v, grad in zip(outputs, wanted, strict=True)
                ]
                inputs = [
                    tuple(value.clone() for value in values) for _ in range(plan.microbatches)
                ]
                works[stage.index] = Work(run, inputs, targets, seeds)
            values = outputs
        return works

    def _at_hand(self, *stages: StageModule) -> AbstractContextManager[None]:
        """The stages' state on the device."""
        state = [value for stage in stages for _, value in named_state(stage.module)]
        return lent(state, self.device, [buffer for stage in stages for buffer in stage.buffers])

    def _program(self, plan: Plan) -> Program:
        """The plan's stages, cut out of a graph of their own: cutting rewrites it."""
        module = self.captured.capture.instantiate(self.captured.sample)
        apply_passes(module.graph, [Group(plan.options.groups)])
        return Program(self.captured.capture, module, plan.assignment, plan.regions, plan.savings)

    @cached_property
    def _inputs(self) -> Sequence[Tensor]:
        tensors = self.captured.capture.inputs.flatten(self.captured.sample)
        return tuple(tensor.to(self.device) for tensor in tensors)

    def _targets(self, plan: Plan) -> list[Any]:
        moved = torch.utils._pytree.tree_map_only(
            Tensor, lambda value: value.to(self.device), self.target.targets
        )
        return split(moved, plan.microbatches)

    def _loss(self, program: Program, outputs: Sequence[Tensor]) -> Loss | None:
        """The loss of the last stage; None if it is not known, or wants a target that is not."""
        if self.target.loss_fn is None:
            try:
                model_loss(program.outputs.unflatten(outputs), None)
            except InputError:
                return None
        elif self.target.targets is None:
            return None
        return lambda values, given: self.target.trained_by(
            program.outputs.unflatten(values), given
        )


def _timed(plan: Plan, works: Mapping[int, Work], device: torch.device) -> dict[int, Times]:
    """In the order of the plan with whole backwards; again in two halves if its schedule has any."""
    needs = compute_dependencies(problem_of_plan(plan), plan.schedule)
    order = [
        action for _, action in dependency_order(plan.schedule.compute, needs) if action.stage in works
    ]
    times = timed(works, whole(order), device)
    if plan.options.schedule not in MAY_SPLIT:
        return dict(times)
    halves = timed(works, halved(order), device)
    return {index: {**halves[index], **times[index]} for index in works}


class DoesNotFitError(Exception):
    """A device has not the memory to run its stages; the message says which."""
