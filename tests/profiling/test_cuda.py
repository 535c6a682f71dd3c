"""CUDA's saved tensors on fake tensors: counted by hand, and measured if there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile.cost_models.roofline import Roofline
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.profiling.cuda import DIFFERENCES, as_on_cuda, attention_kernel
from pipecompile.profiling.profile import profile

DOCS = Path(__file__).parents[2] / "docs" / "design" / "cost-models.md"
BATCH, HEADS, TOKENS, SIZE = 2, 4, 40, 16


def saved_by(
    function: Callable[..., Any], *arguments: Tensor
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and types of saved tensors of `function`, without arguments and scalars."""
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(held.append, lambda _: torch.empty(0)):
        function(*arguments)
    aside = {argument.untyped_storage()._cdata for argument in arguments}
    own = {
        v.untyped_storage()._cdata: v
        for v in held
        if v.untyped_storage()._cdata not in aside and v.numel() > 2
    }
    return sorted(((tuple(v.shape), v.dtype) for v in own.values()), key=str)


def heads(
    dtype: torch.dtype, *, count: int = HEADS, size: int = SIZE, device: str = "cpu"
) -> Tensor:
    return torch.empty(BATCH, count, TOKENS, size, dtype=dtype, device=device, requires_grad=True)


@pytest.mark.parametrize(
    "dropout",
    [
        lambda x: F.dropout(x, 0.1),
        lambda x: torch.dropout(x, 0.1, True),
        lambda x: torch.dropout(x, p=0.1, train=True),
        nn.Dropout(0.1),
    ],
    ids=["functional", "torch", "keywords", "module"],
)
def test_a_dropout_keeps_one_byte_an_element(dropout: Callable[[Tensor], Tensor]) -> None:
    with FakeTensorMode():
        value = torch.empty(3, 5, requires_grad=True)
        assert saved_by(dropout, value) == [((3, 5), torch.float32)]
        with as_on_cuda():
            assert saved_by(dropout, value) == [((3, 5), torch.bool)]


@pytest.mark.parametrize(
    "dropout",
    [
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x * 1, 0.1, inplace=True),
        lambda x: F.dropout2d(x[None], 0.1),
        nn.Dropout(0.1).eval(),
    ],
    ids=["none", "evaluation", "in place", "features", "module"],
)
def test_other_dropouts_keep_what_they_keep_on_the_cpu(dropout: Callable[[Tensor], Tensor]) -> None:
    with FakeTensorMode():
        value = torch.empty(3, 5, 7, requires_grad=True)
        on_cpu = saved_by(dropout, value)
        with as_on_cuda():
            assert saved_by(dropout, value) == on_cpu


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_half_precision_attention_is_flash(dropout_p: float) -> None:
    with FakeTensorMode(), as_on_cuda():
        query, key, value = (heads(torch.bfloat16) for _ in range(3))
        saved_tensors = saved_by(
            lambda *a: F.scaled_dot_product_attention(*a, dropout_p=dropout_p), query, key, value
        )
    output = ((BATCH, HEADS, TOKENS, SIZE), torch.bfloat16)
    assert saved_tensors == sorted([output, ((BATCH, HEADS, TOKENS), torch.float32)], key=str)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_single_precision_attention_is_efficient(dropout_p: float) -> None:
    with FakeTensorMode(), as_on_cuda():
        query, key, value = (heads(torch.float32) for _ in range(3))
        saved_tensors = saved_by(
            lambda *a: F.scaled_dot_product_attention(*a, dropout_p=dropout_p), query, key, value
        )
    output = ((BATCH, HEADS, TOKENS, SIZE), torch.float32)
    assert saved_tensors == sorted(
        [output, ((BATCH, HEADS, 64), torch.float32)], key=str
    )  # 40 rows, padded to 64


