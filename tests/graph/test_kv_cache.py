"""What attentions add to a KV cache, found in captured models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.graph.kv_cache import kv_token_bytes

Heads = Callable[[Tensor], Tensor]
HEADS, KV_HEADS, WIDTH = 6, 2, 8
OWN = 2 * KV_HEADS * WIDTH * 4  # keys and values in float32
REPEATED = 2 * HEADS * WIDTH * 4


def _expanded(x: Tensor) -> Tensor:
    batch, heads, tokens, width = x.shape
    many = x[:, :, None].expand(batch, heads, HEADS // heads, tokens, width)
    return many.reshape(batch, HEADS, tokens, width)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, key=k, value=v, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, repeat: Heads, attend: Callable[..., Tensor] = _attention) -> None:
        super().__init__()
        self.q = nn.Linear(16, HEADS * WIDTH)
        self.kv = nn.Linear(16, 2 * KV_HEADS * WIDTH)
        self.repeat, self.attend = repeat, attend

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * KV_HEADS, WIDTH)).transpose(1, 2).chunk(2, dim=1)
        return self.attend(q, self.repeat(k), self.repeat(v)).transpose(1, 2).flatten(2)


class Folded(nn.Module):
    """Heads are folded into the batch, so nobody can say which of both a dimension counts."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return attended


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Attention(_expanded), OWN),
        (Attention(lambda x: x.repeat_interleave(HEADS // KV_HEADS, dim=1)), OWN),
        (Attention(lambda x: x, _grouped), OWN),
        # Computed from all heads, they are other keys and values for each of them.
        (Attention(lambda x: _expanded(x) * 2), REPEATED),
        (Attention(_expanded).to(torch.bfloat16), OWN // 2),
        (Folded(), 0),
        (MultiHead(), 2 * 16 * 4),
        (nn.Linear(16, 16), 0),
    ],
)
def test_keys_and_values_are_counted_once_for_each_token(model: nn.Module, expected: int) -> None:
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    call = arguments_of(model, torch.randn(3, 5, 16, dtype=dtype))
    module = capture(model, call).instantiate(call)
    assert sum(kv_token_bytes(module, node) for node in module.graph.nodes) == expected
