"""Microbatches: a minibatch split into parts, and their results merged into one.

A minibatch of N samples is cut into microbatches of the planned size b. What is left over is one
more microbatch, the remainder:

    N = 10, b = 4        sizes 4, 4, 2      the remainder has 2 samples
    N = 3,  b = 4        sizes 3            the remainder is all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.batch_dims import BatchDims

__all__ = ["InputShapes", "MicrobatchSizes", "as_scalar", "is_count", "shape_of"]

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

    def merge(
        self, trees: Sequence[Any], scalar: Callable[[Sequence[Any]], Tensor] | None = None
    ) -> Any:
        """Return the results of the microbatches as one; InputError if they cannot be joined.

        Tensors are concatenated along dimension 0. Of scalars and numbers it is `joined_scalar`, or
        what `scalar` makes of those of all microbatches. All else is taken from the first one.
        """
        flat = [pytree.tree_flatten(tree) for tree in trees]
        first = flat[0][1]
        other = next((spec for _, spec in flat if spec != first), None)
        if other is not None:
            raise InputError(
                f"the loss function returned {first} with the loss of one microbatch and {other} "
                "with that of another; return the same structure with each"
            )
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        merged = [_merge_leaf(column, scalar or self.joined_scalar) for column in columns]
        return pytree.tree_unflatten(merged, first)

    def joined_scalar(self, values: Sequence[Any]) -> Tensor:
        """Return the mean over samples of the scalars of microbatches; of whole numbers, which
        count something, their sum.
        """
        scalars = list(map(as_scalar, values))
        return torch.stack(scalars).sum() if is_count(scalars[0]) else self.mean(scalars)

    def join(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Return the results of the microbatches as one, along `dim`; see `joined_scalar`."""
        # A scalar is taken for a mean over samples, as metrics beside a loss are.
        return torch.cat(list(parts), dim) if parts[0].dim() else self.joined_scalar(parts)


def as_scalar(value: Any) -> Tensor:
    """Return a scalar or a number as a tensor, with all digits of a number."""
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def is_count(scalar: Tensor) -> bool:
    """Return whether a scalar is a whole number or a truth value, and no mean of something."""
    return not (scalar.is_floating_point() or scalar.is_complex())


def _merge_leaf(column: Sequence[Any], scalar: Callable[[Sequence[Any]], Tensor]) -> Any:
    first = column[0]
    # A truth value is a number to Python, but no mean of truth values is one.
    if isinstance(first, Real) and not isinstance(first, bool):
        return scalar(column).item()
    if not isinstance(first, Tensor):
        return first
    if not first.dim():
        return scalar(column)
    shapes = [tuple(part.shape) for part in column]
    if len({shape[1:] for shape in shapes}) > 1:
        raise InputError(
            f"tensors of the shapes {shapes} came with the losses of microbatches, and cannot be "
            "joined along dimension 0; pad them alike, or return a scalar"
        )
    return torch.cat(list(column))


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
