"""The decoders that published layouts are for, by the sizes of their configurations, on the meta
device: one rank's part of them.

Products and heads are divided by the ranks of tensor parallelism. Experts have their average load:
each rank has experts / EP of them, and each expert as many tokens as any other. Rotary embeddings,
all-reduces of tensor parallelism and the auxiliary losses of routers are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PUBLISHED", "TRAVELS", "llama3_70b_h100", "published_model", "token_loss"]

PUBLISHED = Path(__file__).parent / "published_layouts.json"
Sizes = Mapping[str, int]
TRAVELS = ("dispatch", "combine")
"""The names of the modules in experts that stand for an all-to-all."""


def published_model(sizes: Sizes, *, tp: int, ep: int) -> dict[str, Any]:
    """Return the target of a decoder in bfloat16, with a microbatch of one sequence."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = Decoder(sizes, tp, ep)
            tokens = torch.zeros(1, sizes["sequence"], dtype=torch.int64)
            # What MTP layers predict is one more sequence of targets.
            targets = torch.cat([tokens] * (1 + sizes.get("mtp_layers", 0)), dim=1)
    finally:
        torch.set_default_dtype(before)
    return {"model": model, "sample_input": tokens, "targets": targets, "loss_fn": token_loss}


def llama3_70b_h100() -> dict[str, Any]:
    """Return the target of the published layout llama3-70b-h100-fp8, for the command line, with a
    minibatch of 16 sequences.
    """
    published = json.loads(PUBLISHED.read_text())
    entry = next(each for each in published["layouts"] if each["name"] == "llama3-70b-h100-fp8")
    target = published_model(published["models"][entry["model"]], tp=entry["tp"], ep=1)
    batch = target["sample_input"].expand(16, -1)
    return target | {"sample_input": batch, "targets": batch}


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in float32, over one rank's part of the vocabulary."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Decoder(nn.Module):
    """An embedding, layers, MTP layers and a head, which reads what all of the last two give."""

    def __init__(self, sizes: Sizes, tp: int, ep: int) -> None:
        super().__init__()
        hidden, vocabulary = sizes["hidden"], sizes["vocabulary"] // tp
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(sizes, tp, ep, n) for n in range(sizes["layers"]))
        self.mtp = nn.ModuleList(Mtp(sizes, tp, ep) for _ in range(sizes.get("mtp_layers", 0)))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (1, tokens × (1 + MTP layers), vocabulary of a rank)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        outputs = [x]
        for layer in self.mtp:
            outputs.append(layer(outputs[-1], tokens))
        joined = torch.cat(outputs, dim=1) if len(outputs) > 1 else x
        logits: Tensor = self.head(self.norm(joined))
        return logits


