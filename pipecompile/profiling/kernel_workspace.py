"""Kernel workspace: a margin for the memory of kernels that fake tensors do not show.

The rules are the same on every machine, one set for GPUs and one for CPUs. Which layouts a kernel
chooses is not documented and differs between processors. Those for CPUs are for one thread; they
may be too low for rare convolutions, and without AVX-512 for more of them (docs/design/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import ge
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
IMAGES = 4  # dimensions of a batch of images: image, channel, height, width
FLOAT_BYTES = 4
PAGE = 4096
PARTS = 64  # sums of up to this many rows have no partial sums
PARTIAL_SUMS = 140 << 20  # at most, for one sum on the 132 multiprocessors of an H200
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
    """Return the workspace of convolutions and of sums over rows, as it was measured on an H200.

    cuDNN "may use padding, folding, and NCHW-to-NHWC transformations to call the Tensor Core
    operations" (docs.nvidia.com/deeplearning/cudnn/developer/legacy-api.html), and each transformed
    tensor is a copy: of all that a forward reads and writes, and of the gradient and the input for
    each half of a backward. Its other algorithms may take more; PyTorch falls back to one that the
    allocator can serve.

    A sum over many rows, such as the gradient of a bias, keeps partial sums. They take 8 bytes for
    each element, up to the size that keeps the whole device busy (aten/src/ATen/native/cuda,
    Reduce.cuh).
    """
    if operator is aten.convolution.default:
        return size_bytes(tensor_leaves((arguments, result)))
    if operator is aten.convolution_backward.default:
        return size_bytes(tensor_leaves(arguments[:3]))
    if operator is aten.sum.dim_IntList and arguments[0].numel() > PARTS * result.numel():
        return min(8 * int(arguments[0].numel()), PARTIAL_SUMS)
    return 0


def _on_cpu(operator: Any, arguments: Sequence[Any], result: Any) -> int:
    """Return the workspace of some backwards, of convolutions and of LSTM layers."""
    if operator in COPYING:
        return size_bytes(arguments[:1])
    if operator is aten.convolution.default:
        return _workspace_of_convolution(result, *arguments[:9])
    if operator is aten.convolution_backward.default:
        gradient, value, weight, _, *rest = arguments[:10]
        return _workspace_of_convolution(gradient, value, weight, None, *rest)
    if operator in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default):
        value, of_input, of_state = arguments[:3]
        # The gates of all steps, and a copy of the weights; all in whole pages.
        gates = prod(value.shape[:2]) * of_state.shape[0] * value.element_size()
        return _rounded_up(gates, PAGE) + size_bytes([of_input, of_state]) + 4 * PAGE
    return 0


@dataclass(frozen=True)
class _Convolution:
    """A convolution on a CPU, and its margin in either direction.

        usual, channels first    a copy of the input, and one of the output or of the weight,
                                 whichever is more; with a stride at least two of the input
        usual, channels last     three copies of the weight
        any other                all of these, and the patches of one group of all images

    oneDNN fills whole blocks of 16 channels: of a depthwise weight, each channel has 16 × 16.
    Patches are a matrix that has each element of an image as often as the kernel reads it.
    """

    output: Tensor  # or its gradient, which has the same layout
    value: Tensor
    weight: Tensor
    stride: Sequence[int]
    dilation: Sequence[int]
    is_transposed: bool
    groups: int

    def workspace_bytes(self) -> int:
        """Return the workspace of a forward or a backward."""
        value, output = _padded_bytes(self.value), _padded_bytes(self.output)
        weight, padded = size_bytes([self.weight]), self._padded_weight_bytes()
        if not self._is_usual:
            # In half precision there are copies in float32 too, of twice the size.
            copies = 1 if self.weight.element_size() >= FLOAT_BYTES else 4
            return copies * (value + output + padded + 3 * weight) + self._patches_bytes()
        if self._is_channels_last:
            return padded + 2 * weight
        least = value if prod(self.stride) == 1 else 2 * value
        return max(least, value + output, value + (padded if self.groups == 1 else weight))

    @property
    def _is_usual(self) -> bool:
        """Whether it is of a kind that most networks have, and oneDNN has kernels for."""
        kernel = self.weight.shape[2:]
        if self._is_channels_last and (prod(self.stride) > 1 or prod(kernel) == 1 < self.groups):
            return False
        return (
            (self.value.dtype, self.value.dim()) == (torch.float32, IMAGES)
            and self.value.shape[0] > 1
            and prod(self.dilation) == 1
            and not self.is_transposed
            and self.groups in (1, self.value.shape[1])
            and all(map(ge, self.value.shape[2:], kernel))
        )

    @property
    def _is_channels_last(self) -> bool:
        is_one_position = prod(self.value.shape[2:]) == 1  # which may lie in either order
        return is_one_position or _is_channels_last(self.value) or _is_channels_last(self.weight)

    def _patches_bytes(self) -> int:
        """Return the bytes of the patches of one group of all images."""
        positions = prod((self.value if self.is_transposed else self.output).shape[2:])
        group = size_bytes([self.weight]) // self.weight.shape[0]
        return self.value.shape[0] * positions * group

    def _padded_weight_bytes(self) -> int:
        """Return the bytes of a copy of the weight in whole blocks of the channels of groups."""
        widths = [images.shape[1] // self.groups for images in (self.value, self.output)]
        blocks = prod(_rounded_up(width, BLOCK) for width in widths)
        return size_bytes([self.weight]) // prod(widths) * blocks


def _workspace_of_convolution(
    output: Tensor,
    value: Tensor,
    weight: Tensor,
    _bias: Any,
    stride: Sequence[int],
    _padding: Any,
    dilation: Sequence[int],
    is_transposed: bool,
    _output_padding: Any,
    groups: int,
) -> int:
    return _Convolution(
        output, value, weight, stride, dilation, is_transposed, groups
    ).workspace_bytes()


def _padded_bytes(images: Tensor) -> int:
    """Return the bytes of a copy in which the channels fill whole blocks."""
    width = images.shape[1]
    return size_bytes([images]) // width * _rounded_up(width, BLOCK)


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
