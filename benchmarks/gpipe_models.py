"""How fast are the models of the GPipe paper (Huang et al., arXiv 1811.06965), simulated?

    python -m benchmarks.gpipe_models

Transformer-48 and AmoebaNet-D (18, 256) of its table 2, on the paper's devices and on a recent one.
The models are on the meta device, so nothing is allocated. The schedule is GPipe's with recompute,
and transfers are free.

Prints the forward of one microbatch, the step divided by the microbatches for k = 1, 2, 4, 8, and
the speedup over k = 2 beside the paper's (measured on TPUs, M = 32, transfers included); writes
results/gpipe_models.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.amoebanet import AmoebaNet
from benchmarks.command_line import no_arguments
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.ir.plan import Options, Provenance
from pipecompile.planner.draft import draft

RESULT = Path(__file__).parent / "results" / "gpipe_models.json"
DEVICES = ("p100", "tpu-v2", "tpu-v3", "h100")
STAGES = (1, 2, 4, 8)
VOCABULARY, TOKENS = 32_000, 1024


class TransformerLayer(nn.Module):
    """A layer of the paper's Transformer, which keeps its attention scores in memory."""

    def __init__(self, width: int = 2048, hidden: int = 8192, heads: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, state: Tensor) -> Tensor:
        state = state + self.attend(self.norm_attention(state))
        return state + self.contract(torch.relu(self.expand(self.norm_feed(state))))

    def attend(self, state: Tensor) -> Tensor:
        batch, tokens, width = state.shape
        split = self.query_key_value(state).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed: Tensor = self.project(
            self.mix(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        )
        return mixed

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, -1)
        return weights @ value


class FusedLayer(TransformerLayer):
    """The same layer with attention in one kernel, which keeps no scores."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed: Tensor = nn.functional.scaled_dot_product_attention(query, key, value)
        return mixed


class Transformer(nn.Module):
    """The paper's Transformer, except that its embedding and its head are not tied."""

    def __init__(
        self, layers: int, width: int = 2048, layer: Callable[[int], nn.Module] = TransformerLayer
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embedding(tokens)
        for layer in self.layers:
            state = layer(state)
        logits: Tensor = self.head(self.norm(state))
        return logits


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class PaperModel:
    """A model of table 2, its microbatches, and the paper's speedups over k = 2 for each k."""

    name: str
    microbatches: int
    speedups: dict[int, float]

    def target(self) -> Target:
        with torch.device("meta"):
            if self.name == "transformer_48":
                model: nn.Module = Transformer(48)
                inputs = targets = torch.zeros(32, TOKENS, dtype=torch.long)
                return Target(model, arguments_of(model, inputs), token_loss, targets)
            model, inputs = AmoebaNet(18, 256), torch.zeros(128, 3, 224, 224)
            targets = torch.zeros(128, dtype=torch.long)
            return Target(model, arguments_of(model, inputs), nn.functional.cross_entropy, targets)


# Throughput in table 2 for M = 32, divided by that of k = 2.
PAPER_MODELS = (
    PaperModel("transformer_48", 32, {2: 1.8 / 1.8, 4: 3.4 / 1.8, 8: 6.3 / 1.8}),
    PaperModel("amoebanet_d_18_256", 32, {2: 1.21 / 1.21, 4: 1.84 / 1.21, 8: 3.48 / 1.21}),
)


def main() -> None:
    """Print and write the table."""
    columns = "  ".join(f"{f'k={k}':>9} {'over k=2':>8} {'paper':>5}" for k in STAGES)
    print(f"{'model':20} {'device':7} {'forward':>9}  {columns}")
    rows = [row for model in PAPER_MODELS for row in measure(model)]
    RESULT.write_text(
        json.dumps({"schedule": "gpipe", "recompute": "stage", "rows": rows}, indent=1) + "\n"
    )


def measure(paper_model: PaperModel) -> list[dict[str, Any]]:
    """Return a row for each device; the model is captured once."""
    target = paper_model.target()
    first = options(paper_model, target, 1, DEVICES[0])
    captured = capture_target(target, first, verify=False)
    return [measure_on(device, paper_model, target, captured) for device in DEVICES]


def options(paper_model: PaperModel, target: Target, k: int, device: str) -> Options:
    return options_for(
        target,
        k=k,
        microbatches=paper_model.microbatches,
        schedule="gpipe",
        recompute="stage",
        costs=f"roofline:{device}",
        objective="max-load",
    )


def measure_on(
    device: str, paper_model: PaperModel, target: Target, captured: Captured
) -> dict[str, Any]:
    """Print and return the figures of one model on one device, planned for each k."""
    graph = cost_graph(target, f"roofline:{device}", paper_model.microbatches, captured)
    shapes = [tuple(tensor.shape) for tensor in captured.capture.inputs.flatten(captured.sample)]
    steps: dict[int, int] = {}
    for k in STAGES:
        chosen = options(paper_model, target, k, device)
        plan = draft(
            graph,
            chosen,
            graph_digest=captured.digest,
            capture=Provenance(verified=False),
            microbatch_shapes=shapes,
        )
        steps[k] = plan.prediction.step_ns // paper_model.microbatches
    forward = sum(node.forward_ns for node in graph.nodes)
    print(f"{paper_model.name:20} {device:7} {forward / 1e6:7.2f}ms", end="  ")
    print(cells(steps, paper_model.speedups), flush=True)
    return {
        "model": paper_model.name,
        "device": device,
        "microbatches": paper_model.microbatches,
        "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
        "forward_ns": forward,
        "step_ns_per_microbatch": steps,
    }


def cells(steps: dict[int, int], published: dict[int, float]) -> str:
    """Return for each k the step in ms, the speedup over k = 2, and the published one."""
    parts = []
    for k in STAGES:
        speedup = f"{published[k]:.2f}" if k in published else ""
        parts.append(f"{steps[k] / 1e6:7.2f}ms {steps[2] / steps[k]:8.2f} {speedup:>5}")
    return "  ".join(parts)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
