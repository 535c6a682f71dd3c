"""A compiled pipeline: the plan, its stages on this process, and the step that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from pipecompile.api.capture import Captured
from pipecompile.api.program import Program, Programs
from pipecompile.api.target import LossFunction, Target
from pipecompile.codegen.stages import StageModule
from pipecompile.errors import InputError, StalePlanError
from pipecompile.frontend.signature import arguments_of
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Schedule, Timeline
from pipecompile.runtime import local, world
from pipecompile.runtime.distributed import BoundaryShape, DistributedPipeline, tie_groups
from pipecompile.runtime.gradients import divide_gradients, fresh_gradients
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.microbatch import count_microbatches, merge, split
from pipecompile.runtime.stage import EagerStage, Loss
from pipecompile.schedule.plan_orders import PlanOrders
from pipecompile.schedule.simulator import simulate_plan

__all__ = ["Pipeline", "check_world"]


class Pipeline:
    """A model cut into stages, ready to train.

    In one process all stages run on the model's device. Under torchrun (or in any initialised
    process group) each rank runs the stages that the plan gives it, and only those move to its
    device.

    `plan` is the plan, `seed` and `steps` are what random nodes draw from.
    """

    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        target: Target,
        *,
        seed: int = 0,
        self_check: bool = True,
    ) -> None:
        self.plan = plan
        self.seed = seed
        # Random nodes draw from it too: set it when training resumes from a checkpoint.
        self.steps = 0
        self._target = target
        self._share = LocalShare(plan)
        self._orders = PlanOrders(plan)
        self._programs = Programs(plan, captured, target, self._share, self_check=self_check)
        self._device = _local_device(target) if self._share.is_distributed else target.device
        self._eager_stages: dict[Program, list[EagerStage]] = {}
        self._trainers: dict[Program, DistributedPipeline] = {}
        self._evaluators: dict[Program, DistributedPipeline] = {}
        if self._share.is_distributed:
            self._move_stages()
            # Buffers that moved to a GPU are other objects now.
            self._programs.planned.remember()
            self._equalise_ties()

    def __repr__(self) -> str:
        where = (
            f"stages {self._share.stages} here"
            if self._share.is_distributed
            else "all stages in this process"
        )
        return f"Pipeline({self.plan!r}, {where}, {self.steps} steps taken)"

    # -- what it is

    @property
    def stages(self) -> tuple[fx.GraphModule, ...]:
        """The stage modules of this process; their parameters have the original names."""
        return tuple(self._programs.planned.stages[index].module for index in self._share.stages)

    def simulate(self) -> Timeline:
        """The timeline of one step as the plan predicts it."""
        return simulate_plan(self.plan)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters by their first name in the model; a tied one on every
        rank that holds it.
        """
        for name, parameter in self._target.model.named_parameters():
            if self._share.holds(name):
                yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers by their first name in the model."""
        return (
            (name, buffer)
            for name, buffer in self._target.model.named_buffers()
            if self._share.holds(name)
        )

    def state_dict(self) -> dict[str, Tensor]:
        """This process's part of the model's state under the original names, aliases included."""
        state = self._target.model.state_dict()
        return {name: value for name, value in state.items() if self._share.holds(name)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a checkpoint of the original model; InputError names what is missing, unknown or of
        another shape.
        """
        model = self._target.model
        own, known = self.state_dict(), model.state_dict().keys()
        _refuse("are missing from", own.keys() - state.keys())
        _refuse("are not in the model, but in", state.keys() - known)
        _refuse(
            "have another shape in",
            {n for n, value in own.items() if _shape_of(value) != _shape_of(state[n])},
        )
        model.load_state_dict({name: state[name] for name in own}, strict=False)

    # -- training and evaluation

    def step(self, batch: Any, target: Any = None) -> Tensor | None:
        """Run one training step on a minibatch; gradients are left on the parameters, for an
        optimizer.

        `batch` is as `sample_input` was; `target` goes to the loss function. Returns the mean loss
        of the microbatches where the last stage runs, None on other ranks. Every rank gives the
        same batch and target. Gradients are those of the mean loss; they are added to what the
        parameters hold.

        Modules are in the mode that `.train()` and `.eval()` have put them in, the same on every
        rank. For modes other than the planned ones the model is captured once more and cut like the
        plan, whose figures do not hold for them.
        """
        _refuse_untrainable(self.plan.schedule)
        rows = self._rows(batch)
        if len(rows) > self.plan.microbatches:
            raise InputError(
                f"the batch holds {len(rows)} microbatches, but the plan was made for "
                f"{self.plan.microbatches}: memory and schedule would differ; give a smaller "
                "batch, or plan again with more microbatches"
            )
        targets = split(target, len(rows))
        schedule = self.plan.schedule.first_microbatches(len(rows))
        parameters = list(self.parameters())
        program = self._programs.current()
        with program.mode(), fresh_gradients(parameters):
            losses = self._step(program, schedule, rows, targets)
        self.steps += 1
        return None if losses is None else torch.stack(list(losses)).mean()

    def evaluate(self, batch: Any) -> Any:
        """Return the model's output in eval mode, without gradients; None on ranks without the last
        stage.

        It is what the model computes in eval mode while gradients are on, even if it takes a
        shortcut without them.
        """
        rows = self._rows(batch)
        program = self._programs.in_eval_mode()
        with program.mode():
            if self._share.is_distributed:
                schedule = self._orders.evaluation(len(rows))
                outputs: Sequence[Sequence[Tensor]] | None = self._evaluator(program).run(
                    schedule, rows, [None] * len(rows), seed=self.seed, step=0
                )
            else:
                stages = [_eager(stage, loss=None) for stage in program.stages]
                outputs = local.evaluate(stages, rows, seed=self.seed)
        if outputs is None:
            return None
        program.check_joinable(outputs[0])
        return merge([program.outputs.unflatten(list(values)) for values in outputs])

    # -- what this rank holds

    def _move_stages(self) -> None:
        """Move the stages to this rank's device. Buffers become other objects there, which the
        model then gets.
        """
        own = {name for name, _ in self._target.model.named_buffers(remove_duplicate=False)}
        for stage in self.stages:
            stage.to(self._device)
            for name, buffer in stage.named_buffers(remove_duplicate=False):
                path, _, last = name.rpartition(".")
                if name in own:
                    self._target.model.get_submodule(path)._buffers[last] = buffer

    @cached_property
    def _tied(self) -> dict[str, nn.Parameter]:
        return self._tied_in(self._programs.planned)

    def _tied_in(self, program: Program) -> dict[str, nn.Parameter]:
        """The parameters that several stages read."""
        by_name = dict(self._target.model.named_parameters())
        return {
            n: by_name[n] for n, tie in program.ties.items() if n in by_name and len(tie.stages) > 1
        }

    @cached_property
    def _tie_groups(self) -> dict[str, dist.ProcessGroup]:
        """The process group of the ranks that hold each tied parameter."""
        stages = {name: self._programs.planned.ties[name].stages for name in self._tied}
        return tie_groups(stages, self.plan.schedule.placement)

    def _equalise_ties(self) -> None:
        """Set all copies of a tied parameter to the owner's: the ranks may have initialised theirs
        differently.
        """
        for name, group in self._tie_groups.items():
            if self._share.holds(name):
                owner = self.plan.schedule.placement[self._programs.planned.ties[name].owner]
                dist.broadcast(self._tied[name].data, src=owner, group=group)

    def _rows(self, batch: Any) -> list[list[Tensor]]:
        """The input tensors of each microbatch, on the device."""
        captured = self._programs.planned.captured
        tensors = captured.inputs.flatten(arguments_of(captured.model, batch))
        names = captured.inputs.tensor_names
        count = count_microbatches(tensors, names, self.plan.microbatch_shapes)
        for name, tensor, planned in zip(
            names, tensors, self._programs.planned.inputs, strict=True
        ):
            if tensor.dtype != planned[1]:
                raise InputError(
                    f"{name} is of type {tensor.dtype}, but the plan was made for {planned[1]}"
                )
        return split([self._at_stage(0, tensor) for tensor in tensors], count)

    def _at_stage(self, index: int, tensor: Tensor) -> Tensor:
        """`tensor` on the device if the stage is here; other ranks do not read it."""
        return tensor.to(self._device) if index in self._share.stages else tensor

    def _step(
        self, program: Program, schedule: Schedule, rows: list[list[Tensor]], targets: list[Any]
    ) -> Sequence[Tensor] | None:
        last = self.plan.k - 1
        targets = [
            tree_map_only(Tensor, lambda value: self._at_stage(last, value), target)
            for target in targets
        ]
        if self._share.is_distributed:
            losses_by_microbatch = self._trainer(program).run(
                schedule, rows, targets, seed=self.seed, step=self.steps
            )
            return (
                None
                if losses_by_microbatch is None
                else [values[0] for values in losses_by_microbatch]
            )
        order = self._orders.actions(schedule)
        losses = local.step(
            self._stages(program), order, rows, targets, seed=self.seed, step=self.steps
        )
        divide_gradients(self._target.model.parameters(), len(rows))
        return losses

    def _loss(self, program: Program, outputs: Sequence[Tensor], target: Any) -> Tensor:
        loss_fn: LossFunction = self._target.trained_by
        return loss_fn(program.outputs.unflatten(outputs), target)

    def _loss_of(self, program: Program, stage: int) -> Loss | None:
        return partial(self._loss, program) if stage == self.plan.k - 1 else None

    def _stages(self, program: Program) -> list[EagerStage]:
        """All stages, for one process. A tied parameter is one tensor, whose gradient is summed
        stage by stage.
        """
        if program not in self._eager_stages:
            tied_to_earlier: list[list[nn.Parameter]] = [[] for _ in program.stages]
            tied_to_later: list[list[nn.Parameter]] = [[] for _ in program.stages]
            for name, parameter in self._tied_in(program).items():
                for earlier, later in pairwise(program.ties[name].stages):
                    tied_to_later[earlier].append(parameter)
                    tied_to_earlier[later].append(parameter)
            self._eager_stages[program] = [
                _eager(
                    s,
                    loss=self._loss_of(program, s.index),
                    tied_to_earlier=tied_to_earlier[s.index],
                    tied_to_later=tied_to_later[s.index],
                )
                for s in program.stages
            ]
        return self._eager_stages[program]

    def _trainer(self, program: Program) -> DistributedPipeline:
        if program not in self._trainers:
            stages = {
                index: _eager(program.stages[index], loss=self._loss_of(program, index))
                for index in self._share.stages
            }
            ties = [
                (self._tied[name], group)
                for name, group in sorted(self._tie_groups.items())
                if self._share.holds(name) and self._tied[name].requires_grad
            ]
            scalar = [BoundaryShape(((), torch.float32, True))]
            shapes = program.boundary_shapes()
            self._trainers[program] = DistributedPipeline(
                stages, self._device, shapes, scalar, ties
            )
        return self._trainers[program]

    def _evaluator(self, program: Program) -> DistributedPipeline:
        if program not in self._evaluators:
            stages = {
                index: _eager(program.stages[index], loss=None) for index in self._share.stages
            }
            shapes = program.boundary_shapes()
            self._evaluators[program] = DistributedPipeline(
                stages, self._device, shapes, program.results, ()
            )
        return self._evaluators[program]


