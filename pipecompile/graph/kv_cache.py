"""What an attention adds to a KV cache for each token: its keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from torch import Tensor, fx, nn
from torch.nn import functional

__all__ = ["kv_token_bytes"]

# Calls whose elements are those of their first argument, perhaps several times.
_REPEATING = {
    *("expand", "expand_as", "repeat", "repeat_interleave", "broadcast_to"),
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "getitem", "__getitem__"),
    *("transpose", "permute", "swapaxes", "movedim", "contiguous", "clone"),
}


def kv_token_bytes(module: nn.Module, node: fx.Node) -> int:
    """Return the bytes of the keys and values that `node`, of a graph of `module`, reads for one
    token of one sample; 0 if it is no attention.

    Known are scaled_dot_product_attention over (batch, heads, tokens, width), and
    nn.MultiheadAttention. Keys and values that grouped queries share are cached once, although the
    attention may read them repeated.
    """
    if node.op == "call_module":
        attention = module.get_submodule(str(node.target))
        if isinstance(attention, nn.MultiheadAttention):
            weight: Tensor = attention.out_proj.weight
            return int(2 * attention.embed_dim * weight.element_size())
    if node.target is functional.scaled_dot_product_attention:
        named = [node.kwargs.get("key"), node.kwargs.get("value")]
        return sum(map(_token_bytes, [*node.args[1:3], *filter(None, named)]))
    return 0


def _token_bytes(source: object) -> int:
    """Return what the keys, or the values, of one token take before they are repeated."""
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() < 4 or not value.numel():
        return 0
    assert isinstance(source, fx.Node)
    # 8 heads that are 2 repeated four times: of 8 · 128 elements a quarter is cached.
    distinct = min((_elements(each) for each in _sources(source)), default=value.numel())
    per_token = value.shape[-3] * value.shape[-1] * value.element_size()
    return int(per_token * Fraction(distinct, value.numel()))


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yield `node` and the nodes before it whose elements it has, the last one first."""
    current: object = node
    while isinstance(current, fx.Node):
        if _elements(current):
            yield current
        name = current.target if isinstance(current.target, str) else current.target.__name__
        if current.op not in ("call_method", "call_function") or name not in _REPEATING:
            return
        current = current.args[0] if current.args else None


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0
