"""Memory of kernels that fake tensors do not show: scratch inside, by device, and results that they say are empty.

Measured on a CPU with oneDNN (AVX-512, float32): a convolution of channels-first images brings what it reads into
layouts of its own, and its result out of one. There channels come in blocks of 16, of few input channels in blocks of 8
or as they are; those of groups are taken as they are. A backward makes the gradient of the input, if it is wanted, then
that of the weight. With channels last images stay as they are and weights are copied; their gradient is summed in
blocks of 16 channels, also where a group has one channel; there AVX2 has blocks of 8, and on images lower than the
kernel a few sums beside each other. What is pointwise works in place. Of what else is known to differ between
instruction sets the larger counts. In float64 and float16, which oneDNN has not, and for one small image the input is
unfolded. Transposed convolutions have a margin, and so have groups of odd channels and bfloat16.
The backward of a batch norm takes as much as its input where both that and the gradient are in one layout, that of an
upsampling a copy of a gradient that is not in order.

An LSTM's layer keeps a workspace for its backward. oneDNN's has seven buffers in whole pages (common/rnn.cpp, measured
on 13 shapes); cuDNN's reserve is taken to be no larger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from pipecompile.graph.storages import size_bytes
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.ir.amount import AllocatorName, Instructions

__all__ = ["Scratch", "first_half", "hidden_bytes", "own_instructions", "scratch_on"]

SMALL_IMAGE = 20_480  # elements
HALF, HALF_DENSE = (
    5,
    2,
)  # times what the rules say, for gradients of weights in bfloat16; dense are channels last
PARTS = 4  # sums of a weight's gradient beside each other, with AVX2 where images are less high than the kernel

Scratch = Callable[[Any, Sequence[Any], Any], int]
"""From an operator, its arguments and its result to bytes."""


def _on_cpu(
    operator: Any, arguments: Sequence[Any], result: Any, *, instructions: Instructions
) -> int:
    if operator is torch.ops.aten.convolution.default:
        value = arguments[0]
        return (
            _copied(value, value) + _cpu_convolution(arguments, result, instructions)
            if value.numel()
            else 0
        )
    if operator is torch.ops.aten.convolution_backward.default:
        gradient, value = arguments[:2]
        copied = _copied(value, value) + _copied(gradient, value)
        return copied + _cpu_convolution_backward(arguments, instructions) if value.numel() else 0
    if operator is torch.ops.aten.native_batch_norm_backward.default:
        (gradient, value), wanted = arguments[:2], arguments[-1]
        return size_bytes([value]) if wanted[0] and _are_alike(gradient, value) else 0
    if operator in _UPSAMPLING:
        gradient = arguments[0]
        return (
            0 if gradient.is_contiguous() or _is_channels_last(gradient) else size_bytes([gradient])
        )
    if operator is torch.ops.aten.mkldnn_rnn_layer.default:
        return _layer_scratch(arguments[0], arguments[1], arguments[2])
    if operator is torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return _layer_scratch(arguments[0], arguments[1], arguments[2])
    return 0


_UPSAMPLING = (
    torch.ops.aten.upsample_nearest2d_backward.default,
    torch.ops.aten.upsample_bilinear2d_backward.default,
)


def _copied(read: Tensor, value: Tensor) -> int:
    """What a convolution reads is copied first if it is not in order, channels last if its input is so."""
    layout = torch.channels_last if _is_channels_last(value) else torch.contiguous_format
    return 0 if read.is_contiguous(memory_format=layout) else size_bytes([read])


def _cpu_convolution(arguments: Sequence[Any], result: Tensor, instructions: Instructions) -> int:
    (value, weight, _, stride, padding), transposed, groups = (
        arguments[:5],
        arguments[6],
        arguments[8],
    )
    if not transposed and _is_pointwise(weight, stride, padding, groups):
        return _pointwise(value, weight, result)
    if _is_unfolded(value, weight, groups, instructions):
        return _unfolded(value, result, weight, groups, transposed=transposed)
    if transposed:
        return 2 * size_bytes([result]) + size_bytes([value, weight])
    if _is_channels_last(value):
        return size_bytes([weight]) * (1 if _is_depthwise(value, groups) else 2)
    if groups > 1:
        return max(size_bytes([value, weight]), size_bytes([result]))
    out = _padded_bytes(result, 16)
    block = _block(value)
    read = (
        _padded_bytes(value, 16) + _blocked_bytes(weight, 1)
        if block == 16
        else size_bytes([weight])
    )
    return max(read + out - size_bytes([result]), out)


def _cpu_convolution_backward(arguments: Sequence[Any], instructions: Instructions) -> int:
    """Above what it returns: first the gradient of the input is made, then that of the weight."""
    (gradient, value, weight, _, stride, padding), groups, wanted = (
        arguments[:6],
        arguments[9],
        arguments[10],
    )
    if _is_pointwise(weight, stride, padding, groups):
        return _pointwise(value, weight, gradient)
    if _is_unfolded(value, weight, groups, instructions):
        return _unfolded_backward(arguments)
    first = _input_scratch(gradient, value, weight, stride, groups) if wanted[0] else 0
    if not wanted[1]:
        return first
    if instructions == "avx2" and _is_spread(value, weight, groups):
        return _avx2_depthwise_backward(value, weight)
    second = _weight_scratch(gradient, value, weight, groups, instructions)
    if value.element_size() == 2:
        is_dense = _is_channels_last(value) and not _is_spread(value, weight, groups)
        second *= HALF_DENSE if is_dense else HALF
    return max(first - size_bytes([weight]), second)


def _input_scratch(
    gradient: Tensor, value: Tensor, weight: Tensor, stride: Sequence[int], groups: int
) -> int:
    """For the gradient of the input, which is made in blocks, where there is a stride twice; with buffers of a few kB.

    Measured with AVX2 on 40 shapes, with AVX-512 on 30; with three or many channels and a stride oneDNN takes up to
    350 kB of buffers besides.
    """
    own = size_bytes([weight])
    if _is_channels_last(value) and (groups == 1 or prod(weight.shape[2:]) > 1):
        return own if _is_depthwise(value, groups) else 2 * own + 22 * _PAGE
    made = size_bytes([value]) if groups > 1 else _padded_bytes(value, 16)
    read = (
        size_bytes([gradient]) + own
        if groups > 1
        else _padded_bytes(gradient, 16) + _blocked_bytes(weight, 1)
    )
    times = 2 if prod(stride) > 1 and not _is_depthwise(value, groups) else 1
    return max(read + made - size_bytes([value]), times * made)


def _weight_scratch(
    gradient: Tensor, value: Tensor, weight: Tensor, groups: int, instructions: Instructions
) -> int:
    """For the gradient of the weight."""
    own, blocked = size_bytes([weight]), _blocked_bytes(weight, groups)
    if _is_spread(value, weight, groups):
        return own + blocked
    if _is_channels_last(value) and _is_depthwise(value, groups):
        return 2 * own
    if _is_channels_last(value):
        return 2 * own + blocked
    if groups > 1:
        return _grouped(size_bytes([gradient, value]), weight, groups)
    block, given = _block(value), _padded_bytes(gradient, 16)
    copied = _padded_bytes(value, block) if block > 1 else 0
    summed = _blocked_bytes(weight, 1, block)
    if instructions == "avx2" and value.shape[2] < weight.shape[2]:
        return max(given + copied + PARTS * summed, summed)
    return max(given + copied + summed - own, summed)


def _grouped(given: int, weight: Tensor, groups: int) -> int:
    """Groups are taken as they are; of 8, 24, … channels weights are summed in blocks; of 9, 10, … a margin."""
    own, blocked = size_bytes([weight]), _blocked_bytes(weight, groups)
    parted = [
        number
        for number in (weight.shape[0] // groups, weight.shape[1])
        if number >= 8 and number % 16
    ]
    if any(number % 8 for number in parted):
        return given + 5 * blocked
    return max(given, own + blocked if parted else own)


def _is_spread(value: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether the gradient of the weight is summed in whole blocks though each group has one channel."""
    return _is_channels_last(value) and _is_depthwise(value, groups) and max(weight.shape[2:]) > 3


