"""Scratch that kernels take inside, which fake tensors do not show: a table of operators for each kind of device.

Measured on a CPU with oneDNN (channels-first, float32): a convolution wider than one pixel brings its input and its
weight, then its output, into blocked layouts of their own; its backward the input and the gradient of the output, then
the gradients. Pointwise convolutions work in place. How much exactly depends on the instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from pipecompile.cost_models.protocol import size_bytes
from pipecompile.ir.allocator import AllocatorName

__all__ = ["SCRATCH", "Scratch"]

Scratch = Callable[[Any, Sequence[Any]], int]
"""From an operator and its arguments to bytes."""


def _on_cpu(operator: Any, arguments: Sequence[Any]) -> int:
    if operator is torch.ops.aten.convolution.default:
        return _convolution(arguments[0], arguments[1])
    if operator is torch.ops.aten.convolution_backward.default:
        gradient, value, weight = arguments[:3]
        return 0 if _is_pointwise(weight) else max(size_bytes([gradient, value]), size_bytes([weight]))
    return 0


def _convolution(value: Tensor, weight: Tensor) -> int:
    return 0 if _is_pointwise(weight) else size_bytes([value, weight])


def _is_pointwise(weight: Tensor) -> bool:
    return prod(weight.shape[2:]) == 1


def _on_cuda(operator: Any, arguments: Sequence[Any]) -> int:
    return 0


SCRATCH: Mapping[AllocatorName, Scratch] = {"cpu": _on_cpu, "cuda": _on_cuda}
