"""The layout of a tensor: the order in which its elements lie in memory, and gaps between them."""

from __future__ import annotations

from torch import Tensor

from pipecompile.errors import InputError

__all__ = ["check_strides", "dense_order", "is_dense", "rounds_by_layout", "strides_with_gaps"]


def dense_order(value: Tensor) -> tuple[int, ...]:
    """Return the order of dimensions in which `value` is contiguous.

    An image (N, C, H, W) in channels-last format, for example, is contiguous in the order
    (0, 2, 3, 1). A tensor that is contiguous as it is, or in no order, has the order (0, 1, …).
    """
    own_order = tuple(range(value.dim()))
    # From the widest stride to the narrowest; equal strides keep their order.
    order = tuple(sorted(own_order, key=lambda dimension: -value.stride()[dimension]))
    if _is_contiguous(value, order) and not _is_contiguous(value, own_order):
        return order
    return own_order


def is_dense(value: Tensor) -> bool:
    """Return whether `value` is contiguous in some order of its dimensions."""
    return _is_contiguous(value, dense_order(value))


def _is_contiguous(value: Tensor, order: tuple[int, ...]) -> bool:
    """Return whether the elements lie one behind the other if dimensions have this order."""
    # By numbers, since a fake tensor takes a millisecond to permute.
    shape, strides = tuple(value.shape), value.stride()
    expected = 1
    for dimension in reversed(order):
        if shape[dimension] != 1 and strides[dimension] != expected:
            return 0 in shape
        expected *= shape[dimension]
    return True


def strides_with_gaps(value: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that is not dense: it has gaps or repeats elements.

    None stands for a dense tensor.
    """
    return None if is_dense(value) else tuple(map(int, value.stride()))


def rounds_by_layout(value: Tensor) -> bool:
    """Return whether a sum over this value is rounded by how it lies in memory.

    Only on a CPU is it known how it should lie: kernels of a GPU choose layouts of their own, which
    a capture does not show, and round otherwise anyway.
    """
    return value.device.type == "cpu" and (value.is_floating_point() or value.is_complex())


def check_strides(value: Tensor, name: str, planned: tuple[int, ...]) -> None:
    """Raise InputError if the value of the node `name` does not have the strides that are restored
    where it is received: elements would be repeated there, or sums rounded otherwise.
    """
    own = value.stride()
    if 0 not in planned and not rounds_by_layout(value):
        return
    # The stride of a dimension of size 1 is never used.
    if any(size > 1 and own[i] != planned[i] for i, size in enumerate(value.shape)):
        raise InputError(
            f"{name} has strides {own}, but had {planned} when the model was compiled, and the "
            "next stage restores these; let it lie in memory alike whatever the data is, for "
            "example by .contiguous()"
        )
