"""How far steps of one model are apart where a GPU's kernels add in another order in each run.

    model      step, step, step    differ by d in a tensor, since kernels leave the order open
    graph      step                may differ by four times d from one of them, and by rounding

Only differences as small as those of rounding are accepted: those of a model that draws numbers
which torch does not seed are far larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

__all__ = ["is_within_noise"]

FACTOR = 4  # times the largest difference of three steps, since others may differ by more
ROUNDING = 4  # times the spacing of the type at the largest element
LARGEST = 2**-6  # times the largest element of all: rounding is less, in bfloat16 too


def is_within_noise(repeats: Sequence[Mapping[str, Tensor]], found: Mapping[str, Tensor]) -> bool:
    """Return whether the tensors `found` of a graph are as near to those of one of the `repeats` of
    the model's step as these are to each other.

    False if all repeats are equal, or too far apart for rounding.
    """
    first = repeats[0]
    if any(each.keys() != first.keys() for each in (*repeats, found)):
        return False
    if any(_kind(found[name]) != _kind(value) for name, value in first.items()):
        return False
    noise = {
        name: max(_distance(one[name], other[name]) for one, other in combinations(repeats, 2))
        for name in first
    }
    size = max((_size(value) for value in first.values()), default=0.0)
    if not 0 < max(noise.values(), default=0.0) <= LARGEST * size:
        return False
    return all(
        min(_distance(each[name], found[name]) for each in repeats)
        <= FACTOR * noise[name] + _rounding(value)
        for name, value in first.items()
    )


def _kind(value: Tensor) -> tuple[torch.Size, torch.dtype]:
    return value.shape, value.dtype


def _rounding(value: Tensor) -> float:
    """Return what rounding may change of a tensor: nothing of whole numbers."""
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return ROUNDING * torch.finfo(value.dtype).eps * _size(value)


def _size(value: Tensor) -> float:
    """Return the magnitude of the largest finite element."""
    return _largest(_wide(value).abs())


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two elements; infinity where only one of them is finite."""
    left, right = _wide(one), _wide(other)
    is_same = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs().where(~is_same, 0)
    return float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0


def _largest(magnitudes: Tensor) -> float:
    finite = magnitudes.where(magnitudes.isfinite(), 0)
    return float(finite.max()) if finite.numel() else 0.0


def _wide(value: Tensor) -> Tensor:
    # Whole numbers too, whose difference would wrap around or not be defined.
    return value.to(torch.promote_types(value.dtype, torch.float64))
