"""The targets of a minibatch cut into those of its microbatches.

Which dimension of a target counts the samples is known only where it is as long as the batch:

    batch of 8      target (8, 5)   cut along dimension 0
                    target (5, 8)   cut along dimension 1, if inputs have the batch there too
                    target ()       given to every microbatch, as are numbers and texts
                    a list of 8     cut by samples if `dims` says so, else InputError; likewise a
                                    tuple of 8, but for tensors that are all of 8 rows
                    an object       who knows what it holds? InputError, likewise
                    target (2,)     weights of two tasks? InputError, unless `dims` says what it is
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch.utils._pytree as pytree
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.batch_dims import BatchDims
from pipecompile.graph.attributes import PLAIN
from pipecompile.graph.pytrees import leaves_with_paths, register_dataclasses
from pipecompile.graph.storages import is_irregular, layout_name

__all__ = ["cut_targets"]

SAMPLES: Literal["samples"] = "samples"
"""Says in `dims` that a list or tuple is cut by samples, whatever its items look like."""
REMEDY = (
    "say with target_batch_dims= which dimension of it is cut, or (None,) to give all of it to "
    "every microbatch; for a tuple or dict of targets, a dimension or None for each"
)


def cut_targets(
    targets: Any, sizes: Sequence[int], dims: Any = None, input_dims: BatchDims = (0,)
) -> list[Any]:
    """Return `targets` once for each microbatch of so many samples.

    `dims` is a dimension, or "samples" for a list with an item for each, or a tree of these and of
    None that begins like that of the targets; (None,) is for one target that is given whole. 0 is
    for such lists too, where it can mean nothing else. A dimension that it names may have several
    rows for each sample: 30 rows for sizes 4, 4, 2 are 12, 12 and 6. Without `dims` it is 0, or a
    dimension that inputs have the batch in. InputError if it is not known how a tensor is cut, or
    if it cannot be cut so.
    """
    register_dataclasses(targets)
    samples = sum(sizes)
    if dims == (None,) and pytree.tree_flatten(targets)[1].is_leaf():
        return [targets] * len(sizes)
    if dims is not None:
        return _cut_as_given(targets, dims, sizes)
    likely = sorted({0, *(dim for dim in input_dims if dim is not None)})
    if isinstance(targets, Tensor):
        return list(_cut(targets, _batch_dimension(targets, samples, likely, targets), sizes))
    # Eight numbers for eight samples would be eight leaves, each of which every microbatch is given
    # whole.
    _refuse_lists_of_samples(targets, samples)
    leaves, spec = pytree.tree_flatten(targets)
    chosen = [_batch_dimension(leaf, samples, likely, targets) for leaf in leaves]
    parts = [_cut(leaf, dim, sizes) for leaf, dim in zip(leaves, chosen, strict=True)]
    return _unflattened(spec, parts, len(sizes))


def _cut_as_given(target: Any, dims: Any, sizes: Sequence[int]) -> list[Any]:
    """Return a target once for each microbatch; `dims` are for all of it, or for its items."""
    samples = sum(sizes)
    if dims is None:
        return [target] * len(sizes)
    if dims == SAMPLES:
        if type(target) not in (list, tuple) or len(target) != samples:
            raise InputError(
                f"target_batch_dims says {SAMPLES!r} of a {type(target).__name__}, but that is for "
                f"a list or tuple of {samples}, as many as there are samples; {REMEDY}"
            )
        return list(_cut(target, 0, sizes))
    if isinstance(dims, int):
        is_list = None if dims else partial(_is_list_of_samples, samples)
        leaves, spec = pytree.tree_flatten(target, is_list)
        return _unflattened(spec, [_cut(leaf, dims, sizes) for leaf in leaves], len(sizes))
    (of_items, wanted), (items, spec) = _items(dims), _items(target)
    if wanted != spec or spec.is_leaf():
        raise InputError(
            f"target_batch_dims={dims!r} does not fit the target; give a dimension, None or "
            f"{SAMPLES!r}, or a tree of these like the target's"
        )
    parts = [_cut_as_given(item, dim, sizes) for item, dim in zip(items, of_items, strict=True)]
    return _unflattened(spec, parts, len(sizes))


def _items(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten(value, lambda each: each is not value)


def _unflattened(
    spec: pytree.TreeSpec, parts: Sequence[Sequence[Any]], microbatches: int
) -> list[Any]:
    """Return a tree for each microbatch; `parts` are those of each leaf, of which may be none."""
    return [
        pytree.tree_unflatten([each[index] for each in parts], spec)
        for index in range(microbatches)
    ]


def _refuse_lists_of_samples(targets: Any, samples: int) -> None:
    """Raise InputError for a list that has an item for each sample, at any depth of `targets`."""

    def may_be_samples(value: Any) -> bool:
        is_list = type(value) is list and len(value) == samples > 1
        return is_list or _reading(samples, value) == SAMPLES

    for path, value in leaves_with_paths(targets, may_be_samples):
        if may_be_samples(value):
            kind = type(value).__name__
            raise InputError(
                f"the target{pytree.keystr(path)} is a {kind} of {samples}, as many as there are "
                f"samples; say with target_batch_dims={SAMPLES!r} that it is cut by samples, or "
                f"with a {kind} of {samples} times None, or 0, that every microbatch is given all "
                "of it, or a part of each tensor in it; for a tuple or dict of targets, one of "
                "these for each"
            )


def _is_list_of_samples(samples: int, value: Any) -> bool:
    """Return whether 0 means that a target is cut by samples. InputError if it may mean that each
    of its tensors is cut as well.
    """
    reading = _reading(samples, value)
    if reading == "either":
        kind = type(value).__name__
        raise InputError(
            f"the target has a {kind} of {samples}, as many as there are samples, and so are the "
            f"rows or items of each: say in target_batch_dims {SAMPLES!r} if it is cut by samples, "
            f"or a {kind} of {samples} times 0 if each of its items is"
        )
    return reading == SAMPLES


def _reading(samples: int, value: Any) -> Literal["samples", "whole", "either"]:
    """Return how a target is to be read: as a list with an item for each sample, as one whose items
    are of all samples, or in either way.
    """
    if type(value) not in (list, tuple) or not len(value) == samples > 1:
        return "whole"
    if all(type(item) in (list, tuple) and len(item) == samples for item in value):
        return "either"
    if type(value) is list:
        return "either" if all(_has_rows(item, samples) for item in value) else SAMPLES
    # A pair of tensors and settings for two samples.
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    tensors = [leaf for leaf in leaves if leaf.dim()]
    if not tensors or not all(_has_rows(tensor, samples) for tensor in tensors):
        return SAMPLES
    return "either" if len(set(map(type, value))) == 1 else "whole"


def _has_rows(item: Any, rows: int) -> bool:
    return isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == rows


def _batch_dimension(leaf: Any, samples: int, likely: Sequence[int], targets: Any) -> int | None:
    """Return which of the `likely` dimensions of a leaf of `targets` is the batch's, None for what
    has no dimensions.

    InputError if none is, or if several may be.
    """
    if not isinstance(leaf, Tensor):
        if getattr(leaf, "shape", ()):
            raise _array_error(f"the target{_path(leaf, targets)}", leaf)
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


def _array_error(where: str, array: Any) -> InputError:
    return InputError(
        f"{where} is a {type(array).__module__}.{type(array).__name__} of shape "
        f"{tuple(array.shape)}; give a tensor (torch.from_numpy), which can be cut"
    )


def _path(leaf: Any, targets: Any) -> str:
    """Return where a leaf of `targets` is: "['mask'][0]"."""
    paths = leaves_with_paths(targets)
    return next(pytree.keystr(path) for path, each in paths if each is leaf)


def _cut(leaf: Any, dim: int | None, sizes: Sequence[int]) -> Sequence[Any]:
    """Return the parts of a leaf along `dim`, in proportion to `sizes`."""
    if dim == 0 and isinstance(leaf, (list, tuple)):
        ends = list(accumulate(sizes, initial=0))
        return [leaf[start:end] for start, end in pairwise(ends)]
    is_array = not isinstance(leaf, Tensor) and bool(getattr(leaf, "shape", None))
    if dim is not None and is_array:
        raise _array_error("a target", leaf)
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
