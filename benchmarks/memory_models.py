"""The GPT blocks of the recompute benchmarks and tests.

They are on the meta device, so they take no memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph

__all__ = ["Block", "gpt_blocks"]

WIDTH, HEADS, TOKENS = 2048, 16, 2048


class Block(nn.Module):
    """A block of a GPT: causal attention in one kernel, then a feed-forward four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.activation, self.contract = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, state: Tensor) -> Tensor:
        state = state + self.attend(self.norm_attention(state))
        fed: Tensor = self.contract(self.activation(self.expand(self.norm_feed(state))))
        return state + fed

    def attend(self, state: Tensor) -> Tensor:
        parts = (
            part.unflatten(-1, (self.heads, -1))
            for part in self.query_key_value(state).chunk(3, -1)
        )
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return projected


def gpt_blocks(
    count: int = 4,
    *,
    width: int = WIDTH,
    heads: int = HEADS,
    tokens: int = TOKENS,
    costs: str = "roofline:h100",
) -> CostGraph:
    """Return the costs of `count` blocks in bfloat16 for one sequence; module i is block i."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width, heads) for _ in range(count))).to(torch.bfloat16)
        inputs = torch.zeros(1, tokens, width, dtype=torch.bfloat16)
    target = Target(model, arguments_of(model, inputs))
    options = options_for(target, k=1, microbatches=1, schedule="gpipe", costs=costs)
    return cost_graph(target, costs, 1, capture_target(target, options, verify=False))
