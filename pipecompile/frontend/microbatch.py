"""Microbatches: a minibatch split into parts, and their results merged into one.

A minibatch of N samples is cut into microbatches of the planned size b. What is left over is one
more microbatch, the remainder:

    N = 10, b = 4        sizes 4, 4, 2      the remainder has 2 samples
    N = 3,  b = 4        sizes 3            the remainder is all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.batch_dims import BatchDims, part_of

__all__ = ["InputShapes", "MicrobatchSizes", "shape_of"]

InputShapes = Sequence[tuple[int, ...]]
"""The shapes of a model's input tensors in one microbatch."""


@dataclass(frozen=True)
class MicrobatchSizes:
    """How many samples each microbatch of a minibatch has, and how many the plan was made for."""

    planned: int
    sizes: tuple[int, ...]

    @staticmethod
    def of(
        tensors: Sequence[Tensor], names: Sequence[str], shapes: InputShapes, dims: BatchDims
    ) -> MicrobatchSizes:
        """Return the sizes for the minibatch `tensors`, where microbatches of `shapes` are planned
        that differ in the samples at most.

        `dims` are where the tensors have the batch. InputError if there is no sample, or if inputs
        disagree.
        """
        samples: dict[str, int] = {}
        planned_sizes = set()
        for tensor, name, planned, dim in zip(tensors, names, shapes, dims, strict=True):
            if dim is not None:  # else it says nothing about the batch
                samples[name] = tensor.shape[dim]
                planned_sizes.add(planned[dim])
        if len(set(samples.values())) != 1:
            raise InputError(f"the inputs hold different numbers of samples: {samples}")
        (total,), (size,) = set(samples.values()), planned_sizes
        if not total:
            raise InputError(f"{min(samples)} has no samples; leave an empty batch out")
        remainder = total % size
        return MicrobatchSizes(size, (size,) * (total // size) + (remainder,) * (remainder > 0))

    @property
    def samples(self) -> int:
        """How many samples the minibatch has."""
        return sum(self.sizes)

    @property
    def remainder(self) -> int | None:
        """The size of the last microbatch if it is smaller than planned; else None."""
        return None if self.sizes[-1] == self.planned else self.sizes[-1]

    @property
    def planned_microbatches(self) -> float:
        """The minibatch in microbatches of the planned size; whole without a remainder."""
        return self.samples / self.planned

    def weight(self, microbatch: int) -> float:
        """Return the size of a microbatch over the planned one."""
        return self.sizes[microbatch] / self.planned

    def rows(self, tensors: Sequence[Tensor], dims: BatchDims) -> Sequence[Sequence[Tensor]]:
        """Return the tensors of each microbatch: parts along their dimension of `dims`, in
        proportion to the sizes; all of a tensor without one.
        """
        columns = map(self._parts, tensors, dims)
        return list(zip(*columns, strict=True))

    def _parts(self, tensor: Tensor, dim: int | None) -> Sequence[Tensor]:
        if dim is not None and tensor.shape[dim] != self.samples:
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be cut into microbatches of "
                f"{list(self.sizes)} samples; dimension {dim} must be {self.samples}"
            )
        begins = accumulate(self.sizes, initial=0)
        return [part_of(tensor, dim, *each) for each in zip(begins, self.sizes, strict=False)]

    def mean(self, scalars: Sequence[Tensor]) -> Tensor:
        """Return the mean over samples of what is a mean over those of each microbatch."""
        # Without weights: multiplying by 1 / M rounds otherwise than the mean of equal parts does.
        if self.remainder is None:
            return torch.stack(list(scalars)).mean(dim=0)
        parts = zip(scalars, self.sizes, strict=True)
        return torch.stack([value * (size / self.samples) for value, size in parts]).sum(dim=0)

    def merge(
        self, trees: Sequence[Any], scalar: Callable[[Sequence[Tensor]], Tensor] | None = None
    ) -> Any:
        """Return the results of the microbatches as one.

        Tensors are concatenated along dimension 0, and of scalars the mean over samples is taken,
        or what `scalar` makes of those of all microbatches. All else is taken from the first
        microbatch.
        """
        flat = [pytree.tree_flatten(tree) for tree in trees]
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        merged = [_merge_leaf(column, scalar or self.mean) for column in columns]
        return pytree.tree_unflatten(merged, flat[0][1])

    def join(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Return the results of the microbatches as one, along `dim`; of scalars their mean."""
        # A scalar is taken for a mean over samples, as metrics beside a loss are.
        return torch.cat(list(parts), dim) if parts[0].dim() else self.mean(parts)


def _merge_leaf(column: Sequence[Any], scalar: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(list(column)) if column[0].dim() else scalar(column)


def shape_of(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    declared: Sequence[InputShapes],
    dims: BatchDims,
) -> int:
    """Return the index of the declared shapes that a minibatch has, however many samples: their
    number is the size in the dimensions `dims`.

    InputError, which lists them, if it has none of these.
    """
    own = [tuple(tensor.shape) for tensor in tensors]
    for index, shapes in enumerate(declared):
        if all(map(_is_alike, own, shapes, dims)):
            return index
    wanted = " or ".join(_described(names, shapes) for shapes in declared)
    raise InputError(
        f"the batch has {_described(names, own)}, but the pipeline runs microbatches of {wanted}: "
        "only the number of samples may differ; pad the batch, or declare its shape with "
        "shapes=[…]"
    )


def _is_alike(one: tuple[int, ...], other: tuple[int, ...], dim: int | None) -> bool:
    """Return whether two shapes differ in dimension `dim` at most."""
    # That counts the samples, and a minibatch has several microbatches of them.
    return len(one) == len(other) and all(
        own == wanted or index == dim
        for index, (own, wanted) in enumerate(zip(one, other, strict=True))
    )


def _described(names: Sequence[str], shapes: InputShapes) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
