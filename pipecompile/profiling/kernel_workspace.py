"""Kernel workspace: a margin for the memory of kernels that fake tensors do not show.

The rules are the same on every machine, one set for GPUs and one for CPUs. Which layouts a kernel
chooses is not documented and differs between processors. So these rules are no model of kernels,
but simple and large enough. docs/design/memory.md compares them with measurements.
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

__all__ = ["Workspace", "hidden_bytes", "workspace_on"]

aten = torch.ops.aten

Workspace = Callable[[Any, Sequence[Any], Any], int]
"""From an operator, its arguments and its result to the bytes of its workspace."""

BLOCK = 16  # oneDNN pads channels to whole blocks of this size
COLOURS = 5  # with fewer channels there is nothing to gain from blocks
UNFOLDED_ELEMENTS = 20480  # of one image: PyTorch multiplies a matrix of its patches up to this
PAGE = 4096
# On a CPU these copy the gradient into the layout of the input.
COPYING = (
    aten.native_batch_norm_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
)


def workspace_on(allocator: AllocatorName) -> Workspace:
    """Return the rule for the kernels of this device."""
    return _on_cuda if allocator == "cuda" else _on_cpu


def _on_cuda(operator: Any, arguments: Sequence[Any], result: Any) -> int:
    """Return the bytes of copies: a convolution copies everything that it reads and writes.

    This has not been measured.
    cuDNN "may use padding, folding, and NCHW-to-NHWC transformations to call the Tensor Core
    operations" (docs.nvidia.com/deeplearning/cudnn/developer/legacy-api.html), and each transformed
    tensor is a copy. Its other algorithms may take more; PyTorch falls back to one that the
    allocator can serve.
    """
    if operator not in (aten.convolution.default, aten.convolution_backward.default):
        return 0
    return size_bytes(tensor_leaves((arguments, result)))


def _on_cpu(operator: Any, arguments: Sequence[Any], result: Any) -> int:
    """Return the workspace of some backwards, of convolutions and of LSTM layers."""
    if operator in COPYING:
        return size_bytes(arguments[:1])
    if operator is aten.convolution.default:
        value, weight, _, stride = arguments[:4]
        # A copy of what it reads, or of what it writes if that is more.
        copied = max(size_bytes([value, weight]), size_bytes([result]))
        return _cpu_convolution(copied, value, weight, stride, arguments[8])
    if operator is aten.convolution_backward.default:
        gradient, value, weight, _, stride = arguments[:5]
        # A copy of the images that it reads; twice the input with a stride; or of the weight.
        images = _in_blocks(gradient) + _in_blocks(value)
        input_gradients = 2 * size_bytes([value]) if prod(stride) > 1 else 0
        copied = max(images, input_gradients, size_bytes([weight]))
        return _cpu_convolution(copied, value, weight, stride, arguments[9])
    if operator in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default):
        value, of_input, of_state = arguments[:3]
        # The gates of all steps, and a copy of the weights; all in whole pages.
        gates = prod(value.shape[:2]) * of_state.shape[0] * value.element_size()
        return _rounded_up(gates, PAGE) + size_bytes([of_input, of_state]) + 4 * PAGE
    return 0


def _cpu_convolution(
    copied: int, value: Tensor, weight: Tensor, stride: Sequence[int], groups: int
) -> int:
    """Return the workspace of a convolution, by its layout.

        1 × 1, without stride and groups      0, as it works in place
        one small image, channels first       the input once for each element of the kernel
        channels first                        `copied`
        channels last, depthwise              the weights with a whole block for each channel
        channels last                         three copies of the weights

    Of these three copies autograd makes one itself if the weights are not channels last too. A run
    on fake tensors shows that one.
    """
    if prod(weight.shape[2:]) == prod(stride) == groups == 1:
        return 0
    if not _is_channels_last(value):
        is_unfolded = value.shape[0] == 1 and value.numel() <= UNFOLDED_ELEMENTS
        unfolded = prod(weight.shape[2:]) * size_bytes([value]) if is_unfolded else 0
        return max(copied, unfolded)
    is_depthwise = groups == value.shape[1]
    copies = BLOCK * BLOCK if is_depthwise else 3 if _is_channels_last(weight) else 2
    return copies * size_bytes([weight])


def _in_blocks(images: Tensor) -> int:
    """Return the bytes of a copy whose channels are padded to blocks, as those of 8 to 16.

    An image of a few colours is read as it is.
    """
    channels = images.shape[1]
    padded = channels if channels < COLOURS else _rounded_up(channels, BLOCK)
    return size_bytes([images]) // channels * padded


def _is_channels_last(value: Tensor) -> bool:
    is_image = value.dim() == 4 and not value.is_contiguous()
    return is_image and value.is_contiguous(memory_format=torch.channels_last)


def hidden_bytes(operator: Any, arguments: Sequence[Any], result: Any) -> tuple[Tensor, int] | None:
    """Return a result that is empty on fake tensors and its real bytes; None if there is none.

    An LSTM layer keeps a workspace for its backward. In oneDNN these are seven buffers in whole
    pages (common/rnn.cpp). The reserve of cuDNN is assumed to be no larger.
    """
    if operator is not aten.mkldnn_rnn_layer.default:
        return None
    (steps, images, width), hidden = arguments[0].shape, result[0].shape[-1]
    states = 2 * (steps + 1) * images
    rows = [steps * images * 4 * hidden, steps * images * hidden]
    rows += [states * _rounded_up(max(width, hidden), BLOCK)] * 3 + [
        states * _rounded_up(hidden, BLOCK)
    ] * 2
    return result[3], sum(_rounded_up(arguments[0].element_size() * row, PAGE) for row in rows)


def _rounded_up(number: int, block: int) -> int:
    """Return `number` rounded up to a multiple of `block`."""
    return -(-number // block) * block