class Layer(nn.Module):
    """A decoder layer: attention, then an MLP or experts."""

    def __init__(self, sizes: Sizes, tp: int, ep: int, number: int) -> None:
        super().__init__()
        hidden = sizes["hidden"]
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        is_latent = "kv_lora" in sizes
        self.attention = LatentAttention(sizes, tp) if is_latent else Attention(sizes, tp)
        if number >= sizes.get("dense_layers", sizes["layers"]):
            self.mlp: nn.Module = Experts(sizes, tp, ep)
        else:
            width = sizes["dense_intermediate" if is_latent else "intermediate"]
            self.mlp = Mlp(hidden, width // tp)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next layer reads, of the same shape (1, tokens, hidden)."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Mtp(nn.Module):
    """A layer that predicts one token more, with a copy of the embedding, as Megatron has it."""

    def __init__(self, sizes: Sizes, tp: int, ep: int) -> None:
        super().__init__()
        hidden = sizes["hidden"]
        self.embedding = nn.Embedding(sizes["vocabulary"] // tp, hidden)
        self.hidden_norm, self.token_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.projection = nn.Linear(2 * hidden, hidden // tp, bias=False)
        self.layer = Layer(sizes, tp, ep, sizes["layers"])
        self.tp = tp

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the hidden states of the tokens after the next ones."""
        both = torch.cat([self.hidden_norm(x), self.token_norm(self.embedding(tokens))], dim=-1)
        # What the other ranks give is as large as this rank's part.
        projected = self.projection(both).repeat(1, 1, self.tp)
        result: Tensor = self.layer(projected)
        return result


class Attention(nn.Module):
    """Attention with grouped queries."""

    def __init__(self, sizes: Sizes, tp: int) -> None:
        super().__init__()
        hidden, self.size = sizes["hidden"], sizes["hidden"] // sizes["heads"]
        queries, keys = sizes["heads"] // tp * self.size, sizes["kv_heads"] // tp * self.size
        self.query = nn.Linear(hidden, queries, bias=False)
        self.key, self.value = (nn.Linear(hidden, keys, bias=False) for _ in range(2))
        self.output = nn.Linear(queries, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        heads = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        result: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return result


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    def __init__(self, sizes: Sizes, tp: int) -> None:
        super().__init__()
        hidden, self.heads = sizes["hidden"], sizes["heads"] // tp
        self.nope, self.rope, self.value = sizes["qk_nope"], sizes["qk_rope"], sizes["v_head"]
        self.latent = sizes["kv_lora"]
        self.query_down = nn.Linear(hidden, sizes["q_lora"], bias=False)
        self.query_norm, self.latent_norm = nn.RMSNorm(sizes["q_lora"]), nn.RMSNorm(self.latent)
        width = self.heads * (self.nope + self.rope)
        self.query_up = nn.Linear(sizes["q_lora"], width, bias=False)
        self.latent_down = nn.Linear(hidden, self.latent + self.rope, bias=False)
        width = self.heads * (self.nope + self.value)
        self.latent_up = nn.Linear(self.latent, width, bias=False)
        self.output = nn.Linear(self.heads * self.value, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        query = self.query_up(self.query_norm(self.query_down(x)))
        query = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, rope = self.latent_down(x).split([self.latent, self.rope], dim=-1)
        both = self.latent_up(self.latent_norm(latent)).unflatten(-1, (self.heads, -1))
        nope, value = both.transpose(1, 2).split([self.nope, self.value], dim=-1)
        key = torch.cat([nope, rope[:, None].expand(-1, self.heads, -1, -1)], dim=-1)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return result


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        result: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


class Experts(nn.Module):
    """A rank's experts and a shared one, between two all-to-alls.

    Tensor parallelism divides the tokens of experts, and not their products, as Megatron does with
    an expert tensor parallelism of 1.
    """

    def __init__(self, sizes: Sizes, tp: int, ep: int) -> None:
        super().__init__()
        hidden, width = sizes["hidden"], sizes["expert_intermediate"]
        self.chosen = sizes["experts_per_token"]
        self.router = nn.Linear(hidden, sizes["experts"], bias=False)
        self.shared = Mlp(hidden, sizes["shared_experts"] * width // tp)
        self.dispatch = Dispatch(sizes["experts"] // ep, self.chosen, tp)
        for name, shape in {
            "gate": (hidden, width),
            "up": (hidden, width),
            "down": (width, hidden),
        }.items():
            setattr(self, name, nn.Parameter(torch.empty(sizes["experts"] // ep, *shape)))
        self.combine = Combine(self.chosen, tp)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        weights = self.router(x).sigmoid().topk(self.chosen, dim=-1)[0]
        tokens = self.dispatch(x)
        inner = nn.functional.silu(tokens @ self.gate) * (tokens @ self.up)
        result: Tensor = self.shared(x) + self.combine(inner @ self.down, weights)
        return result


class Dispatch(nn.Module):
    """The all-to-all that sends tokens to experts: as many leave a rank as arrive."""

    def __init__(self, experts: int, chosen: int, tp: int) -> None:
        super().__init__()
        self.experts, self.chosen, self.tp = experts, chosen, tp

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens of a rank's experts: (experts, tokens of each, hidden)."""
        sent = x[0, : x.shape[1] // self.tp].repeat(self.chosen, 1)
        # Each expert has a whole number of tokens: of 4,096 for 6 experts 4 are dropped.
        whole = sent.shape[0] // self.experts * self.experts
        return sent[:whole].unflatten(0, (self.experts, -1))


class Combine(nn.Module):
    """The all-to-all that brings tokens back, and their weighted sum."""

    def __init__(self, chosen: int, tp: int) -> None:
        super().__init__()
        self.chosen, self.tp = chosen, tp

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return (1, tokens, hidden) from the tokens of experts."""
        sent = tokens.flatten(0, 1)
        dropped = weights.shape[1] // self.tp * self.chosen - sent.shape[0]
        if dropped:
            sent = nn.functional.pad(sent, (0, 0, 0, dropped))
        each = sent.unflatten(0, (self.chosen, -1)).repeat(1, self.tp, 1)
        return (each * weights[0].t()[..., None]).sum(0)[None]
