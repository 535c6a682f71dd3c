"""Microbatches: a minibatch split into equal parts, and their results merged into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.graph.pytrees import register_dataclasses

__all__ = ["count_microbatches", "merge", "split"]


def count_microbatches(
    tensors: Sequence[Tensor], names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> int:
    """Return how many microbatches of the planned `shapes` the minibatch `tensors` has.

    Dimension 0 is the batch; a tensor without dimensions is the same for every microbatch. Raise
    InputError if the number is not whole, or not the same for all tensors.
    """
    counts = set()
    for tensor, name, planned in zip(tensors, names, shapes, strict=True):
        shape = tuple(tensor.shape)
        if shape[1:] != planned[1:] or len(shape) != len(planned):
            raise InputError(
                f"{name} has shape {shape}, but the plan was made for microbatches of {planned}: "
                "only dimension 0 may differ; pad the batch, or plan again for this shape"
            )
        if planned:  # a tensor without dimensions says nothing about the batch
            if shape[0] == 0 or shape[0] % planned[0]:
                raise InputError(
                    f"{name} has {shape[0]} samples, which are not whole microbatches of "
                    f"{planned[0]}; drop or pad the last batch, or choose another number "
                    "of microbatches"
                )
            counts.add(shape[0] // planned[0])
    if len(counts) != 1:
        raise InputError(f"the inputs hold different numbers of microbatches: {sorted(counts)}")
    return counts.pop()


def split(tree: Any, microbatches: int) -> list[Any]:
    """Return `tree` once per microbatch: tensors split along dimension 0, all else repeated."""
    register_dataclasses(tree)
    leaves, spec = pytree.tree_flatten(tree)
    rows = [_split_leaf(leaf, microbatches) for leaf in leaves]
    return [
        pytree.tree_unflatten([row[index] for row in rows], spec) for index in range(microbatches)
    ]


def _split_leaf(leaf: Any, microbatches: int) -> Sequence[Any]:
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return [leaf] * microbatches
    if leaf.shape[0] % microbatches:
        raise InputError(
            f"a tensor of shape {tuple(leaf.shape)} cannot be cut into {microbatches} "
            "microbatches; dimension 0 must be a multiple of them"
        )
    return leaf.chunk(microbatches)


def merge(trees: Sequence[Any]) -> Any:
    """Return the results of the microbatches as one.

    Tensors are concatenated along dimension 0 and scalars are averaged. All else is taken from the
    first microbatch.
    """
    flat = [pytree.tree_flatten(tree) for tree in trees]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_merge_leaf(column) for column in columns], flat[0][1])


def _merge_leaf(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(list(column)) if column[0].dim() else torch.stack(list(column)).mean(dim=0)
