"""Memory of kernels that fake tensors do not show: a margin, by device, the same on every machine.

Users train on GPUs, and a CPU stands in for one. How a kernel chooses its layouts is its secret and
differs between processors: so a few rules that are simple and large enough stand here, no model.
docs/design/memory.md says how far they are from what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import size_bytes
from pipecompile.ir.amount import AllocatorName

__all__ = ["Scratch", "hidden_bytes", "scratch_on"]

aten = torch.ops.aten

Scratch = Callable[[Any, Sequence[Any], Any], int]
"""From an operator, its arguments and its result to bytes."""

BLOCK = 16  # oneDNN pads channels to whole blocks
PAGE = 4096
COPYING = (
    aten.native_batch_norm_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
)


def scratch_on(memory: AllocatorName) -> Scratch:
    """The rule for kernels of this device."""
    return _on_cuda if memory == "cuda" else _on_cpu


def _on_cuda(operator: Any, arguments: Sequence[Any], result: Any) -> int:
    """A convolution copies all that it reads and writes; not measured.

    cuDNN "may use padding, folding, and NCHW-to-NHWC transformations to call the Tensor Core
    operations" (docs.nvidia.com/deeplearning/cudnn/developer/legacy-api.html), and each transformed
    tensor is a copy. Its other algorithms may take more; PyTorch falls back to one that the
    allocator can serve.
    """
    if operator not in (aten.convolution.default, aten.convolution_backward.default):
        return 0
    return size_bytes(tensor_leaves((arguments, result)))


def _on_cpu(operator: Any, arguments: Sequence[Any], result: Any) -> int:
    """Some backwards copy the gradient; an LSTM's layer has the gates of all steps."""
    if operator in COPYING:
        return size_bytes(arguments[:1])
    if operator is aten.convolution.default:
        value, weight, _, stride = arguments[:4]
        copied = max(size_bytes([value, weight]), size_bytes([result]))
        return _cpu_convolution(copied, value, weight, stride, arguments[8])
    if operator is aten.convolution_backward.default:
        gradient, value, weight, _, stride = arguments[:5]
        twice = [value, value] if prod(stride) > 1 else []
        copied = max(map(size_bytes, ([gradient, value], twice, [weight])))
        return _cpu_convolution(copied, value, weight, stride, arguments[9])
    if operator in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default):
        value, of_input, of_state = arguments[:3]
        gates = prod(value.shape[:2]) * of_state.shape[0] * value.element_size()
        return _whole(gates, PAGE) + size_bytes([of_input, of_state]) + 4 * PAGE
    return 0


def _cpu_convolution(
    copied: int, value: Tensor, weight: Tensor, stride: Sequence[int], groups: int
) -> int:
    """One of 1 × 1 works in place, channels last need other weights only, all else is `copied`.

    A depthwise one with channels last has a block of weights for each channel. Of three copies of
    other weights autograd makes one, which fakes show, where these are not channels last too.
    """
    if prod(weight.shape[2:]) == prod(stride) == groups == 1:
        return 0
    if not _is_channels_last(value):
        return copied
    is_depthwise = groups == value.shape[1]
    copies = BLOCK * BLOCK if is_depthwise else 3 if _is_channels_last(weight) else 2
    return copies * size_bytes([weight])


def _is_channels_last(value: Tensor) -> bool:
    is_image = value.dim() == 4 and not value.is_contiguous()
    return is_image and value.is_contiguous(memory_format=torch.channels_last)


def hidden_bytes(operator: Any, arguments: Sequence[Any], result: Any) -> tuple[Tensor, int] | None:
    """A result of which fakes say that it is empty, and what it takes; None if there is none.

    An LSTM's layer keeps a workspace for its backward: in oneDNN seven buffers in whole pages
    (common/rnn.cpp); cuDNN's reserve is taken to be no larger.
    """
    if operator is not aten.mkldnn_rnn_layer.default:
        return None
    (steps, images, width), hidden = arguments[0].shape, result[0].shape[-1]
    states = 2 * (steps + 1) * images
    rows = [steps * images * 4 * hidden, steps * images * hidden]
    rows += [states * _whole(max(width, hidden), BLOCK)] * 3 + [states * _whole(hidden, BLOCK)] * 2
    return result[3], sum(_whole(arguments[0].element_size() * row, PAGE) for row in rows)


def _whole(number: int, block: int) -> int:
    """Rounded up to whole blocks."""
    return -(-number // block) * block
