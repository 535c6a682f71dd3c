"""The stages of a program as the runtime runs them, with the loss behind the last one.

program_stages.py asks for all of them in one process, and for those of a rank under torchrun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise

from torch import nn

from pipecompile.frontend.target import Target
from pipecompile.runtime.stage import EagerStage
from pipecompile.training.program import Program
from pipecompile.training.user_loss import UserLoss

__all__ = ["local_stages", "rank_stages", "tied_parameters"]


def local_stages(program: Program, target: Target) -> list[EagerStage]:
    """Return all stages, for one process.

    A tied parameter is one tensor, whose gradient is summed stage by stage.
    """
    tied_to_earlier: list[list[nn.Parameter]] = [[] for _ in program.stages]
    tied_to_later: list[list[nn.Parameter]] = [[] for _ in program.stages]
    for name, parameter in tied_parameters(program, target.model_with_loss).items():
        # A parameter of the stages (0, 2, 3) is handed on from 3 to 2 to 0: each adds its own
        # gradient to what comes from behind, as one backward through the unsplit model would.
        for earlier, later in pairwise(program.ties[name].stages):
            tied_to_later[earlier].append(parameter)
            tied_to_earlier[later].append(parameter)
    return [
        _stage(program, target, index, tied_to_earlier[index], tied_to_later[index])
        for index in range(len(program.stages))
    ]


def rank_stages(program: Program, target: Target, own: Iterable[int]) -> dict[int, EagerStage]:
    """Return the `own` stages of a rank, by index.

    Gradients of tied parameters are summed over ranks at the end of a step.
    """
    # Without a chain: over ranks it would take a message for each microbatch, and the sum at the
    # end takes one in all.
    return {index: _stage(program, target, index) for index in own}


def tied_parameters(program: Program, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that several stages read, by name."""
    by_name = dict(model.named_parameters())
    return {
        n: by_name[n] for n, tie in program.ties.items() if n in by_name and len(tie.stages) > 1
    }


def _stage(
    program: Program,
    target: Target,
    index: int,
    tied_to_earlier: Sequence[nn.Parameter] = (),
    tied_to_later: Sequence[nn.Parameter] = (),
) -> EagerStage:
    stage, is_last = program.stages[index], index == len(program.stages) - 1
    return EagerStage(
        stage.module,
        gradient_inputs=stage.gradient_inputs,
        loss=_loss(program, target) if is_last else None,
        loss_module=target.loss_module if is_last else None,
        buffers=stage.buffers,
        random=stage.random,
        tied_to_earlier=tied_to_earlier,
        tied_to_later=tied_to_later,
        precision=nullcontext if target.autocast is None else target.precision,
    )


def _loss(program: Program, target: Target) -> UserLoss:
    written = frozenset(name for stage in program.stages for name in stage.written)
    return UserLoss(program.outputs, target, written, tuple(program.captured.set_names()))
