"""The targets of a minibatch cut into those of its microbatches.

Which dimension of a target counts the samples is known only where it is as long as the batch:

    batch of 8      target (8, 5)   cut along dimension 0
                    target (5, 8)   cut along dimension 1, if inputs have the batch there too
                    target ()       given to every microbatch, as are numbers and texts
                    a list of 8     cut by samples if `dims` says 0, else InputError; likewise a
                                    tuple of 8, but for tensors that are all of 8 rows
                    an object       who knows what it holds? InputError, likewise
                    target (2,)     weights of two tasks? InputError, unless `dims` says what it is
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.batch_dims import BatchDims
from pipecompile.graph.attributes import PLAIN
from pipecompile.graph.pytrees import leaves_with_paths, register_dataclasses
from pipecompile.graph.storages import is_irregular, layout_name

__all__ = ["cut_targets"]

REMEDY = (
    "say with target_batch_dims= which dimension of it is cut, or (None,) to give all of it to "
    "every microbatch; for a tuple or dict of targets, a dimension or None for each"
)


def cut_targets(
    targets: Any, sizes: Sequence[int], dims: Any = None, input_dims: BatchDims = (0,)
) -> list[Any]:
    """Return `targets` once for each microbatch of so many samples.

    `dims` is a dimension, or a tree of dimensions and None that begins like that of the targets;
    (None,) is for one target that is given whole. A dimension that it names may have several rows
    for each sample: 30 rows for sizes 4, 4, 2 are 12, 12 and 6. Without `dims` it is 0, or a
    dimension that inputs have the batch in. InputError if it is not known how a tensor is cut, or
    if it cannot be cut so.
    """
    register_dataclasses(targets)
    samples = sum(sizes)
    likely = sorted({0, *(dim for dim in input_dims if dim is not None)})
    if isinstance(targets, Tensor) and dims is None:
        return list(_cut(targets, _batch_dimension(targets, samples, likely, targets), sizes))
    leaves, spec = pytree.tree_flatten(targets)
    if dims == (None,) and spec.is_leaf():
        return [targets] * len(sizes)
    if dims is None:
        # Eight numbers for eight samples would be eight leaves, each of which every microbatch is
        # given whole.
        _refuse_lists_of_samples(targets, samples)
        chosen = [_batch_dimension(leaf, samples, likely, targets) for leaf in leaves]
    else:
        lists = pytree.tree_flatten(targets, partial(_is_list_of_samples, samples))
        # Deeper `dims` say what is done with each item of such a list.
        if pytree._broadcast_to_and_flatten(dims, lists[1]) is not None:
            leaves, spec = lists
        chosen = _given_dimensions(dims, spec)
    parts = [_cut(leaf, dim, sizes) for leaf, dim in zip(leaves, chosen, strict=True)]
    return [
        pytree.tree_unflatten([each[index] for each in parts], spec) for index in range(len(sizes))
    ]


def _refuse_lists_of_samples(targets: Any, samples: int) -> None:
    """Raise InputError for a list that has an item for each sample, at any depth of `targets`."""

    def may_be_samples(value: Any) -> bool:
        if samples > 1 and isinstance(value, list):
            return len(value) == samples
        return samples > 1 and _is_list_of_samples(samples, value)

    for path, value in leaves_with_paths(targets, may_be_samples):
        if may_be_samples(value):
            raise InputError(
                f"the target{pytree.keystr(path)} is a {type(value).__name__} of {samples}, as "
                "many as there are samples; say with target_batch_dims=0 that it is cut by "
                f"samples, or with a {type(value).__name__} of {samples} times None that every "
                "microbatch is given all of it; for a tuple or dict "
                "of targets, one of these for each"
            )


def _is_list_of_samples(samples: int, value: Any) -> bool:
    """Return whether a list or tuple has an item for each sample, rather than tensors of all."""
    if type(value) not in (list, tuple) or len(value) != samples:
        return False
    if type(value) is list:
        return not all(_has_rows(item, samples) for item in value)
    # A pair of tensors and settings for two samples.
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return not (tensors and all(_has_rows(tensor, samples) for tensor in tensors))


def _has_rows(item: Any, rows: int) -> bool:
    return isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == rows


def _batch_dimension(leaf: Any, samples: int, likely: Sequence[int], targets: Any) -> int | None:
    """Return which of the `likely` dimensions of a leaf of `targets` is the batch's, None for what
    has no dimensions.

    InputError if none is, or if several may be.
    """
    if not isinstance(leaf, Tensor):
        if getattr(leaf, "shape", ()):
            kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
            raise InputError(
                f"the target{_path(leaf, targets)} is a {kind} of shape "
                f"{tuple(leaf.shape)}; give a tensor (torch.from_numpy), which can be cut"
            )
        is_empty = isinstance(leaf, (set, frozenset)) and not leaf
        # A scalar of numpy has a shape.
        is_plain = isinstance(leaf, (*PLAIN, Enum, slice)) or hasattr(leaf, "shape")
        if not is_plain and not is_empty:
            raise InputError(
                f"the target{_path(leaf, targets)} is a {type(leaf).__name__}, and what that holds "
                "is not cut; give a tensor, or tuples, lists, dicts and dataclasses of tensors, or "
                f"{REMEDY}"
            )
        return None
    if not leaf.dim():
        return None
    # A target (8, 8) of 8 samples fits twice if inputs have the batch in dimension 1: nobody can
    # know.
    fitting = [dim for dim in likely if dim < leaf.dim() and leaf.shape[dim] == samples]
    if len(fitting) == 1:
        return fitting[0]
    raise InputError(
        f"the target{_path(leaf, targets)} is of shape {tuple(leaf.shape)}, "
        f"{'and' if fitting else 'but'} the batch has {samples} samples"
        f"{f' (in dimensions {fitting}?)' if fitting else ''}; {REMEDY}"
    )


def _path(leaf: Any, targets: Any) -> str:
    """Return where a leaf of `targets` is: "['mask'][0]"."""
    paths = leaves_with_paths(targets)
    return next(pytree.keystr(path) for path, each in paths if each is leaf)


def _given_dimensions(dims: Any, spec: pytree.TreeSpec) -> list[int | None]:
    chosen = pytree._broadcast_to_and_flatten(dims, spec)
    if chosen is None or not all(dim is None or isinstance(dim, int) for dim in chosen):
        raise InputError(
            f"target_batch_dims={dims!r} does not fit the target; give a dimension or None, or a "
            "tree of these like the target's"
        )
    return chosen


def _cut(leaf: Any, dim: int | None, sizes: Sequence[int]) -> Sequence[Any]:
    """Return the parts of a leaf along `dim`, in proportion to `sizes`."""
    if dim == 0 and isinstance(leaf, (list, tuple)):
        ends = list(accumulate(sizes, initial=0))
        return [leaf[start:end] for start, end in pairwise(ends)]
    is_array = not isinstance(leaf, Tensor) and bool(getattr(leaf, "shape", None))
    if dim is not None and is_array:
        raise InputError(
            f"a target is a {type(leaf).__module__}.{type(leaf).__name__} of shape "
            f"{tuple(leaf.shape)}; give a tensor (torch.from_numpy), which can be cut"
        )
    if dim is None or not isinstance(leaf, Tensor):
        return [leaf] * len(sizes)
    if is_irregular(leaf):
        raise InputError(
            f"a target is {layout_name(leaf)}, of which no microbatches can be cut; give a dense "
            "tensor (to_dense, to_padded_tensor)"
        )
    samples = sum(sizes)
    # Boxes of an image, say: 30 rows of 10 samples are three for each, and a part of 4 samples
    # has 12.
    rows = leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else 0
    if not rows or rows % samples:
        raise InputError(
            f"a target of shape {tuple(leaf.shape)} cannot be cut along dimension {dim} into "
            f"microbatches of {list(sizes)} samples; its size there must be a multiple of {samples}"
        )
    return leaf.split_with_sizes([rows * size // samples for size in sizes], dim)