def test_a_mask_is_kept_as_it_is_added() -> None:
    with FakeTensorMode(), as_on_cuda():
        query, key, value = (heads(torch.bfloat16) for _ in range(3))
        mask = torch.empty(TOKENS, TOKENS, dtype=torch.bool)
        saved_tensors = saved_by(
            lambda *a: F.scaled_dot_product_attention(*a[:3], attn_mask=a[3]),
            query,
            key,
            value,
            mask,
        )
    assert (
        (BATCH, HEADS, TOKENS, TOKENS),
        torch.bfloat16,
    ) in saved_tensors  # a view of TOKENS × TOKENS


@pytest.mark.parametrize(
    ("dtype", "size", "key_heads", "masked", "kernel"),
    [
        (torch.float16, 64, 4, False, "flash"),
        (torch.bfloat16, 100, 4, False, "flash"),
        (torch.bfloat16, 64, 2, False, "flash"),
        (torch.bfloat16, 264, 4, False, "efficient"),
        (torch.bfloat16, 64, 4, True, "efficient"),
        (torch.float32, 64, 4, False, "efficient"),
        (torch.float32, 64, 4, True, "efficient"),
        (torch.float32, 64, 2, False, "math"),
        (torch.float32, 62, 4, False, "math"),
        (torch.float64, 64, 4, False, "math"),
    ],
)
def test_the_kernel_is_the_one_that_cuda_selects(
    dtype: torch.dtype, size: int, key_heads: int, masked: bool, kernel: str
) -> None:
    with FakeTensorMode():
        query, key = heads(dtype, size=size), heads(dtype, size=size, count=key_heads)
        mask = torch.empty(TOKENS, TOKENS, dtype=dtype) if masked else None
        assert attention_kernel(query, key, key, mask, is_causal=False) == kernel


def test_double_precision_is_saved_as_it_is() -> None:
    with FakeTensorMode(), as_on_cuda():
        query, key, value = (heads(torch.float64) for _ in range(3))
        saved_tensors = saved_by(
            lambda *a: F.scaled_dot_product_attention(*a, dropout_p=0.1), query, key, value
        )
    assert {dtype for _, dtype in saved_tensors} == {torch.float64, torch.bool}


def test_a_mask_whose_last_dimension_is_not_dense_is_not_fused() -> None:
    with FakeTensorMode():
        query = heads(torch.float32)
        bias = torch.empty(TOKENS, TOKENS, HEADS).permute(2, 0, 1)[None]
        assert attention_kernel(query, query, query, bias, is_causal=False) == "math"
        bias = bias.contiguous()
        assert attention_kernel(query, query, query, bias, is_causal=False) == "efficient"


