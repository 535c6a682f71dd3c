"""Values that must be whole on each rank, where tensor parallelism divides the work of a stage."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from pipecompile.errors import InputError

__all__ = ["whole_value"]


def whole_value(value: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Return all of `value`, which the node `name` has computed, on each rank that has a part.

    InputError unless it then has the `shape` that it has in the model.
    """
    if isinstance(value, DTensor):
        value = value.full_tensor()
    # A plain tensor may be a part as well: `parallelize_module` gives these unless told
    # otherwise.
    if tuple(value.shape) != shape:
        raise InputError(
            f"{name} has the shape {tuple(value.shape)} on this rank, but {shape} in the model: "
            "what leaves a stage, and what dropout draws for, must be whole; keep a column-parallel"
            " layer and its row-parallel one in one stage without dropout between them, or give the"
            " first one output_layouts=Replicate()"
        )
    return value
