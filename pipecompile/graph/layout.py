"""How the elements of a tensor lie in memory."""

from __future__ import annotations

from torch import Tensor

__all__ = ["dense_order", "gaps", "is_dense"]


def dense_order(value: Tensor) -> tuple[int, ...]:
    """The order of dimensions in which `value` is contiguous; its own order if there is none (it has gaps)."""
    own = tuple(range(value.dim()))
    order = tuple(sorted(own, key=lambda dimension: -value.stride()[dimension]))
    return order if value.permute(order).is_contiguous() and not value.is_contiguous() else own


def is_dense(value: Tensor) -> bool:
    """Whether `value` is contiguous in some order of its dimensions."""
    return value.permute(dense_order(value)).is_contiguous()


def gaps(value: Tensor) -> tuple[int, ...] | None:
    """The strides of a view that is not dense: one with holes, or one that repeats elements."""
    return None if is_dense(value) else tuple(map(int, value.stride()))
