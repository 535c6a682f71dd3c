"""Kernel workspace: a margin for the memory of kernels that fake tensors do not show.

The rules are the same on every machine, one set for GPUs and one for CPUs. Which layouts a kernel
chooses is not documented and differs between processors. Those for CPUs were fitted to measurements
of one thread with AVX2 and AVX-512 (docs/design/memory.md); elsewhere they may be too low.
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

BLOCK = 16  # oneDNN pads channels to whole blocks of this size
HALF_BLOCK = BLOCK // 2  # of channels, for which it has kernels too
VOLUMES = 5  # dimensions, with images and channels
FLOAT_BYTES = 4
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
    """A convolution on a CPU: the workspace of either direction, by what runs it.

        oneDNN, channels first     copies of the images, padded to whole blocks of channels; with a
                                   stride half of the input more, or twice the input, or twice the
                                   output of a transposed one; or the input and the padded weights
        oneDNN, channels last      the weights padded, and two copies of them
        oneDNN, by patches         the patches of one group of one image, and the weights padded and
                                   three copies of them, if that is more
        PyTorch, by patches        those of all images, if that is more

    Patches are a matrix in which each element of an image is as often as the kernel reads it. The
    padded weights are those of each group, so a depthwise convolution has 16 × 16 copies of them.
    Of three copies of the weights autograd makes one itself if they are not channels last too; a
    run on fake tensors shows it.
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
        copied = self._weights_bytes() if self._is_channels_last else self._images_bytes()
        if self.weight.element_size() < FLOAT_BYTES:
            copied *= 2  # half precision, with sums in float32
        return max(copied, self._multiplied_bytes(), self._unfolded_bytes())

    def _images_bytes(self) -> int:
        """Return what channels first take: copies of images, with the weights if that is more."""
        value, output = (_padded_bytes(images) for images in (self.value, self.output))
        weights = self._padded_weight_bytes() if self.groups == 1 else self._weight_bytes
        images = value + output
        copies = [images, size_bytes([self.value]) + weights]
        if prod(self.stride) > 1:
            copies += [2 * output if self.is_transposed else 2 * value, images + value // 2]
        return max(copies)

    def _weights_bytes(self) -> int:
        """Return what channels last take: the weights in blocks, and copies of them."""
        copies = 2 if _is_channels_last(self.weight) else 1
        return self._padded_weight_bytes() + copies * self._weight_bytes

    def _multiplied_bytes(self) -> int:
        """Return what oneDNN takes where it multiplies patches, 0 where it has better kernels.

        Groups and channels last are multiplied with copies of one image.
        """
        if not self._is_rare:
            return 0
        copied = 0
        if self.groups > 1 or self._is_channels_last:
            padded = (_padded_bytes(each, self.groups) for each in (self.value, self.output))
            copied = sum(padded) // self.value.shape[0]
        weights = self._padded_weight_bytes() + 3 * self._weight_bytes
        return self._group_patches() + copied + weights

    def _unfolded_bytes(self) -> int:
        """Return what PyTorch takes where it multiplies patches by itself; 0 where oneDNN works.

        Groups take turns, with copies of their channels, other than those of a volume. A processor
        with kernels for half precision needs less.
        """
        images, is_grouped = self.value.shape[0], self.groups > 1
        is_small = images == 1 and not is_grouped and prod(self.value.shape[:4]) <= UNFOLDED
        is_point = prod(self.weight.shape[2:]) == 1 and (self.is_transposed or is_grouped)
        if self.value.dtype == torch.float32 and not is_small and not is_point:
            return 0
        at_once = self.groups if self.value.dim() == VOLUMES else 1
        slices = size_bytes([self.value, self.output, self.weight]) if is_grouped else 0
        return images * at_once * self._group_patches() + slices

    def _group_patches(self) -> int:
        """Return the bytes of the patches of one group of one image."""
        positions = prod((self.value if self.is_transposed else self.output).shape[2:])
        return positions * size_bytes([self.weight]) // self.weight.shape[0]

    @property
    def _is_rare(self) -> bool:
        """Whether oneDNN may have no kernel of its own for it."""
        return (
            self.value.dtype != torch.float32
            or self.value.dim() == VOLUMES
            or prod(self.dilation) > 1
            or (self._is_channels_last and (self.is_transposed or prod(self.stride) > 1))
            or (not self._is_depthwise and (self._is_low or self._has_odd_groups))
        )

    @property
    def _is_low(self) -> bool:
        """Whether its images are smaller than its kernel in some dimension."""
        sizes = zip(self.value.shape[2:], self.weight.shape[2:], strict=True)
        return any(size < kernel for size, kernel in sizes)

    @property
    def _has_odd_groups(self) -> bool:
        return self.groups > 1 and any(width % HALF_BLOCK for width in self._widths)

    @property
    def _is_depthwise(self) -> bool:
        return self.groups == self.value.shape[1] and not self.is_transposed

    @property
    def _is_channels_last(self) -> bool:
        is_one_position = prod(self.value.shape[2:]) == 1  # which may lie in either order
        return is_one_position or _is_channels_last(self.value) or _is_channels_last(self.weight)

    @property
    def _widths(self) -> list[int]:
        """How many channels of the input and of the output a group has."""
        return [images.shape[1] // self.groups for images in (self.value, self.output)]

    @property
    def _weight_bytes(self) -> int:
        """The bytes of a copy of the weights: in half precision there are two in float32 too."""
        size = self.weight.element_size()
        return self.weight.numel() * (size if size >= FLOAT_BYTES else size + 2 * FLOAT_BYTES)

    def _padded_weight_bytes(self) -> int:
        """Return the bytes of a copy of the weights in whole blocks of the channels of groups."""
        blocks = prod(_rounded_up(width, BLOCK) for width in self._widths)
        return self._weight_bytes // prod(self._widths) * blocks


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


def _padded_bytes(images: Tensor, groups: int = 1) -> int:
    """Return the bytes of a copy in which the channels of each group fill whole blocks."""
    width = images.shape[1] // groups
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
