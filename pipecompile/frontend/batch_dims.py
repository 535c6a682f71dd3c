"""Where tensors have the batch: the dimensions along which inputs are cut and outputs are joined.

batch_dim                     inputs                           cut along
0                             x (8, 5)                         0
1                             x (5, 8, 3)                      1
{"x": 1, "masked": 0}         x (5, 8, 3), masked (8, 5)       1 and 0
{"x": 1, "table": None}       x (5, 8, 3), table (5, 5)        1; the table is given whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import Tensor

from pipecompile.errors import InputError

__all__ = ["BatchDim", "BatchDims", "batch_size", "input_dims", "output_dim", "part_of"]

BatchDim = int | Mapping[str, int | None]
"""The dimension of all inputs, or that of each by its name: 0 where none is given, None for what
every microbatch is given whole."""

BatchDims = Sequence[int | None]
"""The dimension of each tensor, None for what has no batch."""


def input_dims(given: BatchDim, tensors: Mapping[str, Tensor]) -> tuple[int | None, ...]:
    """Return the dimension of the batch in each of the input tensors, by name.

    A tensor without dimensions has none. InputError for other names and other dimensions.
    """
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(tensors, given)
    unknown = [name for name in by_name if name not in tensors]
    if unknown:
        raise InputError(
            f"batch_dim names {unknown[0]!r}, but the input tensors are {', '.join(tensors)}"
        )
    return tuple(_input_dim(name, t, by_name.get(name, 0)) for name, t in tensors.items())


def _input_dim(name: str, tensor: Tensor, dim: int | None) -> int | None:
    if dim is None or not tensor.dim():
        return None
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise InputError(
            f"batch_dim={dim!r} is no dimension of {name}, which has the shape "
            f"{tuple(tensor.shape)}; give one for each input that differs from the others, such as "
            f"batch_dim={{{name!r}: 0}}, or None for what every microbatch is given whole"
        )
    # −1 becomes 1 where there are two dimensions, so that inputs can be compared.
    return dim % tensor.dim()


def batch_size(names: Sequence[str], tensors: Sequence[Tensor], dims: BatchDims) -> int:
    """Return how many samples the inputs have; InputError if they disagree, or if none has any."""
    if not tensors:
        raise InputError(
            "the sample input has no tensor; give tensors, with the batch as dimension 0 (an array "
            "of numpy by torch.from_numpy)"
        )
    sizes = {t.shape[dim] for t, dim in zip(tensors, dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(names, tensors, strict=True))
        given = dict(zip(names, dims, strict=True))
        raise InputError(
            f"the inputs have no common number of samples: with the batch in dimensions {given} "
            f"they are {shapes}; say with batch_dim= where each has the batch"
        )
    size = sizes.pop()
    if not size:
        raise InputError("the inputs have no samples; give a batch of some, or leave it out")
    return size


def part_of(tensor: Tensor, dim: int | None, begin: int, size: int) -> Tensor:
    """Return `size` samples of an input from `begin` on; all of it if it has no batch.

    Along another dimension than 0 it is contiguous: strides of a view would tell how many samples
    the whole batch has, and a graph that asks for strides would hold for that number only.
    """
    if dim is None:
        return tensor
    part = tensor.narrow(dim, begin, size)
    return part.contiguous() if dim else part


def output_dim(value: Tensor, inputs: BatchDims, samples: int | None = None) -> int | None:
    """Return the dimension in which an output has the batch, None if none is known to be it.

        inputs       output            joined along
        (time, N)    (time, N, 5)      1
        (time, N)    (N, 5)            0
        (N, time)    (N * time, 5)     0: the rows of a sample lie together
        (time, N)    (time * N, 5)     nothing: rows of different samples alternate

    While a forward is recorded, sizes that grow with the batch are symbolic. Where all are numbers
    for so many `samples`, those of that size count, in the dimensions that inputs have it in.
    """
    known = {dim for dim in inputs if dim is not None}
    if samples is None:
        grows = [dim for dim, size in enumerate(value.shape) if not isinstance(size, int)]
    else:
        # With 8 samples in dimension 1 of the inputs, (5, 8) has them in 1; of (8, 8) nobody
        # knows; and (8, 4, 8) has them in 0, since no input has dimension 2 for them.
        likely = (dim for dim in sorted({0, *known}) if dim < value.dim())
        grows = [dim for dim in likely if value.shape[dim] == samples]
    # Also a multiple of the batch: along dimension 0 the rows of a sample lie together, so that
    # parts joined there have the order of the whole.
    if known == {0} and 0 in grows:
        return 0
    return grows[0] if len(grows) == 1 and _is_plain(value.shape[grows[0]]) else None


def _is_plain(size: int | torch.SymInt) -> bool:
    """Return whether a size is the number of samples, and no multiple of it."""
    return isinstance(size, int) or isinstance(size.node.expr, sympy.Symbol)
