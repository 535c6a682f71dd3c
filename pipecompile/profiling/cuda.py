"""The tensors that CUDA saves for a backward, where the CPU saves other ones.

Fake tensors run the CPU's operators. Inside `as_on_cuda` the functions in `DIFFERENCES` are
replaced by those that CUDA would run, so that a profile counts what a GPU keeps for the backward. A
mode of `__torch_function__` replaces them before autograd sees them:

    F.dropout(x) ── mode ──▶ torch.native_dropout(x)    saves a mask of one byte an element
"""

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

__all__ = [
    "DIFFERENCES",
    "SavedTensorDifference",
    "as_on_cuda",
    "attention_kernel",
]

# The types of flash attention.
_HALVES = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 8  # attention.cpp, preprocess_mask
aten = torch.ops.aten
_fused: ContextVar[Collection[FusedType]] = ContextVar("_fused", default=FUSED_ATTENTION)


@dataclass(frozen=True)
class SavedTensorDifference:
    """One operation of which the CPU and CUDA save different tensors, and the file that says so.

    `functions` are replaced by `replacement`, which takes the same arguments. It runs on fake
    tensors only: its shapes, types and saved tensors are those of CUDA, and it has no values.
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
    """Return what CUDA's dropout returns.

    It is fused, unless it works in place or drops nothing or everything.
    F.dropout calls its argument `training`, and torch.dropout calls it `train`.
    """
    if inplace:
        return torch.dropout_(input, p, training)
    if not (training and train) or not 0 < p < 1 or not input.numel():
        return torch.dropout(input, p, training and train)
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
    """Return attention by the operator that CUDA would run, so that it saves the same tensors."""
    query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    kernel = attention_kernel(query, key, value, attn_mask, is_causal)
    if kernel == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    # The other kernels add the mask to the scores.
    mask = None if attn_mask is None else _additive(_autocast(attn_mask), query)
    if kernel == "efficient":
        return _efficient(query, key, value, mask, dropout_p, is_causal, scale)
    return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> str:
    """Return what CUDA runs for `scaled_dot_product_attention`: "flash", "efficient" or "math".

    "math" computes the scores, and is the answer for types that are not fused. Below compute
    capability 8.0, where bfloat16 is not fused, there is no flash. "flash" stands for cuDNN's
    kernel too, which is preferred on 9.0 and 10.0 and saves as much. The rules are those of
    `can_use_flash_attention` and `can_use_mem_efficient_attention` in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if str(query.dtype).removeprefix("torch.") not in _fused.get():
        return "math"
    for tensor in (query, key, value):
        if tensor.dim() != 4 or tensor.stride(-1) != 1 or not tensor.numel():
            return "math"
    if mask is None and _can_use_flash(query, key, value, is_causal):
        return "flash"
    # A bias such as T5's, whose heads come last in memory, is added by "math" only.
    is_in_order = mask is None or mask.stride(-1) == 1
    return "efficient" if is_in_order and _can_use_efficient(query, key, value) else "math"


def _can_use_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    head_sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    fits_causal = not is_causal or query.shape[-2] == key.shape[-2]
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and "bfloat16" in _fused.get()
        and query.dtype in _HALVES
        and len(head_sizes) == 1
        and max(head_sizes) <= 256
        and fits_causal
    )


def _can_use_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    alignment = 8 if query.dtype in _HALVES else 4  # elements in 16 bytes
    head_sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    head_counts = {tensor.shape[1] for tensor in (query, key, value)}
    is_aligned = not any(size % alignment for size in head_sizes)
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and is_aligned
        and query.shape[-1] == key.shape[-1]
        and len(head_counts) == 1
    )


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Return the result of the flash kernel; heads are padded to a multiple of 8, then cut."""
    size = query.shape[-1]
    missing = -size % 8  # 60 → 4, so that heads of 64 are computed
    padded = [F.pad(tensor, (0, missing)) if missing else tensor for tensor in (query, key, value)]
    scale = size**-0.5 if scale is None else scale
    output: Tensor = aten._scaled_dot_product_flash_attention(
        *padded, dropout_p, is_causal, False, scale=scale
    )[0]
    return output[..., :size] if missing else output


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Return the result of the memory-efficient kernel."""
    bias = None if mask is None else _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
    # Only if a backward will follow does it return the logsumexp that this needs.
    wants_gradients = any(tensor.requires_grad for tensor in (query, key, value))
    returns_logsumexp = wants_gradients and torch.is_grad_enabled()
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, returns_logsumexp, dropout_p, is_causal, scale=scale
    )[0]
    return output


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return the result of the kernels that compute all scores, whose dropout is fused too."""
    if not 0 < dropout_p < 1:
        output: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return output
    if enable_gqa:
        repeats = query.shape[-3] // value.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    dtype = value.dtype
    if dtype in _HALVES:  # computed in float32
        query, key, value = (tensor.float() for tensor in (query, key, value))
    # A causal mask changes nothing that is saved.
    factor = (query.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    scores = (query * factor) @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        scores += mask
    weights = aten._safe_softmax(scores, -1)
    kept = torch.native_dropout(weights, dropout_p, True)[0]
    return (kept @ value).to(dtype)


def _autocast(tensor: Tensor) -> Tensor:
    """Return `tensor` in the type of autocast.

    `scaled_dot_product_attention` casts its arguments, but the operators that it calls do not.
    """
    if not torch.is_autocast_enabled("cpu") or tensor.dtype not in (torch.float32, *_HALVES):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask that is added to the scores; one made from booleans has the query's type."""
    return torch.empty_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask


def _aligned(mask: Tensor) -> Tensor:
    """Return the mask, copied if its rows do not begin at multiples of 8 elements."""
    if mask.stride(-1) == 1 and not any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        return mask
    # Rows of 13 become rows of 16 that are cut again: what is saved are the 16.
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
        on_cpu="with dropout, a learned mask or heads of several sizes: scores, probabilities and "
        "their mask; else query, key, value, output and a logsumexp a row",
        on_cuda="query, key, value, output, a logsumexp a row and a seed, with dropout too (flash: "
        "float16 and bfloat16 without a mask; efficient: float32 or a mask, logsumexp padded to 32 "
        "rows); the probabilities and their mask only where no fused kernel fits",
        source="aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend`; "
        "attention.cpp, `scaled_dot_product_attention`",
        functions=(F.scaled_dot_product_attention,),
        replacement=_attention,
    ),
)
_REPLACED = {function: row.replacement for row in DIFFERENCES for function in row.functions}


class _ReplacementMode(TorchFunctionMode):
    """Calls the replacements in the place of the functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What this function calls runs below the mode, which does not see it.
        if func is F.multi_head_attention_forward:
            with _patched_functional():
                return func(*args, **(kwargs or {}))
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def _patched_functional() -> Iterator[None]:
    """Patch torch.nn.functional with the replacements during the block.

    `multi_head_attention_forward` calls its functions where the mode does not see them.
    """
    with (
        patch.object(F, "dropout", _dropout),
        patch.object(F, "scaled_dot_product_attention", _attention),
    ):
        yield


@contextmanager
def as_on_cuda(fused_attention: Collection[FusedType] = FUSED_ATTENTION) -> Iterator[None]:
    """During the block, save what CUDA's kernels would save. For fake CPU tensors only.

    `fused_attention` are the data types for which attention is fused.
    """
    # A context variable, since the replacements have the signatures
    # of PyTorch's functions, which leave no place for it.
    before = _fused.set(fused_attention)
    try:
        with _ReplacementMode():
            yield
    finally:
        _fused.reset(before)
