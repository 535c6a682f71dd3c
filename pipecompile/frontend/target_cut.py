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

import dataclasses
from collections import deque
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

SEQUENCES = (list, tuple, deque)
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
    if type(dims) is tuple and dims == (None,) and pytree.tree_flatten(targets)[1].is_leaf():
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
    if isinstance(dims, str) and dims == SAMPLES:
        if type(target) not in SEQUENCES or len(target) != samples:
            raise InputError(
                f"target_batch_dims says {SAMPLES!r} of a {type(target).__name__}, but that is for "
                f"a list or tuple of {samples}, as many as there are samples; {REMEDY}"
            )
        return list(_cut(target, 0, sizes))
    if type(dims) is int:
        is_list = None if dims else partial(_is_list_of_samples, samples)
        leaves, spec = pytree.tree_flatten(target, is_list)
        return _unflattened(spec, [_cut(leaf, dims, sizes) for leaf in leaves], len(sizes))
    items, spec = _items(target)
    of_items = _dims_of_items(target, dims, spec)
    if of_items is None:
        raise InputError(
            f"target_batch_dims={dims!r} does not fit the target; give a dimension, None or "
            f"{SAMPLES!r}, or a tree of these like the target's"
        )
    parts = [_cut_as_given(item, dim, sizes) for item, dim in zip(items, of_items, strict=True)]
    return _unflattened(spec, parts, len(sizes))


def _dims_of_items(target: Any, dims: Any, spec: pytree.TreeSpec) -> list[Any] | None:
    """Return what `dims` has for each of the items of `target`, in their order; None if these are
    not alike.
    """
    names, given = _named(target), _named(dims)
    if names is None or given is None:
        of_items, wanted = _items(dims)
        return of_items if wanted == spec and not spec.is_leaf() else None
    if names.keys() != given.keys():
        return None
    # Torch leaves out the fields of a dataclass that are None.
    is_left_out = dataclasses.is_dataclass(target)
    return [given[name] for name, item in names.items() if item is not None or not is_left_out]


def _named(value: Any) -> dict[str, Any] | None:
    """Return the items of a dict or the fields of a dataclass, by name."""
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


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
        is_list = type(value) in (list, deque) and len(value) == samples > 1
        return is_list or _reading(samples, value) == SAMPLES

    for path, value in leaves_with_paths(targets, may_be_samples):
        if may_be_samples(value):
            kind = type(value).__name__
            raise InputError(
                f"the target{pytree.keystr(path)} is a {kind} of {samples}, as many as there are "
                f"samples; say with target_batch_dims={SAMPLES!r} that it is cut by samples, with "
                f"a {kind} of {samples} times None that every microbatch is given all of it, or "
                f"with a {kind} of {samples} times 0 that each tensor in it is cut; for a tuple or "
                "dict of targets, one of these for each"
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
    if type(value) not in SEQUENCES or not len(value) == samples > 1:
        return "whole"
    if {_holds_all(item, samples) for item in value} - {None} != {True}:
        return SAMPLES
    # A pair of tensors and settings for two samples.
    is_pair = type(value) is tuple and len(set(map(type, value))) > 1
    return "whole" if is_pair else "either"


def _holds_all(item: Any, samples: int) -> bool | None:
    """Return whether an item has as many rows or items as there are samples; None for what has
    none, such as numbers and texts.
    """
    if isinstance(item, Tensor):
        return item.shape[0] == samples if item.dim() else None
    if type(item) in SEQUENCES:
        return len(item) == samples
    if isinstance(item, dict):
        held = {_holds_all(each, samples) for each in item.values()} - {None}
        return held == {True} if held else None
    return None


def _batch_dimension(leaf: Any, samples: int, likely: Sequence[int], targets: Any) -> int | None:
    """Return which of the `likely` dimensions of a leaf of `targets` is the batch's, None for what
    has no dimensions.

    InputError if none is, or if several may be.
    """
    if not isinstance(leaf, Tensor):
        _refuse_uncut(leaf, f"the target{_path(leaf, targets)}")
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


def _refuse_uncut(leaf: Any, where: str) -> None:
    """Raise InputError for what is no tensor and holds something: an array, or an object."""
    if getattr(leaf, "shape", ()):
        raise InputError(
            f"{where} is a {type(leaf).__module__}.{type(leaf).__name__} of shape "
            f"{tuple(leaf.shape)}; give a tensor (torch.from_numpy), which can be cut"
        )
    is_empty = isinstance(leaf, (set, frozenset)) and not leaf
    # A scalar of numpy has a shape.
    if not is_empty and not isinstance(leaf, (*PLAIN, Enum, slice)) and not hasattr(leaf, "shape"):
        raise InputError(
            f"{where} is a {type(leaf).__name__}, and what that holds is not cut; give a tensor, "
            f"or tuples, lists, dicts and dataclasses of tensors, or {REMEDY}"
        )


def _path(leaf: Any, targets: Any) -> str:
    """Return where a leaf of `targets` is: "['mask'][0]"."""
    paths = leaves_with_paths(targets)
    return next(pytree.keystr(path) for path, each in paths if each is leaf)


def _cut(leaf: Any, dim: int | None, sizes: Sequence[int]) -> Sequence[Any]:
    """Return the parts of a leaf along `dim`, in proportion to `sizes`."""
    if dim == 0 and type(leaf) in SEQUENCES:
        items = list(leaf) if isinstance(leaf, deque) else leaf
        ends = list(accumulate(sizes, initial=0))
        return [items[start:end] for start, end in pairwise(ends)]
    if dim is not None and not isinstance(leaf, Tensor):
        _refuse_uncut(leaf, "a target")
    if dim is None or not isinstance(leaf, Tensor) or not leaf.dim():
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
