"""What CUDA keeps for the backward where the CPU, whose kernels fake tensors run, keeps something else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipecompile.ir.graph import FUSED_ATTENTION, FusedType

__all__ = ["DIFFERENCES", "SavedTensorDifference", "as_on_cuda", "attention_kernel", "differences_table"]

_HALVES = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 8  # attention.cpp, preprocess_mask
aten = torch.ops.aten
_fused: ContextVar[Collection[FusedType]] = ContextVar("_fused", default=FUSED_ATTENTION)


@dataclass(frozen=True)
class SavedTensorDifference:
    """One operation: what is kept on the CPU and on CUDA, where PyTorch says so, and what stands in for it.

    `functions` are replaced by `replacement`, which takes the same arguments and is run on fake tensors only: its
    shapes, types and saved tensors are those of CUDA, its values nothing.
    """

    name: str
    on_cpu: str
    on_cuda: str
    source: str
    functions: tuple[Callable[..., Any], ...]
    replacement: Callable[..., Any]


def _dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> Tensor:
    """Fused on CUDA but in place, and where nothing or all is dropped; torch.dropout says `train`."""
    if inplace or not (training and train) or not 0 < p < 1 or not input.numel():
        return (
            torch.dropout_(input, p, training)
            if inplace
            else torch.dropout(input, p, training and train)
        )
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The operator that CUDA would take, on fakes: its autograd formula saves what it saves there."""
    query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    kernel = attention_kernel(query, key, value, attn_mask, is_causal)
    if kernel == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    mask = None if attn_mask is None else _additive(_autocast(attn_mask), query)
    if kernel == "efficient":
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
        learned = any(tensor.requires_grad for tensor in (query, key, value))
        gradients = learned and torch.is_grad_enabled()
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, gradients, dropout_p, is_causal, scale=scale
        )
    else:
        result = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    output: Tensor = result[0]
    return output


def attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> str:
    """What CUDA runs for `scaled_dot_product_attention`: flash, efficient or math; math for types that are not fused.

    Below compute capability 8.0, where bfloat16 is not fused, there is no flash.
    Where cuDNN's kernel is preferred (9.0, 10.0) it stands for flash: it keeps as much. The rules are those of
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `can_use_flash_attention` and
    `can_use_mem_efficient_attention`.
    """
    if str(query.dtype).removeprefix("torch.") not in _fused.get():
        return "math"
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    if any(
        tensor.dim() != 4 or tensor.stride(-1) != 1 or not tensor.numel()
        for tensor in (query, key, value)
    ):
        return "math"
    causal = not is_causal or query.shape[-2] == key.shape[-2]
    flash = torch.backends.cuda.flash_sdp_enabled() and "bfloat16" in _fused.get()
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
    if (
        flash
        and mask is None
        and query.dtype in _HALVES
        and len(sizes) == 1
        and max(sizes) <= 256
        and causal
    ):
        return "flash"
    alignment = 8 if query.dtype in _HALVES else 4
    heads = {tensor.shape[1] for tensor in (query, key, value)}
    aligned = query.shape[-1] == key.shape[-1] and not any(size % alignment for size in sizes)
    if efficient and aligned and len(heads) == 1:
        return "efficient"
    return "math"


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Heads are padded to a multiple of 8 before and cut after."""
    size = query.shape[-1]
    missing = -size % 8
    padded = [F.pad(tensor, (0, missing)) if missing else tensor for tensor in (query, key, value)]
    scale = size**-0.5 if scale is None else scale
    output: Tensor = aten._scaled_dot_product_flash_attention(
        *padded, dropout_p, is_causal, False, scale=scale
    )[0]
    return output[..., :size] if missing else output


def _autocast(tensor: Tensor) -> Tensor:
    """As `scaled_dot_product_attention` casts its arguments; the operators below it do not."""
    if not torch.is_autocast_enabled("cpu") or tensor.dtype not in (torch.float32, *_HALVES):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """A boolean mask becomes one that is added, of the query's type."""
    return torch.empty_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask


def _aligned(mask: Tensor) -> Tensor:
    """Rows of a mask begin at multiples of 8 elements; one whose rows do not is copied."""
    if mask.stride(-1) == 1 and not any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, _MASK_ALIGNMENT - mask.shape[-1] % _MASK_ALIGNMENT))[
        ..., : mask.shape[-1]
    ]


DIFFERENCES = (
    SavedTensorDifference(
        name="dropout, not in place",
        on_cpu="a mask of the input's type",
        on_cuda="a mask of one byte an element (`native_dropout`)",
        source="aten/src/ATen/native/Dropout.cpp, `dropout`, `is_fused_kernel_acceptable`",
        functions=(F.dropout, torch.dropout),
        replacement=_dropout,
    ),
    SavedTensorDifference(
        name="scaled_dot_product_attention",
        on_cpu="with dropout, a learned mask or heads of several sizes: scores, probabilities and their mask; "
        "else query, key, value, output and a logsumexp a row",
        on_cuda="query, key, value, output, a logsumexp a row and a seed, with dropout too (flash: float16 and "
        "bfloat16 without a mask; efficient: float32 or a mask, logsumexp padded to 32 rows); the scores only where "
        "no fused kernel fits",
        source="aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend`; "
        "attention.cpp, `scaled_dot_product_attention`",
        functions=(F.scaled_dot_product_attention,),
        replacement=_attention,
    ),
)
_REPLACED = {function: row.replacement for row in DIFFERENCES for function in row.functions}


def differences_table() -> str:
    """The differences for people, in Markdown."""
    rows = [(f"`{row.name}`", row.on_cpu, row.on_cuda, row.source) for row in DIFFERENCES]
    head = [("function", "kept on the CPU", "kept on CUDA", "source in PyTorch"), ("---",) * 4]
    return "".join(f"| {' | '.join(row)} |\n" for row in (*head, *rows))


class _Cuda(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            with _inside():
                return func(*args, **(kwargs or {}))
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def _inside() -> Iterator[None]:
    """The replacements for functions that call others below the mode, by their names in torch.nn.functional."""
    with (
        patch.object(F, "dropout", _dropout),
        patch.object(F, "scaled_dot_product_attention", _attention),
    ):
        yield


@contextmanager
def as_on_cuda(fused_attention: Collection[FusedType] = FUSED_ATTENTION) -> Iterator[None]:
    """Fake CPU tensors are differentiated as CUDA's kernels would: never for real ones.

    Attention is fused for these data types only.
    """
    before = _fused.set(fused_attention)
    try:
        with _Cuda():
            yield
    finally:
        _fused.reset(before)