def _avx2_depthwise_backward(value: Tensor, weight: Tensor) -> int:
    """Measured on ten shapes; the sums on low images are those of one thread."""
    return size_bytes([weight]) * (PARTS if value.shape[2] < weight.shape[2] else 1 + 8 * 8)


def _is_unfolded(value: Tensor, weight: Tensor, groups: int, instructions: Instructions) -> bool:
    """Whether PyTorch's own convolution runs, as for one small image (use_mkldnn in Convolution.cpp)."""
    is_one, is_small = value.shape[0] == groups == 1, prod(value.shape[:4]) <= SMALL_IMAGE
    is_native = is_one and is_small and min((1, *weight.shape[2:])[-2:]) <= 3
    own = (torch.float64, torch.float16, *((torch.bfloat16,) if instructions == "avx2" else ()))
    return value.dtype in own or (value.dtype is torch.float32 and is_native)


def _unfolded(
    value: Tensor, outcome: Tensor, weight: Tensor, groups: int, *, transposed: bool
) -> int:
    """The input with every element as often as the kernel reads it; a transposed convolution's result is its input.

    Groups come one by one, as copies, and are then joined.
    """
    read, made = (outcome, value) if transposed else (value, outcome)
    columns = (
        size_bytes([read])
        // prod(read.shape[2:])
        * prod(weight.shape[2:])
        * prod(made.shape[2:])
        // groups
    )
    turned = _turned(value, weight)
    if groups > 1:
        return columns + 2 * turned + size_bytes([outcome, *([value] if turned else [])])
    return columns + turned


