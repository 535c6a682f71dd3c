"""What the loss function returned with the losses of microbatches, as one value for the batch.

    microbatch 0      {"logits": (2, 5), "right": 1, "accuracy": 0.5}
    microbatch 1      {"logits": (2, 5), "right": 2, "accuracy": 1.0}
    as one            {"logits": (4, 5), "right": 3, "accuracy": 0.75}

Tensors are those of one replica, in the order of its batch; scalars are of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.microbatch import is_count

__all__ = ["LossExtras"]

_Merge = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class _Scalars:
    """A scalar of each microbatch: numbers of Python or tensors, which count something or not."""

    values: Sequence[Tensor]
    are_numbers: bool
    are_counts: bool

    @staticmethod
    def of(column: Sequence[Any]) -> _Scalars:
        values = list(map(_as_scalar, column))
        # An accuracy may be 0 in one microbatch, which is a whole number, and 0.5 in another.
        counts = all(map(is_count, values))
        are_numbers = not any(isinstance(each, Tensor) for each in column)
        return _Scalars(values, are_numbers, counts)

    def joined(self, count: _Merge, mean: _Merge) -> Any:
        """Return what `count` makes of counts, and `mean` of others."""
        if self.are_counts:
            scalar = count(self.values)
        else:
            scalar = mean([v.double() if is_count(v) else v for v in self.values])
        return scalar.item() if self.are_numbers else scalar


@dataclass(frozen=True)
class LossExtras:
    """What came with the losses of one replica, joined but for its scalars."""

    leaves: Sequence[Any]
    spec: pytree.TreeSpec

    @staticmethod
    def of(trees: Sequence[Any]) -> LossExtras:
        """Return what came with the losses of the microbatches; InputError if it cannot be joined.

        Tensors are concatenated along dimension 0. What is neither tensor nor number is taken from
        the first microbatch.
        """
        flat = [pytree.tree_flatten(tree) for tree in trees]
        first = flat[0][1]
        if other := next((spec for _, spec in flat if spec != first), None):
            raise InputError(
                f"the loss function returned {first} with the loss of one microbatch and {other} "
                "with that of another; return the same structure with each"
            )
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        try:
            return LossExtras(list(map(_merged, columns)), first)
        except (RuntimeError, TypeError) as error:
            # torch's own, which would pass for that of a lost connection.
            raise InputError(
                f"what the loss function returned with its losses cannot be joined: {error}"
            ) from error

    @staticmethod
    def of_replicas(trees: Sequence[Any], tell: Callable[[object], Sequence[Any]]) -> LossExtras:
        """Return `of(trees)`, where scalars count something if they do on all replicas. `tell`
        returns what each of them tells.

        InputError, on all of them, if one cannot join its own, or if they differ in structure.
        """
        try:
            own = LossExtras.of(trees)
        except InputError as error:
            tell(str(error))
            raise
        told = tell(own._described())
        for problem in (each for each in told if isinstance(each, str)):
            raise InputError(f"another replica: {problem}")
        kinds = [kind for kind, _ in told]
        if other := next((kind for kind in kinds if kind != kinds[0]), None):
            raise InputError(
                f"the loss function returned {kinds[0]} with its losses on one replica, and "
                f"{other} on another; return the same structure on all of them"
            )
        counts = [all(column) for column in zip(*(counts for _, counts in told), strict=True)]
        return own._with_counts(counts)

    def joined(self, count: _Merge, mean: _Merge) -> Any:
        """Return it as one value: `count` joins scalars that count something, `mean` others."""
        leaves = [
            leaf.joined(count, mean) if isinstance(leaf, _Scalars) else leaf for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def _described(self) -> tuple[str, Sequence[bool]]:
        """Return the structure as text, with which leaves are scalars, and whether these count."""
        scalars = [isinstance(leaf, _Scalars) for leaf in self.leaves]
        names = ["a scalar" if each else "another value" for each in scalars]
        shown = pytree.tree_unflatten(names, self.spec)
        counts = [leaf.are_counts for leaf in self.leaves if isinstance(leaf, _Scalars)]
        return repr(shown), counts

    def _with_counts(self, counts: Sequence[bool]) -> LossExtras:
        own = iter(counts)
        leaves = [
            replace(leaf, are_counts=next(own)) if isinstance(leaf, _Scalars) else leaf
            for leaf in self.leaves
        ]
        return replace(self, leaves=leaves)


def _as_scalar(value: Any) -> Tensor:
    """Return a scalar or a number as a tensor, with all digits of a number."""
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _merged(column: Sequence[Any]) -> Any:
    """Return a leaf of all microbatches as one, or their scalars."""
    if all(map(_is_scalar, column)):
        return _Scalars.of(column)
    if len({_is_scalar(each) or type(each) for each in column}) > 1:
        raise InputError(
            f"with the losses of microbatches came {', '.join(map(_kind, column))}, which cannot "
            "be joined; return the same kind with each"
        )
    if not isinstance(column[0], Tensor):
        return column[0]
    shapes = [tuple(part.shape) for part in column]
    if len({shape[1:] for shape in shapes}) > 1:
        raise InputError(
            f"tensors of the shapes {shapes} came with the losses of microbatches, and cannot be "
            "joined along dimension 0; pad them alike, or return a scalar"
        )
    return torch.cat(list(column))


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a number, or a tensor without dimensions."""
    if isinstance(value, Tensor):
        return not value.dim()
    # A truth value is a number to Python, but no mean of truth values is one.
    return isinstance(value, Real) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"
