"""The run that `Pipeline.train` has begun last: its optimizers, and what is in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from pipecompile.errors import InputError
from pipecompile.ir.schedule import Schedule
from pipecompile.runtime.update_rule import UpdateRule
from pipecompile.training.continuous_training import ContinuousTraining
from pipecompile.training.early_training import EarlyTraining
from pipecompile.training.pipeline_parts import PipelineParts
from pipecompile.training.run_conditions import refuse_without_gradients
from pipecompile.training.saved_versions import SavedVersions
from pipecompile.training.stage_optimizers import (
    OptimizerFactory,
    SchedulerFactory,
    StageOptimizers,
    owned_parameters,
)
from pipecompile.training.synchronous_training import PipelineSteps, train_by_steps
from pipecompile.training.training_run import TrainingRun

__all__ = ["BegunTraining"]


class BegunTraining:
    """Trains a pipeline of these `parts` on minibatches; `run` counts them."""

    def __init__(self, parts: PipelineParts, run: TrainingRun) -> None:
        self._parts = parts
        self._run = run
        self._optimizers: StageOptimizers | None = None
        self._continuous: ContinuousTraining | None = None
        self._early: EarlyTraining | None = None

    def begin(
        self,
        batches: Iterable[Any] | Literal[True],
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        rule: UpdateRule,
        steps: PipelineSteps,
    ) -> Iterator[Any]:
        """Return the losses of minibatches as they are trained on: without emptying the pipeline
        under an asynchronous schedule, and else by `steps`. Updates follow the `rule`. With True
        for `batches`, which is what `train` is given for none, they come by `step`.
        """
        _check_batches(batches, self._parts.plan.schedule)
        if self._parts.runner.watch is not None:
            self._parts.runner.watch.refuse_after_loss()
        if self._continuous is not None:
            self._continuous.end()
        self.validate()
        self._continuous = self._early = None
        # What was begun before has ended by now, with its own optimizers: minibatches in flight
        # went back, and an update that nobody had validated was made right.
        parts, schedule = self._parts, self._parts.plan.schedule
        refuse_without_gradients(schedule)
        if schedule.weight_versions != "synchronous":
            parts.runner.refuse_in_flight(rule)
        owned = owned_parameters(parts.programs.planned, parts.target.model_with_loss, parts.share)
        made = self._optimizers = StageOptimizers.made_by(optimizer, scheduler, owned)
        if schedule.weight_versions != "synchronous":
            given = None if batches is True else batches
            self._continuous = ContinuousTraining(parts, self._run, given, made, rule.max_norm)
            return self._continuous
        assert batches is not True, "synchronous schedules have no run of steps"
        if not parts.plan.options.post_validation or parts.runner.watch is None:
            # One process knows the norm at once.
            return train_by_steps(batches, made, steps, rule)
        parts.runner.refuse_early_updates()
        # Kept, since its last update may still be wrong when a caller looks at the weights:
        # whatever reads them validates it first.
        self._early = EarlyTraining(made, steps, rule)
        return self._early.losses(batches)

    def step(self, batch: Any, target: Any, flags: Mapping[str, bool]) -> Any:
        """Train on one more minibatch of a run that has begun without batches; return the loss of
        one that was given before, as `ContinuousTraining.step` does. InputError for any of `flags`,
        which are for steps that leave gradients.
        """
        name = self._parts.plan.schedule.name
        refused = [flag for flag, is_set in flags.items() if is_set]
        if self._continuous is None:
            raise InputError(
                f"schedule {name!r} updates weights while microbatches are in flight, so a step "
                "leaves no gradients, and the run must know its optimizer before; call "
                "pipeline.train(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)) "
                "first, or write `for loss in pipeline.train(batches, factory)`, or plan with a "
                "synchronous schedule such as '1f1b'"
            )
        if refused:
            raise InputError(
                f"step() is given {' and '.join(refused)}, but under schedule {name!r} it leaves "
                "no gradients, and minibatches share the pipeline; leave it out, or plan with a "
                "synchronous schedule such as '1f1b'"
            )
        return self._continuous.step(batch, target)

    def drain(self) -> None:
        """Let the minibatches in flight go back, and validate the last update."""
        if self._continuous is not None:
            self._continuous.drain()
        self.validate()

    def validate(self) -> None:
        """Make the last update the right one, if that is not known yet."""
        if self._early is not None:
            self._early.drain()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the run, one for each stage."""
        return [] if self._optimizers is None else list(self._optimizers.optimizers.values())

    @property
    def schedulers(self) -> list[LRScheduler]:
        """The schedulers of their rates."""
        return [] if self._optimizers is None else list(self._optimizers.schedulers.values())

    def versions(self, named: Iterable[tuple[str, nn.Parameter]]) -> SavedVersions | None:
        """Return the versions of the `named` parameters, for a checkpoint; None of a run that has
        one version at a time.
        """
        return None if self._continuous is None else SavedVersions(self._continuous, named)


def _check_batches(batches: object, schedule: Schedule) -> None:
    """Raise InputError unless a run can begin with `batches`, or without any if that is True."""
    if batches is True:
        if schedule.weight_versions == "synchronous":
            raise InputError(
                f"train(optimizer=…) has no batches, but under schedule {schedule.name!r} a step "
                "leaves gradients for an optimizer of yours; call step(batch, target) and step it, "
                "or give batches"
            )
    elif not isinstance(batches, Iterable):
        raise InputError(
            f"batches is a {type(batches).__name__}; give pairs (input, target), such as a "
            "DataLoader yields"
        )