def _unfolded_backward(arguments: Sequence[Any]) -> int:
    """Of PyTorch's own convolutions slow_conv2d alone unfolds nothing for the gradient of the input."""
    (gradient, value, weight), dilation, transposed = arguments[:3], arguments[6], arguments[7]
    groups, wanted = arguments[9], arguments[10]
    is_slow_2d = weight.dim() < 5 and groups == 1 and not transposed and set(dilation) == {1}
    if is_slow_2d and not wanted[1]:
        return _turned(value, weight)
    return _unfolded(value, gradient, weight, groups, transposed=transposed)


def _turned(value: Tensor, weight: Tensor) -> int:
    """With channels last the weight is copied."""
    return size_bytes([weight]) if _is_channels_last(value) and prod(weight.shape[2:]) > 1 else 0


def _block(value: Tensor) -> int:
    """The channels in a block of an input."""
    return 1 if value.shape[1] <= 3 else 8 if value.shape[1] <= 8 else 16


def _padded_bytes(images: Tensor, block: int) -> int:
    """With whole blocks of channels."""
    return size_bytes([images]) // images.shape[1] * _whole(images.shape[1], block)


def _whole(number: int, block: int) -> int:
    """Rounded up to whole blocks."""
    return -(-number // block) * block


def _blocked_bytes(weight: Tensor, groups: int, block: int = 16) -> int:
    """The weight with the output channels of each group in blocks of 16, the input channels in blocks of `block`."""
    outputs, inputs = _whole(weight.shape[0] // groups, 16), _whole(weight.shape[1], block)
    return groups * outputs * inputs * prod(weight.shape[2:]) * weight.element_size()


def _is_pointwise(
    weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int
) -> bool:
    return prod(weight.shape[2:]) == prod(stride) == groups == 1 and not any(padding)


def _pointwise(value: Tensor, weight: Tensor, outcome: Tensor) -> int:
    """It works in place, but in half precision: there a margin, of copies of everything."""
    if value.element_size() > 2:
        return 0
    return size_bytes([value, outcome, weight, weight, weight]) + 4 * _PAGE


def _is_depthwise(value: Tensor, groups: int) -> bool:
    return groups > 1 and groups == value.shape[1]


def _are_alike(left: Tensor, right: Tensor) -> bool:
    in_order = left.is_contiguous() and right.is_contiguous()
    return in_order or (_is_channels_last(left) and _is_channels_last(right))


def _is_channels_last(value: Tensor) -> bool:
    return (
        value.dim() == 4
        and not value.is_contiguous()
        and value.is_contiguous(memory_format=torch.channels_last)
    )


def _on_cuda(operator: Any, arguments: Sequence[Any], result: Any) -> int:
    """A convolution: a copy of all that it reads and writes; a margin, not measured.

    cuDNN "may use padding, folding, and NCHW-to-NHWC transformations to call the Tensor Core operations"
    (docs.nvidia.com/deeplearning/cudnn/developer/legacy-api.html), and each transformed tensor is a copy. Its other
    algorithms may take more; PyTorch falls back to one that the allocator can serve.
    """
    if operator not in (
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
    ):
        return 0
    return size_bytes(tensor_leaves((arguments, result)))


def hidden_bytes(operator: Any, arguments: Sequence[Any], result: Any) -> tuple[Tensor, int] | None:
    """A result of which fakes say that it is empty, and what it takes; None if there is none."""
    if operator is not torch.ops.aten.mkldnn_rnn_layer.default:
        return None
    value, hidden = arguments[0], result[0].shape[-1]
    steps, images, wide = value.shape[0], value.shape[1], max(value.shape[-1], hidden)
    states = 2 * (steps + 1) * images
    rows = [steps * images * 4 * hidden, steps * images * hidden]
    rows += [states * _whole(wide, 16)] * 3 + [states * _whole(hidden, 16)] * 2
    return result[3], sum(_whole(value.element_size() * row, _PAGE) for row in rows)


def _layer_scratch(value: Tensor, weight_of_input: Tensor, weight_of_state: Tensor) -> int:
    """The gates of all steps, and copies of the weights."""
    gates = value.shape[0] * value.shape[1] * weight_of_state.shape[0] * value.element_size()
    return _whole(gates, _PAGE) + size_bytes([weight_of_input, weight_of_state]) + 4 * _PAGE


_PAGE = 4096


def first_half(operator: Any, arguments: Sequence[Any], result: Any) -> tuple[Sequence[Any], Any]:
    """What an operator is called with in the first half of a backward, and what it returns then.

    A convolution's makes but the gradient of the input.
    """
    if operator is not torch.ops.aten.convolution_backward.default:
        return arguments, result
    *others, wanted = arguments
    return [*others, [wanted[0], False, False]], (result[0], None, None)


def scratch_on(memory: AllocatorName, instructions: Instructions) -> Scratch:
    """That of the kernels of a GPU, or of a CPU with these instructions."""
    return _on_cuda if memory == "cuda" else partial(_on_cpu, instructions=instructions)


def own_instructions() -> Instructions:
    """Those of this CPU, as far as they matter: of what is not known to be AVX2 the larger scratch counts."""
    return "avx2" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "avx512"
