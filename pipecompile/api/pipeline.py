"""A compiled pipeline: the plan, its stages on this process, and the step that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from pipecompile.api.target import LossFunction, Target
from pipecompile.codegen.stages import Edge, StageModule, emit
from pipecompile.codegen.transfer import transfer
from pipecompile.errors import InputError, StalePlanError
from pipecompile.frontend.capture import Capture, capture
from pipecompile.frontend.selfcheck import check_capture
from pipecompile.frontend.signature import Arguments, Outputs, arguments_of
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import COMPUTE, Action, Schedule, Timeline
from pipecompile.passes.ambient import observed
from pipecompile.passes.ties import Tie, ties_of
from pipecompile.runtime import local, world
from pipecompile.runtime.distributed import DistributedPipeline, Shape, tie_groups
from pipecompile.runtime.gradients import fresh_gradients, scale
from pipecompile.runtime.microbatch import count_microbatches, merge, split
from pipecompile.runtime.stage import EagerStage
from pipecompile.schedule.lower import lower
from pipecompile.schedule.named import generate
from pipecompile.schedule.simulate import simulate, simulate_plan
from pipecompile.schedule.stages import problem_of_stages

__all__ = ["Pipeline", "Program"]


class Program:
    """A graph of the model cut as the plan says, in one mode (training or evaluation)."""

    def __init__(self, captured: Capture, module: fx.GraphModule, assignment: Mapping[str, int]) -> None:
        self.captured = captured
        self._surroundings = observed()
        self._trainable = {name: p.requires_grad for name, p in captured.model.named_parameters()}
        self.flags = {path: part.training for path, part in captured.model.named_modules()}
        self.stages: tuple[StageModule, ...] = emit(module, assignment)
        self.ties: dict[str, Tie] = ties_of(module, module.graph, captured.first_names)
        self.inputs = [
            Shape((tuple(node.meta["val"].shape), node.meta["val"].dtype, False))
            for node in module.graph.nodes
            if node.op == "placeholder"
        ]
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        self.results = [Shape((tuple(v.shape), v.dtype, False)) for v in output.meta["val"]]

    @property
    def outputs(self) -> Outputs:
        """How the model's output tensors make its output."""
        return self.captured.outputs

    def boundary_shapes(self) -> list[list[Shape]]:
        """The tensors that enter each stage."""
        return [self.inputs, *(list(map(_shape, stage.inputs)) for stage in self.stages[1:])]

    def _check_surroundings(self) -> None:
        """InputError if what the graph was captured under has changed: types and gradients would not fit it."""
        if observed().autocast != self._surroundings.autocast:
            raise InputError(
                "autocast is not as it was when the model was compiled; compile and step under the same autocast, "
                "or put it into the model's forward"
            )
        changed = [n for n, p in self.captured.model.named_parameters() if p.requires_grad != self._trainable[n]]
        if changed:
            raise InputError(f"requires_grad of {changed[0]} changed since the model was compiled; compile it again")

    def check_joinable(self, values: Sequence[Tensor]) -> None:
        """InputError if an output has no batch dimension along which those of several microbatches could be joined."""
        for index, (value, batched) in enumerate(zip(values, self.outputs.batched, strict=True)):
            grows = batched if self.captured.symbol is not None else value.dim() > 0 and value.shape[0] == 1
            if value.dim() and not grows:
                raise InputError(
                    f"output {index} of shape {tuple(value.shape)} does not have the batch as dimension 0, so those of "
                    "the microbatches cannot be joined; return it per sample, or evaluate the model itself"
                )

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Modules are in the mode of this program in the block, whatever `.train()` or `.eval()` said since."""
        self._check_surroundings()
        model = self.captured.model
        before = {part: part.training for part in model.modules()}
        for path, part in model.named_modules():
            part.training = self.flags[path]
        for stage in self.stages:
            stage.module.training = model.training
        try:
            yield
        finally:
            for part, flag in before.items():
                part.training = flag


def _shape(edge: Edge) -> Shape:
    return Shape((edge.shape, edge.dtype, edge.gradient))


class Pipeline:
    """A model cut into stages, ready to train.

    In one process all stages run on the model's device. Under torchrun (or in any initialised process group) each
    rank runs the stages that the plan gives it, and only those move to its device.
    """

    def __init__(self, plan: Plan, program: Program, target: Target, sample: Arguments, seed: int) -> None:
        self.plan = plan
        self.seed = seed
        self.steps = 0  # part of what random nodes draw from: set it when training resumes from a checkpoint
        self._program = program
        self._target = target
        self._sample = sample
        self._device = _local_device(target) if self._distributed else target.device
        self._schedules: dict[tuple[str, int], Schedule] = {}
        if self._distributed:
            self._move_stages()
            self._equalise_ties()

    # -- what it is

    @property
    def stages(self) -> tuple[fx.GraphModule, ...]:
        """The stage modules of this process, under the original parameter names."""
        return tuple(self._program.stages[index].module for index in self._local)

    def simulate(self) -> Timeline:
        """The step as the plan predicts it."""
        return simulate_plan(self.plan)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters by their first name in the model; a tied one on every rank that holds it."""
        for name, parameter in self._target.model.named_parameters():
            if self._holds(name):
                yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers by their first name in the model."""
        return ((name, buffer) for name, buffer in self._target.model.named_buffers() if self._holds(name))

    def state_dict(self) -> dict[str, Tensor]:
        """This process's part of the model's state under the original names, aliases included."""
        state = self._target.model.state_dict()
        return {name: value for name, value in state.items() if self._holds(name)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a checkpoint of the original model; InputError names what is missing, unknown or of another shape."""
        model = self._target.model
        own, known = self.state_dict(), model.state_dict().keys()
        _refuse("are missing from", own.keys() - state.keys())
        _refuse("are not in the model, but in", state.keys() - known)
        _refuse("have another shape in", {n for n, value in own.items() if value.shape != state[n].shape})
        model.load_state_dict({name: state[name] for name in own}, strict=False)

    # -- what it does

    def step(self, batch: Any, target: Any = None) -> Tensor | None:
        """One training step on a minibatch: gradients are left on the parameters, to be used by an optimizer.

        `batch` is as `sample_input` was; `target` goes to the loss function. Returns the mean loss of the
        microbatches where the last stage runs, None on other ranks. Every rank gives the same batch and target.
        Gradients are those of the mean loss; they are added to what the parameters hold.
        """
        if self.plan.schedule.name == "forward-only":
            raise InputError("the plan's schedule is forward-only, which trains nothing; evaluate, or plan with '1f1b'")
        rows = self._rows(batch)
        if len(rows) > self.plan.microbatches:
            raise InputError(
                f"the batch holds {len(rows)} microbatches, but the plan was made for {self.plan.microbatches}: memory "
                "and schedule would be others; give a smaller batch, or plan again with more microbatches"
            )
        targets = split(target, len(rows))
        schedule = self._schedule(self.plan.schedule.name, len(rows))
        moved = [parameter for _, parameter in self.named_parameters()]
        with self._program.mode(), fresh_gradients(moved):
            losses = self._step(schedule, rows, targets)
        self.steps += 1
        return None if losses is None else torch.stack(list(losses)).mean()

    def evaluate(self, batch: Any) -> Any:
        """The model's output in eval mode, without gradients; None on ranks without the last stage."""
        rows = self._rows(batch)
        program = self._evaluation
        with program.mode():
            if self._distributed:
                schedule = self._schedule("forward-only", len(rows))
                found: Sequence[Sequence[Tensor]] | None = self._evaluator.run(
                    schedule, rows, [None] * len(rows), seed=self.seed, step=0
                )
            else:
                stages = [_eager(stage, loss=None) for stage in program.stages]
                found = local.evaluate(stages, rows, seed=self.seed)
        if found is None:
            return None
        program.check_joinable(found[0])
        return merge([program.outputs.unflatten(list(values)) for values in found])

    # -- how

    @property
    def _distributed(self) -> bool:
        return world.size() > 1

    @property
    def _local(self) -> list[int]:
        if not self._distributed:
            return list(range(self.plan.k))
        return [index for index, rank in enumerate(self.plan.schedule.placement) if rank == world.rank()]

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        """Every name of every parameter and buffer, with the stages that hold it."""
        return {
            name: parameter.stages
            for parameter in self.plan.parameters
            for name in (parameter.name, *parameter.aliases)
        }

    def _holds(self, name: str) -> bool:
        # What no stage reads (a parameter that the forward does not use) stays with the first stage.
        return not self._distributed or not set(self._holders.get(name, (0,))).isdisjoint(self._local)

    def _move_stages(self) -> None:
        for stage in self.stages:
            stage.to(self._device)

    @cached_property
    def _tied(self) -> dict[str, nn.Parameter]:
        """Parameters that several stages read."""
        by_name = dict(self._target.model.named_parameters())
        return {n: by_name[n] for n, tie in self._program.ties.items() if n in by_name and len(tie.stages) > 1}

    @cached_property
    def _tie_groups(self) -> dict[str, dist.ProcessGroup]:
        """The ranks that hold each of them."""
        stages = {name: self._program.ties[name].stages for name in self._tied}
        return tie_groups(stages, self.plan.schedule.placement)

    def _equalise_ties(self) -> None:
        """All copies of a tied parameter begin as the owner's: the ranks may have initialised theirs differently."""
        for name, group in self._tie_groups.items():
            if self._holds(name):
                owner = self.plan.schedule.placement[self._program.ties[name].owner]
                dist.broadcast(self._tied[name].data, src=owner, group=group)

    def _rows(self, batch: Any) -> list[list[Tensor]]:
        """The minibatch as the input tensors of each microbatch, on the device."""
        captured = self._program.captured
        tensors = captured.inputs.flatten(arguments_of(captured.model, batch))
        names = captured.inputs.tensor_names
        count = count_microbatches(tensors, names, self.plan.microbatch_shapes)
        for name, tensor, planned in zip(names, tensors, self._program.inputs, strict=True):
            if tensor.dtype != planned[1]:
                raise InputError(f"{name} is of type {tensor.dtype}, but the plan was made for {planned[1]}")
        return split([tensor.to(self._device) for tensor in tensors], count)

    def _schedule(self, name: str, microbatches: int) -> Schedule:
        """The planned schedule, or its like for a minibatch of another number of microbatches."""
        if name == self.plan.schedule.name and microbatches == self.plan.microbatches:
            return self.plan.schedule
        if (name, microbatches) not in self._schedules:
            stages, placement = self.plan.stages, self.plan.schedule.placement
            recompute = [stage.recompute == "stage" for stage in stages]
            problem = problem_of_stages(stages, self.plan.link, placement, microbatches)
            self._schedules[name, microbatches] = lower(problem, generate(name, placement, microbatches, recompute))
        return self._schedules[name, microbatches]

    def _step(self, schedule: Schedule, rows: list[list[Tensor]], targets: list[Any]) -> Sequence[Tensor] | None:
        targets = [_to(target, self._device) for target in targets]
        if self._distributed:
            found = self._trainer.run(schedule, rows, targets, seed=self.seed, step=self.steps)
            return None if found is None else [values[0] for values in found]
        order = self._order(schedule)
        losses = local.step(self._eager_stages, order, rows, targets, seed=self.seed, step=self.steps)
        scale(self._target.model.parameters(), len(rows))
        return losses

    def _order(self, schedule: Schedule) -> list[Action]:
        """The compute actions of all ranks in the order in which they begin."""
        stages, link = self.plan.stages, self.plan.link
        timeline = simulate(problem_of_stages(stages, link, schedule.placement, schedule.microbatches), schedule)
        events = [
            (event.start_ns, event.end_ns, rank, event.action)
            for rank, row in enumerate(timeline.events)
            for event in row
        ]
        order = [action for *_, action in sorted(events, key=lambda event: event[:3])]
        assert all(action.kind in COMPUTE for action in order)
        return order

    def _loss(self, outputs: Sequence[Tensor], target: Any) -> Tensor:
        loss_fn: LossFunction = self._target.trained_by
        return loss_fn(self._program.outputs.unflatten(outputs), target)

    @cached_property
    def _eager_stages(self) -> list[EagerStage]:
        """All stages, for one process: tied parameters are one tensor, summed stage by stage."""
        stages, last = self._program.stages, self.plan.k - 1
        tied: dict[int, list[nn.Parameter]] = {stage.index: [] for stage in stages}
        gathered: dict[int, list[nn.Parameter]] = {stage.index: [] for stage in stages}
        for name, parameter in self._tied.items():
            holders = self._program.ties[name].stages
            for earlier, later in pairwise(holders):
                gathered[earlier].append(parameter)
                tied[later].append(parameter)
        return [
            _eager(s, loss=self._loss if s.index == last else None, tied=tied[s.index], gathered=gathered[s.index])
            for s in stages
        ]

    @cached_property
    def _trainer(self) -> DistributedPipeline:
        last = self.plan.k - 1
        local_stages = {
            index: _eager(self._program.stages[index], loss=self._loss if index == last else None)
            for index in self._local
        }
        ties = [
            (self._tied[name], group)
            for name, group in sorted(self._tie_groups.items())
            if self._holds(name) and self._tied[name].requires_grad
        ]
        scalar = [Shape(((), torch.float32, True))]
        return DistributedPipeline(local_stages, self._device, self._program.boundary_shapes(), scalar, ties)

    @cached_property
    def _evaluation(self) -> Program:
        """The model in eval mode, cut like the training graph."""
        model = self._target.model
        flags = {part: part.training for part in model.modules()}
        model.eval()
        try:
            captured = capture(model, self._sample)
            module = captured.instantiate(self._sample)
            if not self._distributed:
                check_capture(captured, module, self._sample)
            stages = transfer(self.plan.assignment, self._planned_graph(), module, self._holders)
            return Program(captured, module, stages)
        finally:
            for part, flag in flags.items():
                part.training = flag

    def _planned_graph(self) -> fx.Graph:
        """The training graph as it was before it was cut: the nodes that the plan names, in order."""
        return self._program.captured.graph

    @cached_property
    def _evaluator(self) -> DistributedPipeline:
        stages = {index: _eager(self._evaluation.stages[index], loss=None) for index in self._local}
        return DistributedPipeline(
            stages, self._device, self._evaluation.boundary_shapes(), self._evaluation.results, ()
        )


def _eager(
    stage: StageModule, *, loss: Any, tied: Sequence[nn.Parameter] = (), gathered: Sequence[nn.Parameter] = ()
) -> EagerStage:
    return EagerStage(
        stage.module,
        gradient_inputs=stage.gradient_inputs,
        loss=loss,
        buffers=stage.buffers,
        random=stage.random,
        tied=tied,
        gathered=gathered,
    )


def _local_device(target: Target) -> torch.device:
    """Where this rank's stages run: its GPU under NCCL, else where the model is."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else target.device


def _to(tree: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda value: value.to(device), tree)


def _refuse(what: str, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise InputError(f"{listed} {what} the state dict; it must be one of the original model")


def check_world(plan: Plan) -> None:
    """StalePlanError unless this process group has the ranks that the plan places its stages on."""
    if world.size() not in (1, plan.ranks):
        raise StalePlanError(
            f"the plan is for {plan.ranks} ranks, but {world.size()} processes run; "
            f"launch torchrun --nproc-per-node {plan.ranks}, or plan with k={world.size()}"
        )
