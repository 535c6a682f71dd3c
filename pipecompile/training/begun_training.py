"""The run that `Pipeline.train` has begun last: its optimizers, and what is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from pipecompile.training.continuous_training import ContinuousTraining, PipelineParts
from pipecompile.training.run_conditions import refuse_without_gradients
from pipecompile.training.saved_versions import SavedVersions
from pipecompile.training.stage_optimizers import (
    OptimizerFactory,
    SchedulerFactory,
    StageOptimizers,
    owned_parameters,
)
from pipecompile.training.synchronous_training import train_by_steps
from pipecompile.training.training_run import TrainingRun

__all__ = ["BegunTraining"]


class BegunTraining:
    """Trains a pipeline of these `parts` on minibatches; `run` counts them."""

    def __init__(self, parts: PipelineParts, run: TrainingRun) -> None:
        self._parts = parts
        self._run = run
        self._optimizers: StageOptimizers | None = None
        self._continuous: ContinuousTraining | None = None

    def begin(
        self,
        batches: Iterable[Any],
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        max_norm: float | None,
        *,
        step: Callable[[Any, Any], Any],
        clip: Callable[[float], object],
    ) -> Iterator[Any]:
        """Return the losses of minibatches as they are trained on: without emptying the pipeline
        under an asynchronous schedule, and else by `step` and `clip`.
        """
        if self._continuous is not None:
            self._continuous.end()
        self._continuous = None
        parts, schedule = self._parts, self._parts.plan.schedule
        refuse_without_gradients(schedule)
        if schedule.weight_versions != "synchronous":
            parts.runner.refuse_in_flight(max_norm)
        owned = owned_parameters(parts.programs.planned, parts.target.model_with_loss, parts.share)
        made = self._optimizers = StageOptimizers.made_by(optimizer, scheduler, owned)
        if schedule.weight_versions == "synchronous":
            own_clip = None if max_norm is None else partial(clip, max_norm)
            return train_by_steps(batches, made, step, self._run.zero_grad, own_clip)
        self._continuous = ContinuousTraining(parts, self._run, batches, made, max_norm)
        return self._continuous

    def drain(self) -> None:
        """Let the minibatches in flight go back."""
        if self._continuous is not None:
            self._continuous.drain()

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
