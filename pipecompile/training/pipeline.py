"""A compiled pipeline: the plan, its stages on this process, and the step that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self, overload

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from pipecompile.errors import InputError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured
from pipecompile.graph.loss_module import state_names
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Timeline
from pipecompile.runtime.communication_hook import CommunicationHook
from pipecompile.runtime.distributed_pipeline import Engine
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.norm import NormOnItsWay, norm_type_of
from pipecompile.runtime.place import RankPlace
from pipecompile.runtime.shards import gradient_parts
from pipecompile.runtime.update_rule import UpdateRule
from pipecompile.schedule.simulator import simulate_plan
from pipecompile.training.begun_training import BegunTraining
from pipecompile.training.checkpoint import Checkpoint
from pipecompile.training.checkpoint_weights import is_of_a_run
from pipecompile.training.held_model import HeldModel
from pipecompile.training.materialisation import check_all_set, initialise, lacks_values
from pipecompile.training.minibatch_evaluation import MinibatchEvaluation
from pipecompile.training.minibatch_step import MinibatchStep
from pipecompile.training.parallel_stages import Parallelize
from pipecompile.training.pipeline_parts import PipelineParts
from pipecompile.training.programs import DeclaredShape
from pipecompile.training.run_conditions import (
    check_conditions,
    refuse_without_steps,
    warn_of_other_shards,
)
from pipecompile.training.run_recorder import RunRecorder
from pipecompile.training.stage_optimizers import OptimizerFactory, SchedulerFactory
from pipecompile.training.synchronous_training import PipelineSteps

__all__ = ["Pipeline"]


class Pipeline(HeldModel):
    """A model cut into stages, ready to train.

    In one process all stages run on the model's device. Under torchrun (or in any initialised
    process group) each rank runs the stages that the plan gives it, and only those move to its
    device. With several times the plan's ranks, there are so many replicas of the pipeline: each
    steps with its own part of the data, and gradients are those of the mean over all of it.

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
        mesh: DeviceMesh | None = None,
        step_timeout: float | None = None,
        weights: str | Path | None = None,
        shapes: Sequence[DeclaredShape] = (),
        parallelize: Parallelize | None = None,
        engine: Engine = "own",
    ) -> None:
        self.plan = plan
        self.seed = seed
        # Random nodes draw from it too: set it when training resumes from a checkpoint.
        self.steps = 0
        share = LocalShare(plan, RankPlace.of(plan.ranks, mesh))
        super().__init__(target.model_with_loss, share, state_names(target.loss_module))
        self._target = target
        check_conditions(plan, self._model, self._share, parallelize, engine)
        was_on_meta = lacks_values(self._model)
        parts = PipelineParts.made(
            plan, captured, target, self._share, shapes, step_timeout, engine, self_check=self_check
        )
        self._programs, self._runner = parts.programs, parts.runner
        self._recorders = parts.recorders
        self._step = MinibatchStep(parts, self)
        self._evaluation = MinibatchEvaluation(parts, self)
        self._training = BegunTraining(parts, self)
        if was_on_meta:
            self._set_values(weights)
        # Last: while values were read or drawn each rank had its parameters whole.
        if parallelize is not None:
            self._programs.model_as_built = self._runner.parallelize(parallelize)
            for program in self._programs.declared:
                program.remember()  # the parameters are others now
        if self._share.is_distributed:
            warn_of_other_shards(plan, self.stages, is_sharded=self._runner.is_sharded)

    def __repr__(self) -> str:
        own = f"stages {self._share.stages} here"
        where = own if self._share.is_distributed else "all stages in this process"
        return f"Pipeline({self.plan!r}, {where}, {self.steps} steps taken)"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a pipeline can be neither pickled nor copied, since it belongs to its processes; save "
            "pipeline.checkpoint(optimizer) or pipeline.full_state_dict(), and copy the model"
        )

    # -- what it is

    @property
    def stages(self) -> tuple[fx.GraphModule, ...]:
        """The stage modules of this process; their parameters have the original names."""
        return self._runner.stages

    def simulate(self) -> Timeline:
        """Return the timeline that the plan predicts of a step with batches like `sample_input`."""
        return simulate_plan(self.plan)

    def checkpoint(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        *,
        data: Any = None,
    ) -> Checkpoint:
        """Return the checkpoint of a run, which can be saved and loaded on any number of ranks.

        It holds the model's state and that of `optimizer`, `scheduler` and `scaler`, `steps` and
        `seed`, random generators, and in `data` where the run is in its data. After
        `train(batches, factory)` it has the optimizers and schedulers of that run, unless others
        are given, and the versions of weights that the run still reads; a save then drains it.
        """
        training = self._training
        return Checkpoint(
            self._model,
            self._share,
            self,
            optimizers=training.optimizers if optimizer is None else [optimizer],
            schedulers=training.schedulers if scheduler is None else [scheduler],
            scaler=scaler,
            data=data,
            versions=training.versions(self.named_parameters()),
            check_complete=self._check_savable,
        )

    # -- training and evaluation

    def step(
        self,
        batch: Any,
        target: Any = None,
        *,
        accumulate: bool = False,
        scaler: GradScaler | None = None,
        everywhere: bool = False,
    ) -> Any:
        """Run one training step on a minibatch; gradients are left on the parameters, for an
        optimizer.

        batch        The minibatch, like `sample_input` or one of `shapes`, of at most as many
                     samples: the same on every rank of a pipeline. Each replica gives its own of
                     the same shape and size.
        target       What goes to the loss function, likewise.
        accumulate   More minibatches follow before the update: gradients are put aside, and ranks
                     exchange none. The step that ends it adds them.
        scaler       A GradScaler: gradients are those of the scaled loss. If they overflow on one
                     rank, they do on all, so that all skip the update.
        everywhere   Return the result on every rank.

        Returns the loss of the minibatch, over all replicas, where the last stage runs, and None on
        other ranks. If the loss function returns a loss and something else, it is the pair of the
        loss and what came with it, joined in the order of the batch.

        A batch is cut into microbatches of the planned size, and what is left over is one more,
        which counts by its samples. Where the loss function returns the mean over samples, the loss
        is the mean over all samples of the batch; see `loss_reduction` for sums and for weights.

        Gradients are those of that loss; they are added to what the parameters hold. Modules
        are in the mode that `.train()` and `.eval()` have put them in, the same on every rank. For
        modes other than the planned ones the model is captured once more and cut like the plan,
        whose figures do not hold for them.

        Under an asynchronous schedule, after `train(optimizer=factory)`, weights are updated
        instead, and minibatches follow each other without emptying the pipeline: the loss is that
        of a minibatch given before, and None while the pipeline fills.
        """
        if self.plan.schedule.weight_versions != "synchronous":
            flags = {
                "accumulate=True": accumulate,
                "a scaler": scaler is not None,
                "everywhere=True": everywhere,
            }
            return self._training.step(batch, target, flags)
        # What `train` has updated early may still have to be rolled back, and this step reads the
        # weights.
        self._training.validate()
        return self._step.take(
            batch, target, accumulate=accumulate, scaler=scaler, everywhere=everywhere
        )

    @contextmanager
    def record(self) -> Iterator[RunRecorder]:
        """Record the steps of a block: `with pipeline.record() as run`, and behind it
        `run.save("run.json")` for `pipecompile compare`.

        Of an asynchronous schedule it records the minibatches that follow each other: the pipeline
        is drained before and after the block.

        Of each action: when it began, for how long it waited for a message, when it ended; what is
        sent; on GPUs the peak of the allocator, whose statistics it resets. Every rank enters the
        block and leaves it. `run.run` is the result, on rank 0.
        """
        # To compare clocks ranks exchange messages, with which none of those in flight may mix.
        self.drain()
        self._runner.meet("a recording")
        place, device = self._share.place, self._runner.device
        with RunRecorder().recording(self.plan, place, device, self._recorders) as run:
            yield run
            self.drain()
            self._runner.meet("the end of a recording")

    # What inference mode makes could not be saved by a later step, nor be captured.
    @torch.inference_mode(False)
    def evaluate(self, batch: Any, target: Any = None) -> Any:
        """Return the model's output in eval mode, without gradients; None on ranks without the last
        stage.

        With a `target` it is instead what `step` would return: the loss of all samples and all
        replicas, or the pair of that and of what else the loss function returns, joined. It is
        given on all ranks or on none. To get outputs and the loss from one run, let the loss
        function return (loss, output).

        A batch may have any number of samples, also more than planned. Outputs are what the model
        computes in eval mode while gradients are on, even if it takes a shortcut without them.
        """
        self.drain()
        return self._evaluation.take(batch, target)

    def clip_grad_norm_(
        self,
        max_norm: float | Tensor,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale all gradients so that their norm, over all ranks, is at most `max_norm`.

        Returns the norm before, the same on every rank: that of the unsplit model's gradients. A
        tied parameter counts once. After `step`, and with a scaler after its `unscale_`.
        InputError, on every rank, for a norm that is no number or infinite, if that is asked for.
        """
        refuse_without_steps(self.plan.schedule, "clip_grad_norm_() is for what a step leaves")
        with self._runner.refusing_together(f"the clipping after {self.steps} steps"):
            rule, order = UpdateRule.of(max_norm), norm_type_of(norm_type)
        name = f"the clipping to {rule.max_norm} by norm {order} after {self.steps} steps"
        name += ", with error_if_nonfinite" if error_if_nonfinite else ""
        with self._runner.watched_together(name):
            norm = self._begin_norm(order).wait(self._runner.deadline)
        if error_if_nonfinite and not norm.isfinite():
            raise InputError(
                f"the norm of the gradients is {norm.item()}, so that they cannot be clipped; "
                "leave the update out, or clip without error_if_nonfinite"
            )
        rule.apply(gradient_parts(self.parameters()), norm)
        return norm

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The processes that hold the same stages with other data; None if nobody else does."""
        return self._share.place.replica_group

    def register_comm_hook(
        self, state: Any, hook: Callable[[Any, Any], torch.futures.Future[Any]]
    ) -> None:
        """Let `hook(state, bucket)` make the mean of gradients over replicas, as
        DistributedDataParallel does: such as torch's `bf16_compress_hook` with
        `pipeline.replica_group` as its state.

        It is called once a step for each bucket of gradients, one after the other, and returns a
        future of the mean. Every rank registers it. InputError without replicas, with sharded
        stages, and under asynchronous schedules.
        """
        self._runner.hook_into_sums(CommunicationHook(state, hook))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this process, or set them to zeros, and drop those that steps have
        put aside.
        """
        self._step.clear()
        for parameter in self._programs.planned.parameters:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = torch.zeros_like(parameter.grad)

    @overload
    def train(self, mode: bool = True) -> Self: ...

    @overload
    def train(
        self,
        *,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> Iterator[Any]: ...

    @overload
    def train(
        self,
        batches: Iterable[Any],
        /,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        *,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> Iterator[Any]: ...

    def train(
        self,
        mode: Any = True,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        *,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> Any:
        """Put all modules, also a loss that is one, into train mode or into eval mode; or train on
        many minibatches:

            for loss in pipeline.train(batches, lambda parameters: SGD(parameters, lr=0.1)):

        batches      Pairs of an input and a target, each like those of `step`, on every rank.
        optimizer    Makes an optimizer of a list of parameters; it is called once for each stage.
        scheduler    Makes a scheduler of an optimizer's learning rate, stepped after each update.
        max_norm     All gradients of an update are scaled so that their norm is at most that.
        skip_nonfinite   An update is left out on all ranks if a gradient on one of them has a NaN
                     or an infinity.

        Returns an iterator of what `step` returns. Under an asynchronous schedule minibatches
        follow each other without emptying the pipeline, and weights are updated meanwhile; one call
        is one run, which begins with the weights that there are; without `batches`, `step` gives it
        minibatches. Under others it steps; a plan with `post_validation` lets ranks begin the next
        step meanwhile. Modules stay in their modes.
        """
        if optimizer is None:
            if not isinstance(mode, bool) or scheduler or max_norm is not None or skip_nonfinite:
                raise InputError(
                    "train() has no function that makes optimizers, which a run needs; write "
                    "train(batches, lambda parameters: torch.optim.SGD(parameters, lr=0.1)), or "
                    "train(True) and train(False) alone for modes"
                )
            self.drain()
            self._target.model.train(mode)
            if isinstance(self._target.loss_fn, nn.Module):
                self._target.loss_fn.train(mode)
            return self
        steps = PipelineSteps(
            self._step.take,
            self.zero_grad,
            lambda: gradient_parts(self.parameters()),
            self._begin_norm,
            lambda norm: norm.wait(self._runner.deadline),
            lambda: self._runner.watched(f"the update after {self.steps} steps"),
        )
        rule = UpdateRule(max_norm, skip_nonfinite)
        return self._training.begin(mode, optimizer, scheduler, rule, steps)

    def drain(self) -> None:
        """Let the minibatches in flight go back, of a run that `train` has begun, and validate its
        last update. Every rank calls it after the same loss; the run goes on as if nobody had.
        """
        # What follows may exchange weights, which lost messages would be taken for.
        if self._runner.watch is not None:
            self._runner.watch.refuse_after_loss()
        self._training.drain()

    def meet(self, what: str) -> None:
        """Wait until all ranks come to `what`, within `step_timeout`; for checkpoints."""
        self._runner.meet(what)

    def eval(self) -> Self:
        """Put all modules into eval mode."""
        return self.train(False)

    # -- a model that was built on the meta device

    def _set_values(self, weights: str | Path | None) -> None:
        """Read the values from `weights`, or let modules set them; InputError if some are left."""
        if weights is None:
            initialise(self._model, self._share, self.seed)
        elif not (Path(weights) / ".metadata").is_file():  # torch.distributed.checkpoint's own
            self.load_safetensors(weights)
        elif is_of_a_run(weights):
            self.checkpoint().load(weights)
        else:
            self._load_checkpoint_weights(weights)
        read = () if weights is None else self._model.state_dict()
        # Before ranks send each other values: a NaN of one that nothing has set would spread.
        check_all_set(self._model, self._share, read)
        if self._share.is_distributed:
            self._runner.equalise()

    def _check_savable(self) -> None:
        self.drain()
        self._step.check_none_aside()

    def _begin_norm(self, norm_type: float = 2.0) -> NormOnItsWay:
        """Begin to reduce the norm of all gradients over ranks; a tied parameter counts once."""
        return self._runner.begin_norm(self._counted_gradients(), norm_type)
