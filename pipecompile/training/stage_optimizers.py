"""One optimizer for each stage of this process, and what may go with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from pipecompile.errors import InputError
from pipecompile.runtime.local_share import LocalShare
from pipecompile.training.program import Program

__all__ = ["OptimizerFactory", "SchedulerFactory", "StageOptimizers", "owned_parameters"]

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


def owned_parameters(
    program: Program, model: nn.Module, share: LocalShare
) -> dict[int, list[nn.Parameter]]:
    """Return the trained parameters of this process by the stage that owns them: the first one that
    reads them, which is the first stage for those that none reads. Every stage here has a list.
    """
    owned: dict[int, list[nn.Parameter]] = {stage: [] for stage in share.stages}
    for name, parameter in model.named_parameters():
        if share.holds(name) and parameter.requires_grad:
            tie = program.ties.get(name)
            owner = tie.owner if tie is not None and tie.stages else 0
            owned.setdefault(owner, []).append(parameter)
    return owned


@dataclass(frozen=True)
class StageOptimizers:
    """The optimizers by the stage whose parameters they step, and the schedulers of their rates.

    A rank that has a copy of an earlier stage's parameter has an optimizer for that too. Stages
    without trained parameters have none.
    """

    optimizers: Mapping[int, torch.optim.Optimizer]
    schedulers: Mapping[int, LRScheduler]

    @classmethod
    def made_by(
        cls,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        owned: Mapping[int, Sequence[nn.Parameter]],
    ) -> StageOptimizers:
        """Call the user's factories once for each stage; InputError for what is no optimizer of its
        parameters.
        """
        for name, factory in (("optimizer", optimizer), ("scheduler", scheduler)):
            if factory is not None and not callable(factory):
                raise InputError(
                    f"{name} is a {type(factory).__name__}, but must be a function that makes one "
                    f"for each stage: lambda {_MADE_OF[name]}: …"
                )
        optimizers = {
            stage: _checked(optimizer(list(parameters)), parameters)
            for stage, parameters in owned.items()
            if parameters
        }
        schedulers = {}
        if scheduler is not None:
            schedulers = {stage: scheduler(each) for stage, each in optimizers.items()}
        return cls(optimizers, schedulers)

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self.optimizers.values():
            optimizer.step()

    def step_schedulers(self) -> None:
        """Step all schedulers, of which an update that was left out counts as one."""
        for scheduler in self.schedulers.values():
            scheduler.step()


# What the factories are called with.
_MADE_OF = {"optimizer": "parameters", "scheduler": "optimizer"}


def _checked(made: Any, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return `made`, or raise InputError if it is no optimizer of these parameters only."""
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer factory returned a {type(made).__name__}; return an optimizer of the "
            "parameters that it is given: lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if isinstance(made, torch.optim.LBFGS):
        raise InputError(
            "LBFGS evaluates the loss several times in a step, which a pipeline takes once; choose "
            "an optimizer that needs gradients only"
        )
    own = set(parameters)
    if not all(p in own for group in made.param_groups for p in group["params"]):
        raise InputError(
            "the optimizer factory returned an optimizer of other parameters than it was given; it "
            "is called once for each stage, and makes a new optimizer of that stage's parameters"
        )
    return made
