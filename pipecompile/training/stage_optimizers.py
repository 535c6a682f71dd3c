"""One optimizer for each stage of this process, and what may go with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
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
            # A head on stage 3 that is tied to the embedding of stage 0 is listed under 0 on both
            # ranks: each steps its own copy, and only when the sum over both stages is there.
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
        parameters, and for what cannot be stepped by itself.
        """
        _refuse_what_is_no_factory("optimizer", optimizer)
        # Stages have an optimizer each because under an asynchronous schedule each steps at a
        # moment of its own, for the version of its weights that comes next.
        optimizers = {
            stage: _checked(optimizer(list(parameters)), parameters)
            for stage, parameters in owned.items()
            if parameters
        }
        schedulers = {}
        if scheduler is not None:
            _refuse_what_is_no_factory("scheduler", scheduler)
            schedulers = {
                stage: _checked_scheduler(scheduler(each)) for stage, each in optimizers.items()
            }
        return cls(optimizers, schedulers)

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self.optimizers.values():
            optimizer.step()

    def step_schedulers(self) -> None:
        """Step all schedulers, of which an update that was left out counts as one."""
        for scheduler in self.schedulers.values():
            scheduler.step()


def _checked(made: Any, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return `made`, or raise InputError if it is no optimizer of these parameters only."""
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer factory returned a {type(made).__name__}; return an optimizer of the "
            "parameters that it is given: lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if needed := _needed_by_step(made):
        raise InputError(
            f"{type(made).__name__} computes the loss of its stage's parameters again as it steps "
            f"({needed}), but a stage alone has no loss; choose an optimizer that steps with the "
            "gradients that there are"
        )
    own = set(parameters)
    if not all(p in own for group in made.param_groups for p in group["params"]):
        raise InputError(
            "the optimizer factory returned an optimizer of other parameters than it was given; it "
            "is called once for each stage, and makes a new optimizer of that stage's parameters"
        )
    return made


def _checked_scheduler(made: Any) -> LRScheduler:
    """Return `made`, or raise InputError if it is no scheduler that steps by itself."""
    if not isinstance(made, LRScheduler):
        raise InputError(
            f"the scheduler factory returned a {type(made).__name__}; return a scheduler of the "
            "optimizer that it is given: lambda optimizer: torch.optim.lr_scheduler.StepLR("
            "optimizer, 10)"
        )
    if needed := _needed_by_step(made):
        raise InputError(
            f"{type(made).__name__} steps by a value that it is given ({needed}), but schedulers "
            "follow updates, whose loss the last stage alone has; choose one that counts them"
        )
    return made


def _refuse_what_is_no_factory(kind: str, given: Any) -> None:
    if not callable(given):
        raise InputError(
            f"the {kind} is of type {type(given).__name__}, but train(batches, …) takes a function "
            "that makes one for each stage, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )


def _needed_by_step(made: Any) -> str:
    """Return the names of the arguments without which `made` cannot step."""
    # LBFGS cannot step without `closure`, and ReduceLROnPlateau not without `metrics`.
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return ", ".join(
        argument.name
        for argument in signature(made.step).parameters.values()
        # A scheduler wraps the step of its optimizer, whose signature then has `self` too.
        if argument.default is Parameter.empty
        and argument.kind not in variadic
        and argument.name != "self"
    )
