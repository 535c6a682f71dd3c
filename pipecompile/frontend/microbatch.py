"""Microbatches: a minibatch split into parts, and their results merged into one.

A minibatch of N samples is cut into microbatches of the planned size b. What is left over is one
more microbatch, the remainder:

    N = 10, b = 4        sizes 4, 4, 2      the remainder has 2 samples
    N = 3,  b = 4        sizes 3            the remainder is all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.graph.pytrees import register_dataclasses

__all__ = ["InputShapes", "MicrobatchSizes", "merge", "shape_of", "split"]

InputShapes = Sequence[tuple[int, ...]]
"""The shapes of a model's input tensors in one microbatch."""


@dataclass(frozen=True)
class MicrobatchSizes:
    """How many samples each microbatch of a minibatch has, and how many the plan was made for."""

    planned: int
    sizes: tuple[int, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor], names: Sequence[str], shapes: InputShapes) -> MicrobatchSizes:
        """Return the sizes for the minibatch `tensors`, where microbatches of `shapes` are planned
        that differ in dimension 0 at most.

        Dimension 0 is the batch; a tensor without dimensions is the same for every microbatch.
        InputError if there is no sample, or if inputs disagree.
        """
        samples: dict[str, int] = {}
        planned_sizes = set()
        for tensor, name, planned in zip(tensors, names, shapes, strict=True):
            if planned:  # a tensor without dimensions says nothing about the batch
                samples[name] = tensor.shape[0]
                planned_sizes.add(planned[0])
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

    def rows(self, tensors: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Return the tensors of each microbatch, cut as the function `split` does."""
        return list(zip(*(_split_leaf(tensor, self.sizes) for tensor in tensors), strict=True))

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


def _merge_leaf(column: Sequence[Any], scalar: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(list(column)) if column[0].dim() else scalar(column)


def shape_of(
    tensors: Sequence[Tensor], names: Sequence[str], declared: Sequence[InputShapes]
) -> int:
    """Return the index of the declared shapes that a minibatch has, whatever its dimension 0.

    InputError, which lists them, if it has none of these.
    """
    own = [tuple(tensor.shape) for tensor in tensors]
    for index, shapes in enumerate(declared):
        if all(map(_is_alike, own, shapes)):
            return index
    wanted = " or ".join(_described(names, shapes) for shapes in declared)
    raise InputError(
        f"the batch has {_described(names, own)}, but the pipeline runs microbatches of {wanted}: "
        "only dimension 0 may differ; pad the batch, or declare its shape with shapes=[…]"
    )


def _is_alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shapes differ in dimension 0 at most."""
    # Dimension 0 counts the samples, and a minibatch has several microbatches of them.
    return len(one) == len(other) and one[1:] == other[1:]


def _described(names: Sequence[str], shapes: InputShapes) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))


def split(tree: Any, microbatches: int) -> list[Any]:
    """Return `tree` once per microbatch: tensors split along dimension 0, all else repeated.

    InputError if a tensor cannot be split into equal parts.
    """
    register_dataclasses(tree)
    leaves, spec = pytree.tree_flatten(tree)
    rows = [_split_leaf(leaf, (1,) * microbatches) for leaf in leaves]
    return [
        pytree.tree_unflatten([row[index] for row in rows], spec) for index in range(microbatches)
    ]


def merge(trees: Sequence[Any]) -> Any:
    """Return the results of microbatches of one size as one; see `MicrobatchSizes.merge`."""
    return MicrobatchSizes(1, (1,) * len(trees)).merge(trees)


def _split_leaf(leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """Return the parts of a leaf in proportion to `sizes`.

    A target may have several rows for each sample: 30 rows for sizes 4, 4, 2 are 12, 12 and 6.
    """
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return [leaf] * len(sizes)
    rows, samples = leaf.shape[0], sum(sizes)
    if any(rows * size % samples for size in set(sizes)):
        shape = tuple(leaf.shape)
        if len(set(sizes)) == 1:
            raise InputError(
                f"a tensor of shape {shape} cannot be cut into {len(sizes)} "
                "microbatches; dimension 0 must be a multiple of them"
            )
        raise InputError(
            f"a tensor of shape {shape} cannot be cut into microbatches of {list(sizes)} samples; "
            f"dimension 0 must be a multiple of {samples}"
        )
    return torch.split(leaf, [rows * size // samples for size in sizes])
