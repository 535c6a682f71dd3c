"""The layout of a tensor: the order in which its elements lie in memory, and gaps between them."""

from __future__ import annotations

from torch import Tensor

__all__ = ["dense_order", "is_dense", "strides_with_gaps"]


def dense_order(value: Tensor) -> tuple[int, ...]:
    """Return the order of dimensions in which `value` is contiguous.

    An image (N, C, H, W) in channels-last format, for example, is contiguous in the order
    (0, 2, 3, 1). A tensor that is contiguous as it is, or in no order, has the order (0, 1, …).
    """
    own_order = tuple(range(value.dim()))
    # From the widest stride to the narrowest; equal strides keep their order.
    order = tuple(sorted(own_order, key=lambda dimension: -value.stride()[dimension]))
    if value.permute(order).is_contiguous() and not value.is_contiguous():
        return order
    return own_order


def is_dense(value: Tensor) -> bool:
    """Return whether `value` is contiguous in some order of its dimensions."""
    return value.permute(dense_order(value)).is_contiguous()


def strides_with_gaps(value: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that is not dense: it has gaps or repeats elements.

    None stands for a dense tensor.
    """
    return None if is_dense(value) else tuple(map(int, value.stride()))
