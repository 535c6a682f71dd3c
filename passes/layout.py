"""How the elements of a tensor lie in memory."""

from __future__ import annotations

from torch import Tensor

__all__ = ["dense_order"]


def dense_order(value: Tensor) -> tuple[int, ...]:
    """The order of dimensions in which `value` is contiguous; its own order if there is none (it has gaps)."""
    own = tuple(range(value.dim()))
    order = tuple(sorted(own, key=lambda dimension: -value.stride()[dimension]))
    return order if value.permute(order).is_contiguous() and not value.is_contiguous() else own
