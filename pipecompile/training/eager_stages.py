"""The stages of a program as the runtime runs them, with the loss behind the last one.

runner.py asks for all of them in one process, and for those of a rank under torchrun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipecompile.errors import InputError, PipecompileError
from pipecompile.frontend.signature import OutputStructure
from pipecompile.frontend.target import LossFunction, Target
from pipecompile.runtime.stage import EagerStage
from pipecompile.training.program import Program

__all__ = ["local_stages", "loss_of", "rank_stages", "tied_parameters"]


def local_stages(program: Program, target: Target) -> list[EagerStage]:
    """Return all stages, for one process.

    A tied parameter is one tensor, whose gradient is summed stage by stage.
    """
    tied_to_earlier: list[list[nn.Parameter]] = [[] for _ in program.stages]
    tied_to_later: list[list[nn.Parameter]] = [[] for _ in program.stages]
    for name, parameter in tied_parameters(program, target.model_with_loss).items():
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
        loss=partial(loss_of, program.outputs, target.trained_by) if is_last else None,
        loss_module=target.loss_module if is_last else None,
        buffers=stage.buffers,
        random=stage.random,
        tied_to_earlier=tied_to_earlier,
        tied_to_later=tied_to_later,
        precision=nullcontext if target.autocast is None else target.precision,
    )


def loss_of(
    structure: OutputStructure, loss: LossFunction, outputs: Sequence[Tensor], wanted: Any
) -> Any:
    """Return what the loss function makes of the output tensors of a microbatch; InputError with
    what it raised as the cause.
    """
    output = structure.unflatten(outputs)
    try:
        return loss(output, wanted)
    # Who catches these wants them as they are: less memory is asked for then.
    except (PipecompileError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        if wanted is None:
            raise InputError(
                f"loss_fn cannot do without a target ({raised}); give the step one: "
                "step(batch, target)"
            ) from error
        given = [tree_map_only(Tensor, _description, value) for value in (output, wanted)]
        raise InputError(
            f"loss_fn raised {raised}; for a microbatch it was given the output {given[0]} and the "
            f"target {given[1]}"
        ) from error


def _description(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
