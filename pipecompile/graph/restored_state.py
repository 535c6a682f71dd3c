"""Parameters and buffers that get back the values and shapes that they had before a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipecompile.errors import CaptureError
from pipecompile.graph.model_state import named_state

__all__ = ["is_same_tensor", "tensors_restored"]


@contextmanager
def tensors_restored(
    module: nn.Module, tensors: Iterable[Tensor]
) -> Iterator[Mapping[Tensor, Tensor]]:
    """Restore `tensors`, of the state of `module`, after the block.

    Yield what each was before. CaptureError if one has another shape then, as buffers have that are
    empty until the first forward; it is restored too.
    """
    before = {each: each.detach().clone() for each in tensors}
    leaves = {each for each in before if each.is_leaf}
    try:
        yield before
    finally:
        resized = {each: each.shape for each, old in before.items() if each.shape != old.shape}
        # In place, since the model's tables, and optimizers, refer to these tensors.
        with torch.no_grad():
            for tensor, value in before.items():
                # An expanded buffer refuses any write, but it never changes either.
                if tensor in resized:
                    tensor.resize_(value.shape)
                if not is_same_tensor(tensor, value):
                    tensor.copy_(value)
                # What has a gradient was written to it. Torch detaches no view in place.
                if tensor in leaves and not tensor.is_leaf and not tensor._is_view():
                    tensor.detach_()
    for name, tensor in named_state(module):
        if tensor in resized:
            raise CaptureError(
                f"a forward resizes {name} from {tuple(tensor.shape)} to "
                f"{tuple(resized[tensor])}; run the model once before it is compiled, so that "
                "all its state has the shape that it keeps"
            )


def is_same_tensor(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are equal in shape, type and every element; NaN equals NaN."""
    if left.is_nested or right.is_nested:  # which have no shape
        if left.is_nested != right.is_nested or left.size(0) != right.size(0):
            return False
        return all(map(is_same_tensor, left.unbind(), right.unbind()))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    return bool(((left == right) | (left.isnan() & right.isnan())).all())
