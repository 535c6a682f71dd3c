"""One forward of each stage before tensor parallelism divides it, and one after it, compared.

Tensor parallelism leaves parts of activations on the ranks. What is computed between a column-
parallel and a row-parallel layer must treat each feature by itself: a softmax over all of them,
for example, would be wrong, and nothing else would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.graph.model_state import swapped_state
from pipecompile.graph.random_streams import StreamKey
from pipecompile.runtime.distributed_pipeline import SizedStages
from pipecompile.runtime.messages import BoundaryShape
from pipecompile.training.program import Program

__all__ = ["TrialOutputs", "check_trial", "trial_outputs"]

TrialOutputs = dict[int, tuple[Tensor, ...]]


def trial_outputs(
    program: Program,
    stages: SizedStages,
    device: torch.device,
    whole: Callable[[int], AbstractContextManager[object]],
) -> TrialOutputs:
    """Return the outputs of each stage of this rank for inputs that are the same on all ranks.

    Stages run in `whole(index)`, and their buffers stay as they are. InputError if one cannot run.
    """
    outputs: TrialOutputs = {}
    for index, stage in stages.stages.items():
        inputs = _inputs(stages.boundaries[index], device)
        copies = {id(buffer): buffer.clone() for buffer in program.stages[index].buffers}
        try:
            with swapped_state(stage.module, copies), whole(index):
                outputs[index] = stage.evaluate(inputs, StreamKey(0, 0, 0))
        except Exception as error:
            message = f"stage {index} cannot run as parallelize has left it: {error}"
            raise InputError(message) from error
    return outputs


def check_trial(
    outputs: TrialOutputs, expected: TrialOutputs, autocast: torch.dtype | None
) -> None:
    """Raise InputError if outputs differ by more than rounding."""
    for index, values in outputs.items():
        for value, wanted in zip(values, expected[index], strict=True):
            if not _is_close(value, wanted, autocast):
                raise InputError(
                    f"stage {index} computes something else as parallelize has left it: between a "
                    "column-parallel layer and its row-parallel one each rank has a part of the "
                    "features, over which nothing may be normalised or summed; leave such layers "
                    "whole, or give the first one use_local_output=False"
                )


def _inputs(boundary: Sequence[BoundaryShape], device: torch.device) -> list[Tensor]:
    """Return inputs for a stage: normal numbers, and zeros for integers, which may be indices."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for shape in boundary:
        value = shape.zeros(torch.device("cpu"))
        if value.is_floating_point():
            value.normal_(generator=generator)
        inputs.append(value.to(device))
    return inputs


def _is_close(value: Tensor, wanted: Tensor, autocast: torch.dtype | None) -> bool:
    if not value.is_floating_point():
        return True  # rounding may turn an index, for example of a maximum
    rounding = max(torch.finfo(kind).eps for kind in (value.dtype, autocast or value.dtype))
    known = wanted.isfinite()  # zeros for a mask may leave nothing to attend to
    distance, size = (value - wanted)[known].double().norm(), wanted[known].double().norm()
    # In float32 that is 3e-4 of the norm: far above rounding, and far below a softmax that saw
    # only a part of the features.
    # Half of the digits: sums have another order.
    return bool(distance <= rounding**0.5 * size)
