"""Other data for a check than the sample's: other samples, and larger numbers.

sample        a b c d
other data    b b a a      another mean, and other rows
enlarged      16 b …       more than any maximum of the sample, likely
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipecompile.graph.restored_state import is_same_tensor

__all__ = ["FAR", "enlarged", "other_data"]

LARGER, FAR = 16.0, 4096.0
"""How much larger numbers are made: so that what is taken of all of them differs for sure, and so
that they exceed what a maximum may begin with. Powers of two, which change no digit."""


def other_data(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Return other samples for the same inputs: half of these, each twice, or other numbers if all
    samples are alike. `dims` are where inputs have the batch.
    """
    others = [
        tensor if dim is None else _halved(tensor, dim)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    if all(map(is_same_tensor, tensors, others)):
        return list(map(_changed, tensors))
    return others


def enlarged(
    tensors: Sequence[Tensor], dims: Sequence[int | None], factor: float = LARGER
) -> list[Tensor]:
    """Return larger numbers. Whole numbers may be indices, and stay; so does what has no batch,
    such as a temperature.
    """
    return [
        tensor if dim is None or _is_whole(tensor) else tensor * factor
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def _halved(tensor: Tensor, dim: int) -> Tensor:
    """Return each sample of one half twice, in the opposite order: another mean, and other rows."""
    size = tensor.shape[dim]
    index = torch.arange(size, device=tensor.device).flip(0) // 2
    return tensor.index_select(dim, index)


def _changed(tensor: Tensor) -> Tensor:
    """Return other numbers; whole ones only change places."""
    return tensor.flip(tuple(range(tensor.dim()))) if _is_whole(tensor) else 0.25 - tensor / 2


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