def _shape_of(value: Any) -> Any:
    """The shape of a tensor; None for a value that is no tensor."""
    return value.shape if isinstance(value, Tensor) else None


def _eager(
    stage: StageModule,
    *,
    loss: Any,
    tied_to_earlier: Sequence[nn.Parameter] = (),
    tied_to_later: Sequence[nn.Parameter] = (),
) -> EagerStage:
    return EagerStage(
        stage.module,
        gradient_inputs=stage.gradient_inputs,
        loss=loss,
        buffers=stage.buffers,
        random=stage.random,
        tied_to_earlier=tied_to_earlier,
        tied_to_later=tied_to_later,
    )


def _local_device(target: Target) -> torch.device:
    """Where this rank's stages run: its GPU under NCCL, else where the model is."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else target.device
    )


def _refuse_untrainable(schedule: Schedule) -> None:
    if schedule.name == "forward-only":
        raise InputError(
            "the plan's schedule is forward-only, which trains nothing; evaluate, or plan with "
            "'1f1b'"
        )
    if schedule.weight_versions != "synchronous":
        raise InputError(
            f"schedule {schedule.name!r} updates weights while microbatches are in flight, which "
            "no step does yet; plan with a synchronous one such as '1f1b'"
        )


def _refuse(what: str, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names)[:5]) + (
            f" and {len(names) - 5} more" if len(names) > 5 else ""
        )
        raise InputError(f"{listed} {what} the state dict; it must be one of the original model")


def check_world(plan: Plan) -> None:
    """StalePlanError unless this process group has the ranks that the plan places its stages on."""
    processes = world.size()
    if processes in (1, plan.ranks):
        return
    several = ""
    if plan.stages_per_rank > 1:
        name, each = plan.schedule.name, plan.stages_per_rank
        several = f" (schedule {name!r} places k={plan.k} stages {each} on a rank)"
    raise StalePlanError(
        f"the plan is for {plan.ranks} ranks{several}, but {processes} processes run; launch "
        f"torchrun --nproc-per-node {plan.ranks}, or plan with ranks={processes}, "
        f"which is k={processes * plan.stages_per_rank}"
    )
