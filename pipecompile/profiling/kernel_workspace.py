"""Kernel workspace: a margin for the memory of kernels that fake tensors do not show.

The rules are the same on every machine, one set for GPUs and one for CPUs. Which layouts a kernel
chooses is not documented and differs between processors. So these rules are no model of kernels,
but simple and large enough. docs/design/memory.md compares them with measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

BLOCK = 16  # oneDNN pads channels to whole blocks of this size, or of half of it
HALF_BLOCK = BLOCK // 2
FEW = 4  # channels, which a backward pads to half a block
UNFOLDED = 20480  # elements of one image, up to which PyTorch multiplies a matrix of its patches
PAGE = 4096
PARTS = 64  # rows, and fewer are summed at once
PARTIAL_SUMS = 140 << 20  # of one sum on the 132 multiprocessors of an H200
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

    A sum over many rows, such as the gradient of a bias, keeps sums of parts of them: 8 bytes for
    each element, as long as more parts keep the device busier (aten/src/ATen/native/cuda,
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
        value, weight, _, stride, _, _, is_transposed, _, groups = arguments[:9]
        return _Convolution(value, result, weight, stride, is_transposed, groups).forward_bytes()
    if operator is aten.convolution_backward.default:
        gradient, value, weight, _, stride, _, _, is_transposed, _, groups = arguments[:10]
        return _Convolution(value, gradient, weight, stride, is_transposed, groups).backward_bytes()
    if operator in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default):
        value, of_input, of_state = arguments[:3]
        # The gates of all steps, and a copy of the weights; all in whole pages.
        gates = prod(value.shape[:2]) * of_state.shape[0] * value.element_size()
        return _rounded_up(gates, PAGE) + size_bytes([of_input, of_state]) + 4 * PAGE
    return 0


@dataclass(frozen=True)
class _Convolution:
    """A convolution on a CPU: the workspace of each direction, by its layout.

        1 × 1, without stride and groups       0, as it works in place
        channels first                         copies of what it reads or writes
        channels last                          three copies of the weights
        channels last, depthwise               the weights with a whole block for each channel
        images lower than the kernel           four copies of the weights, if that is more
        odd groups                             as channels first, or the patches of one group of one
                                               image and four copies of the weights
        not float32, or one small image        all patches of one group, if that is more

    Patches are a matrix in which each element of an image is as often as the kernel reads it. Odd
    groups have a number of channels that is no multiple of eight. Of three copies of the weights
    autograd makes one itself if they are not channels last too; a run on fake tensors shows it.
    """

    value: Tensor
    output: Tensor  # or its gradient, which has the same layout
    weight: Tensor
    stride: Sequence[int]
    is_transposed: bool
    groups: int

    def forward_bytes(self) -> int:
        """Return a copy of what it reads, or of what it writes if that is more."""
        written = _padded_bytes(self.output, HALF_BLOCK)
        if self.is_transposed and prod(self.stride) > 1:
            written *= 2
        return self._bytes(max(size_bytes([self.value, self.weight]), written))

    def backward_bytes(self) -> int:
        """Return copies of the images; twice the input with a stride; or a copy of the weight."""
        images = sum(
            _padded_bytes(each, BLOCK if each.shape[1] > FEW else HALF_BLOCK)
            for each in (self.output, self.value)
        )
        input_gradients = 2 * size_bytes([self.value]) if prod(self.stride) > 1 else 0
        return self._bytes(max(images, input_gradients, size_bytes([self.weight])))

    def _bytes(self, copied: int) -> int:
        kernel, weight = self.weight.shape[2:], size_bytes([self.weight])
        if prod(kernel) == prod(self.stride) == self.groups == 1:
            return 0
        if self._has_odd_groups:
            copied = max(copied, self._group_patches() + 4 * weight)
        elif _is_channels_last(self.value):
            copied = weight * (3 if _is_channels_last(self.weight) else 2)
            copied = BLOCK * BLOCK * weight if self._is_depthwise else copied
        if unfolded := self._unfolded():
            return max(copied, unfolded)
        is_low = self.value.shape[2] < kernel[0]
        return max(copied, 4 * weight if is_low else 0)

    def _unfolded(self) -> int:
        """Return what PyTorch takes where it multiplies patches by itself; 0 where oneDNN works.

        Groups take turns, with copies of their channels. A processor with kernels for half
        precision needs less.
        """
        first_sizes = self.value.shape[:4]  # of a volume, too
        is_small = self.value.shape[0] == self.groups == 1 and prod(first_sizes) <= UNFOLDED
        if self.value.dtype == torch.float32 and not is_small:
            return 0
        slices = size_bytes([self.value, self.output]) if self.groups > 1 else 0
        return self.value.shape[0] * self._group_patches() + slices

    def _group_patches(self) -> int:
        """Return the bytes of the patches of one group of one image."""
        positions = prod((self.value if self.is_transposed else self.output).shape[2:])
        return positions * size_bytes([self.weight]) // self.weight.shape[0]

    @property
    def _is_depthwise(self) -> bool:
        return self.groups == self.value.shape[1] and not self.is_transposed

    @property
    def _has_odd_groups(self) -> bool:
        widths = (images.shape[1] // self.groups for images in (self.value, self.output))
        return (
            self.groups > 1
            and not self._is_depthwise
            and any(width % HALF_BLOCK for width in widths)
        )


def _padded_bytes(images: Tensor, block: int) -> int:
    """Return the bytes of a copy whose channels are padded to a multiple of `block`."""
    channels = images.shape[1]
    return size_bytes([images]) // channels * _rounded_up(channels, block)


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