@pytest.mark.parametrize("size", [64, 60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_attention_has_the_shapes_that_it_has_anyway(dtype: torch.dtype, size: int) -> None:
    def gradients(query: Tensor) -> list[tuple[Any, ...]]:
        output = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        (gradient,) = torch.autograd.grad(output, query, torch.ones_like(output))
        return [(tuple(value.shape), value.dtype) for value in (output, gradient)]

    with FakeTensorMode():
        query = heads(dtype, size=size)
        with as_on_cuda():
            saved_tensors = gradients(query)
        assert saved_tensors == gradients(query)


def test_attention_is_cast_under_autocast() -> None:
    with FakeTensorMode(), as_on_cuda(), torch.autocast("cpu", dtype=torch.bfloat16):
        query = heads(torch.float32)
        assert F.scaled_dot_product_attention(query, query, query).dtype == torch.bfloat16


def test_the_dropout_inside_multi_head_attention_is_seen() -> None:
    attention = nn.MultiheadAttention(SIZE, 2, dropout=0.1, batch_first=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        value = torch.empty(BATCH, TOKENS, SIZE, requires_grad=True)
        scores = ((BATCH * 2, TOKENS, TOKENS), torch.bool)
        assert scores not in saved_by(lambda v: attention(v, v, v), value)
        with as_on_cuda():
            assert scores in saved_by(lambda v: attention(v, v, v), value)


class Block(nn.Module):
    """Attention and a perceptron with dropout, as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, value: Tensor) -> Tensor:
        query, key, source = (
            self.attention(value).view(*value.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(query, key, source, dropout_p=0.1, is_causal=True)
        value = value + self.dropout(self.projection(mixed.transpose(1, 2).flatten(2)))
        result: Tensor = value + F.dropout(self.down(F.gelu(self.up(value))), 0.1)
        return result


def test_what_a_block_keeps_is_counted_by_hand() -> None:
    width, tokens, batch = HEADS * SIZE, 64, BATCH
    model, sample = Block(width), torch.zeros(batch, tokens, width)
    captured = capture(model, arguments_of(model, sample))
    module = captured.instantiate(arguments_of(model, sample))
    graph = profile(module, [sample], Roofline.of("h100"))
    one = batch * tokens * width * 4  # bytes of a value of the block's width
    by_hand = (
        one  # the input, kept by the first Linear
        + 3 * one  # query, key, value
        + one  # the output of the attention, which the projection keeps too
        + batch * HEADS * tokens * 4  # its logsumexp
        + 16  # its seed and offset
        + one // 4  # the mask of the first dropout
        + one  # what the perceptron reads
        + 4 * one  # what GELU reads
        + 4 * one  # what the second Linear of it reads
        + one // 4  # the mask of the second dropout
    )
    assert sum(node.saved_bytes for node in graph.nodes) == by_hand


def saved_bytes(device: str, dtype: torch.dtype, name: str) -> int:
    """What a node of the block keeps that no node before it keeps, at 64 tokens."""
    model, sample = Block(HEADS * SIZE).to(dtype), torch.zeros(BATCH, 64, HEADS * SIZE, dtype=dtype)
    module = capture(model, arguments_of(model, sample)).instantiate(arguments_of(model, sample))
    graph = profile(module, [sample], Roofline.of(device))
    (node,) = (node for node in graph.nodes if name in node.operator)
    return node.saved_bytes


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("device", "dtype", "fused"),
    [
        ("h100", torch.bfloat16, True),
        ("h100", torch.float32, True),
        ("p100", torch.bfloat16, False),
        ("p100", torch.float32, True),
        ("v100", torch.float16, True),
        ("tpu-v2", torch.float32, False),
    ],
)
def test_scores_are_kept_where_attention_is_not_fused(
    device: str, dtype: torch.dtype, fused: bool
) -> None:
    one, scores = BATCH * HEADS * 64 * SIZE, BATCH * HEADS * 64 * 64
    saved_by = saved_bytes(device, dtype, "scaled_dot_product_attention")
    if fused:
        # Query, key, value, output, a logsumexp a row, a seed and an offset; flash has one more.
        flash = dtype == torch.bfloat16
        assert saved_by == 4 * one * dtype.itemsize + BATCH * HEADS * 64 * 4 + 16 + 8 * flash
    else:
        # Float32: query, key, value, the probabilities, what dropout leaves, and its mask in bytes.
        assert saved_by == (3 * one + 2 * scores) * 4 + scores


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="compares with what kernels of a GPU keep; there is none"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_a_gpu_keeps_the_same(dtype: torch.dtype, dropout_p: float) -> None:
    def block(query: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            query, query, query, dropout_p=dropout_p, is_causal=True
        )
        return F.dropout(mixed, 0.1)

    def sizes(device: str) -> int:
        saved_tensors = saved_by(block, heads(dtype, device=device))
        return sum(torch.Size(shape).numel() * kind.itemsize for shape, kind in saved_tensors)

    on_gpu = sizes("cuda")
    with FakeTensorMode(), as_on_cuda():
        assert sizes("cpu") == on_gpu


def differences_table() -> str:
    """The differences as a Markdown table."""
    rows = [(f"`{row.name}`", row.on_cpu, row.on_cuda, row.source) for row in DIFFERENCES]
    head = [("function", "kept on the CPU", "kept on CUDA", "source in PyTorch"), ("---",) * 4]
    return "".join(f"| {' | '.join(row)} |\n" for row in (*head, *rows))


def test_the_page_shows_the_table() -> None:
    assert differences_table() in DOCS.read_text()
