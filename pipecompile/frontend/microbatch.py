"""Microbatches: a minibatch split into parts, and their results merged into one.

A minibatch of N samples is cut into microbatches of the planned size b. What is left over is one
more microbatch, the remainder:

    N = 10, b = 4        sizes 4, 4, 2      the remainder has 2 samples
    N = 3,  b = 4        sizes 3            the remainder is all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.batch_dims import BatchDims

__all__ = ["InputShapes", "MicrobatchSizes", "is_count", "shape_of"]

InputShapes = Sequence[tuple[int, ...]]
"""The shapes of a model's input tensors in one microbatch."""


@dataclass(frozen=True)
class MicrobatchSizes:
    """The numbers of samples: of each microbatch of a minibatch, and of those of the plan."""

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
        """The number of samples of the minibatch."""
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
        if dim is None:
            return [tensor] * len(self.sizes)
        if tensor.shape[dim] != self.samples:
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be cut into microbatches of "
                f"{list(self.sizes)} samples; dimension {dim} must be {self.samples}"
            )
        parts = tensor.split_with_sizes(self.sizes, dim)
        # Along dimension 0 they are views, and take no memory; see `part_of` for the others.
        return [part.contiguous() for part in parts] if dim else parts

    def mean(self, scalars: Sequence[Tensor]) -> Tensor:
        """Return the mean over samples of what is a mean over those of each microbatch."""
        # Without weights: multiplying by 1 / M rounds otherwise than the mean of equal parts does.
        if self.remainder is None:
            return torch.stack(list(scalars)).mean(dim=0)
        # Means of 1, 2 and 6 over 4, 4 and 2 samples: 0.4 · 1 + 0.4 · 2 + 0.2 · 6 = 2.4.
        parts = zip(scalars, self.sizes, strict=True)
        return torch.stack([value * (size / self.samples) for value, size in parts]).sum(dim=0)

    def join(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Return the results of the microbatches as one, along `dim`. Scalars are taken for means
        over samples, as metrics beside a loss are, and whole numbers for counts, to be summed.
        """
        if parts[0].dim():
            return torch.cat(list(parts), dim)
        return torch.stack(list(parts)).sum() if is_count(parts[0]) else self.mean(parts)


def is_count(scalar: Tensor) -> bool:
    """Return whether a scalar is a whole number or a truth value, and no mean of something."""
    return not (scalar.is_floating_point() or scalar.is_complex())


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
