"""Runs programs on this process: all stages in one process, or this rank's with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.amp.grad_scaler import GradScaler

from pipecompile.errors import InputError
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Schedule
from pipecompile.runtime import one_process, world
from pipecompile.runtime.communication_hook import CommunicationHook
from pipecompile.runtime.deadline import Deadline
from pipecompile.runtime.distributed_pipeline import Engine
from pipecompile.runtime.gradients import spread_overflow
from pipecompile.runtime.leading_forwards import LeadingForwards
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.messages import Messages
from pipecompile.runtime.norm import NormOnItsWay, begin_norm
from pipecompile.runtime.peers import Peers, group_of_own_stage, peers_at
from pipecompile.runtime.place import device_of_this_rank
from pipecompile.runtime.rank_step import ActionObserver, Minibatch, StepResult
from pipecompile.runtime.replicas import ReplicaSums
from pipecompile.runtime.returned_value import returned_everywhere
from pipecompile.runtime.shards import gradient_parts
from pipecompile.runtime.stage import EagerStage
from pipecompile.runtime.ties import sum_tied_gradients
from pipecompile.runtime.update_rule import UpdateRule
from pipecompile.runtime.watch import StepWatch
from pipecompile.runtime.weight_updates import GradientExchange
from pipecompile.schedule.asynchronous_versions import PipelineSize
from pipecompile.schedule.plan_orders import PlanOrders
from pipecompile.schedule.post_validation import leading_forwards
from pipecompile.training.eager_stages import rank_stages
from pipecompile.training.materialisation import move
from pipecompile.training.parallel_stages import Parallelize, ParallelStages, first_holders
from pipecompile.training.program import Program
from pipecompile.training.program_stages import ProgramStages
from pipecompile.training.run_conditions import refuse_hook, refuse_in_flight
from pipecompile.training.step_agreement import StepAgreement
from pipecompile.training.tensor_copies import TensorCopies
from pipecompile.training.trial_forward import TrialOutputs, check_trial, trial_outputs

__all__ = ["Runner"]


class Runner:
    """The stages of this process, for each program, and how their gradients are summed.

    `planned` is the program of the plan. The stages move to the device of this rank. A step of
    several ranks may take `step_timeout` seconds; `engine` walks through its actions.
    """

    def __init__(
        self,
        plan: Plan,
        target: Target,
        share: LocalShare,
        planned: Program,
        step_timeout: float | None,
        engine: Engine = "own",
    ) -> None:
        self._plan = plan
        self._target = target
        self._share = share
        self._planned = planned
        self._engine = engine
        self._orders = PlanOrders(plan)
        self._leading_counts: dict[int, tuple[int, ...]] = {}
        own = device_of_this_rank() if share.is_distributed else None
        # A rank's first parameter may be another rank's, without values.
        here = torch.device("cpu") if target.device.type == "meta" else target.device
        self.device = own or here
        self._stages = ProgramStages(target, share, planned, self.device, engine)
        self.watch: StepWatch | None = None
        self._agreement = StepAgreement(plan, share.place)
        self._parallel: ParallelStages | None = None
        self._hook: CommunicationHook | None = None
        place = share.place
        peers: Peers = []
        if share.is_distributed:
            peers = peers_at(plan.schedule.placement, place.global_ranks)
        self._stage_replicas = group_of_own_stage(peers)
        self._copies = TensorCopies(plan, target, share, planned, self._stage_replicas)
        if share.is_distributed:
            # In this order: stages move first, since NCCL sends what is on a GPU; then the
            # program learns which objects it has; then ranks send each other values.
            everyone, board = sorted(chain(*place.pipelines)), self._agreement.board
            self.watch = StepWatch(everyone, peers, step_timeout, board)
            self.move_stages()
            # Buffers that moved to a GPU are other objects now.
            planned.remember()
            self.equalise()

    @property
    def deadline(self) -> Deadline:
        """When the step that is watched must be over."""
        return Deadline() if self.watch is None else self.watch.deadline

    def watched(self, name: str, steps: int = 1) -> AbstractContextManager[None]:
        """Return the context in which a failure is traced to the rank at fault.

        It has the time of `steps` steps.
        """
        return nullcontext() if self.watch is None else self.watch.watched(name, steps)

    def meet(self, what: str) -> None:
        """Wait until all ranks come to `what`, which they do together: with `step_timeout` one that
        does not is named in time. InputError if they begin different things.
        """
        with self.watched_together(what):
            pass

    @contextmanager
    def watched_together(self, name: str) -> Iterator[None]:
        """Watch the block as `watched` does, once all ranks begin the same."""
        if self.watch is None:
            yield
            return
        self.watch.refuse_after_loss()
        with self.watch.watched(name):
            self._agreement.meet(name, self.watch)
            yield

    def tell(self, group: dist.ProcessGroup | None, value: object) -> Sequence[Any]:
        """Return what each process of `group` tells, in the time of the step; None is this one."""
        if group is None or self.watch is None:
            return [value]
        told: list[Any] = [None] * dist.get_world_size(group)
        with self.watch.waiting_for_all("end"):
            self.watch.deadline.wait_for(group)
            dist.all_gather_object(told, value, group=group)
        return told

    @property
    def reads_batch(self) -> bool:
        """Whether this process has the first stage, which reads inputs, or the last one, which
        reads targets.
        """
        return bool({0, self._plan.k - 1} & set(self._share.stages))

    @property
    def stages(self) -> tuple[fx.GraphModule, ...]:
        """The planned stage modules of this process."""
        return tuple(self._planned.stages[index].module for index in self._share.stages)

    @property
    def whole_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters, whole during a step, of which the model has only a part."""
        return [] if self._parallel is None else self._parallel.sharded.whole_parameters

    def parallelize(self, parallelize: Parallelize) -> Callable[[], AbstractContextManager[None]]:
        """Let the user's function divide the stages of this rank.

        Return the context in which the model's modules are as they were built.
        """
        planned, model = self._planned, self._target.model_with_loss
        with world.failing_together():
            # Together, because a stage is divided by exchanges: a rank whose stage cannot be
            # divided would leave the others waiting in theirs.
            expected = self._trial(lambda _: nullcontext())
            shard = self._plan.options.shard
            self._parallel = ParallelStages(
                parallelize, planned, self._share, model, self.watch, shard
            )
            self._stages.divide(self._parallel)
            self._copies.forget()
            check_trial(self._trial(self._parallel.sharded.whole), expected, self._target.autocast)
        self._share.divide(first_holders(model, self._share, planned))
        return self._parallel.as_built

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 manages parameters of this rank."""
        return self._parallel is not None and bool(self._parallel.sharded.managed)

    def _trial(self, whole: Callable[[int], AbstractContextManager[object]]) -> TrialOutputs:
        """Return what stages compute for some inputs; nothing where only FSDP2 may divide them."""
        if not self._share.place.divides_work:
            return {}
        with self._planned.mode():
            stages = self._stages.own(self._planned)
            return trial_outputs(self._planned, stages, self.device, whole)

    def at_stage(self, index: int, tensor: Tensor) -> Tensor:
        """Return `tensor`, on the device if the stage is here; other ranks do not read it."""
        return tensor.to(self.device) if index in self._share.stages else tensor

    def train(
        self,
        program: Program,
        schedule: Schedule,
        batch: Minibatch,
        flags: Mapping[str, bool],
        *,
        reduces: bool = True,
        observers: Sequence[ActionObserver] = (),
        remainder: Program | None = None,
        validate: Callable[[], bool] | None = None,
    ) -> StepResult | None:
        """Run one step; return what the last stage returns, None elsewhere.

        Gradients are left on the parameters, summed over microbatches, and if it `reduces` over
        ties and replicas. `remainder` runs the last microbatch if that is smaller than planned.
        `flags` are what all ranks must give to the step alike. `validate` makes the weights right
        after the leading forwards, and returns whether they were right before.
        """
        if self.watch is None:
            assert validate is None, "one process knows at once what is right"
            order = self._orders.actions(schedule)
            smaller = None if remainder is None else self._stages.local(remainder)
            return one_process.step(self._stages.local(program), order, batch, observers, smaller)
        # For a step like earlier ones, the exchange of what ranks say begins here and ends before
        # their first message, so that it takes no time of its own: stage 0 computes its first
        # forward meanwhile.
        history = self._stages.distributed(program).history
        agreement = self._agreement.of_step(program, batch, self.watch, flags, history)
        sums = self._replica_sums(program) if reduces else None
        if self._parallel is not None:
            # Stages that are divided exchange tensors before the first message.
            agreement.settle()
        with self._sharded() as sharded:
            result = self._stages.distributed(program).run(
                schedule,
                batch,
                agreement,
                self.watch,
                reducer=sums,
                observers=[*observers, *sharded],
                remainder=None if remainder is None else self._stages.own(remainder),
                leading=None if validate is None else self._leading(schedule, validate),
            )
        if reduces:
            # A rank that sums ties earlier could wait for ever for a rank that itself waits for a
            # message of the first one.
            sum_tied_gradients(self._copies.ties, self.watch.deadline)
        if sums is not None:
            sums.finish()
        return result

    def _leading(self, schedule: Schedule, validate: Callable[[], bool]) -> LeadingForwards:
        if self._engine == "torch":  # whose runtime performs a row as a whole
            return LeadingForwards((0,) * schedule.ranks, validate)
        microbatches = schedule.microbatches  # a smaller minibatch has a part of the plan's order
        if microbatches not in self._leading_counts:
            self._leading_counts[microbatches] = leading_forwards(schedule)
        return LeadingForwards(self._leading_counts[microbatches], validate)

    def evaluate(
        self,
        program: Program,
        batch: Minibatch,
        *,
        with_loss: bool,
        remainder: Program | None = None,
    ) -> StepResult | None:
        """Return the model's output tensors for each microbatch, or if it is `with_loss` losses;
        None without the last stage.
        """
        if self.watch is not None:
            smaller = None if remainder is None else self._stages.own(remainder)
            schedule = self._orders.evaluation(len(batch.inputs))
            everyone = self.evaluates_with_everyone(with_loss=with_loss)
            agreement = self._agreement.of_evaluation(
                program, batch, self.watch, with_loss=with_loss, everyone=everyone
            )
            # Replicas may evaluate different numbers of samples.
            together = self._agreement.ending_together(agreement, self.watch)
            with together, self._sharded(all_stages=True):
                return self._stages.distributed(program).run(
                    schedule,
                    batch,
                    agreement,
                    self.watch,
                    with_loss=with_loss,
                    remainder=smaller,
                )
        return one_process.evaluate(
            self._stages.local(program),
            batch,
            with_loss=with_loss,
            remainder=None if remainder is None else self._stages.local(remainder),
        )

    def hook_into_sums(self, hook: CommunicationHook) -> None:
        """Let a user's hook sum gradients over replicas; InputError where it cannot, and if there
        is one already.
        """
        if self._hook is not None:
            raise InputError(
                "a communication hook is registered already, and gradients are summed once; make "
                "one that calls both, or the pipeline once more"
            )
        refuse_hook(
            hook, self._plan.schedule, self._share.place, is_divided=self._parallel is not None
        )
        self._hook = hook

    @property
    def has_communication_hook(self) -> bool:
        """Whether a user's hook sums gradients over replicas."""
        return self._hook is not None

    def refuse_in_flight(self, rule: UpdateRule) -> None:
        """Raise InputError for what cannot be right while minibatches are in flight."""
        is_divided = self._parallel is not None
        refuse_in_flight(self._plan, self._target, rule, is_divided=is_divided, engine=self._engine)

    def refuse_early_updates(self) -> None:
        """Raise InputError for what updates that are validated later cannot be right with."""
        if self._parallel is not None:
            raise InputError(
                "post_validation keeps copies of what a step overwrites, which is not done for "
                "parameters that parallelize divides; leave one of the two out"
            )

    def untied_stages(self, program: Program) -> Mapping[int, EagerStage]:
        """Return the stages of this process, whose gradients of tied parameters stay apart."""
        if self._share.is_distributed:
            return self._stages.own(program).stages
        return rank_stages(program, self._target, self._share.stages)

    def begin_continuous(
        self, program: Program, batch: Minibatch, flags: Mapping[str, bool]
    ) -> Messages | None:
        """Let all ranks agree on the first minibatch of a run that has no end; return the messages
        of this rank, None in one process.
        """
        if self.watch is None:
            return None
        self.watch.refuse_after_loss()
        pipeline = self._stages.distributed(program)
        agreement = self._agreement.of_step(program, batch, self.watch, flags, pipeline.history)
        agreement.settle()
        schedule = self._plan.schedule
        (stage,) = self._share.stages  # under schedules without an end
        size = PipelineSize.of(schedule.placement, schedule.microbatches)
        unread = size.unread_gradients(stage)
        return pipeline.begin(schedule, agreement, self.watch, lambda _: unread)

    def compare_in_flight(self, batch: Minibatch) -> None:
        """Compare now and then what ranks were given, of a minibatch that begins amid others; an
        InputError, on every rank, if it has other values.
        """
        if self.watch is not None:
            self._agreement.compare_data(batch, self.watch)

    def exchange(self) -> GradientExchange:
        """Return with whom this process sums gradients."""
        return self._copies.exchange(lambda: self.deadline, self.device)

    def evaluates_with_everyone(self, *, with_loss: bool) -> bool:
        """Return whether an evaluation needs the ranks of all replicas: to take the mean of their
        losses, or for what `parallelize` has divided.
        """
        return with_loss or self._parallel is not None

    @contextmanager
    def refusing_together(self, name: str, *, everyone: bool = True) -> Iterator[None]:
        """Let the other ranks raise InputError if this one raises something, in what precedes the
        step or evaluation of that name: `everyone`, or the ranks of the pipeline.
        """
        if self.watch is not None:
            # Told to nobody: the connections may be closed, and the others have lost them too.
            self.watch.refuse_after_loss()
        try:
            yield
        except Exception as error:
            if self.watch is not None:
                with self.watch.watched(name):
                    self._agreement.refuse(error, self.watch, everyone=everyone)
            raise

    def spread_overflow(self, parameters: Iterable[Tensor], scaler: GradScaler) -> None:
        """Let gradients overflow on all ranks if they do on one; InputError, on all of them, if
        their scalers have other scales.
        """
        if self._share.is_distributed:
            scale = scaler.scale(torch.ones((), device=self.device))
            spread_overflow(gradient_parts(parameters), scale, self.deadline)

    def begin_norm(self, gradients: Sequence[Tensor], norm_type: float = 2.0) -> NormOnItsWay:
        """Begin to reduce the norm of gradients, or parts of them, each of which one rank gives."""
        deadline = self.deadline if self._share.is_distributed else None
        return begin_norm(gradients, norm_type, self.device, deadline)

    def everywhere(self, returned: Any) -> Any:
        """Return what the last stage's rank returns, on every rank of the pipeline."""
        place = self._share.place
        if not place.is_distributed:
            return returned
        source = place.global_ranks[self._plan.schedule.placement[-1]]
        group = place.pipeline_group
        return returned_everywhere(returned, source, group, self.device, self.deadline)

    def equalise(self) -> None:
        """Set copies of tied parameters to the owner's, and replicas to the first one's values."""
        self._copies.equalise()

    def move_stages(self) -> None:
        """Move the stages to this rank's device."""
        move(self.stages, self._target.model_with_loss, self.device)

    @contextmanager
    def _sharded(self, *, all_stages: bool = False) -> Iterator[Sequence[ActionObserver]]:
        """Yield what gathers sharded parameters for the block's actions; free them after it."""
        if self._parallel is None:
            yield []
            return
        try:
            self._parallel.sharded.gather(all_stages=all_stages)
            # Freed after a failure too: the next step gathers anew.
            yield [self._parallel.sharded]
        finally:
            self._parallel.sharded.free()

    def _replica_sums(self, program: Program) -> ReplicaSums | None:
        sharded = None if self._parallel is None else self._parallel.sharded
        return self._copies.replica_sums(program, sharded, self._hook, self.deadline)
