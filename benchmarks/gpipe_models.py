"""What do the models of the GPipe paper (Huang et al., arXiv 1811.06965) take on its devices, and on a recent one?

Transformer-48 and AmoebaNet-D (18, 256) of its table 2, on the meta device: nothing is allocated. The schedule is
GPipe's with recompute, transfers are free. Prints the forward of one microbatch, the step divided by the microbatches
for k = 1, 2, 4, 8, and the speedup over k = 2 beside the paper's
(measured on TPUs, M = 32, transfers included); writes benchmarks/results/gpipe_models.json.
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
from pipecompile.api.capture import Captured, capture_target
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.plan import draft
from pipecompile.api.target import Target
from pipecompile.frontend.signature import arguments_of
from pipecompile.ir.plan import Options, Provenance

RESULT = Path(__file__).parent / "results" / "gpipe_models.json"
DEVICES = ("p100", "tpu-v2", "tpu-v3", "h100")
STAGES = (1, 2, 4, 8)
VOCABULARY, TOKENS = 32_000, 1024


class Layer(nn.Module):
    """One layer of the paper's Transformer, its attention scores in memory as in 2018."""

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


class FusedLayer(Layer):
    """The same with attention in one kernel, which keeps no scores."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed: Tensor = nn.functional.scaled_dot_product_attention(query, key, value)
        return mixed


class Transformer(nn.Module):
    """The paper's Transformer of so many layers, with tied embeddings left out: input and output have their own."""

    def __init__(
        self, layers: int, width: int = 2048, layer: Callable[[int], nn.Module] = Layer
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
class Setting:
    """A model of the paper, its minibatch, and the throughput that the paper gives for each k, over that of k = 2."""

    name: str
    microbatches: int
    paper: dict[int, float]

    def target(self) -> Target:
        with torch.device("meta"):
            if self.name == "transformer_48":
                model: nn.Module = Transformer(48)
                inputs = targets = torch.zeros(32, TOKENS, dtype=torch.long)
                return Target(model, arguments_of(model, inputs), token_loss, targets)
            model, inputs = AmoebaNet(18, 256), torch.zeros(128, 3, 224, 224)
            targets = torch.zeros(128, dtype=torch.long)
            return Target(model, arguments_of(model, inputs), nn.functional.cross_entropy, targets)


# Table 2, M = 32.
SETTINGS = (
    Setting("transformer_48", 32, {2: 1.8 / 1.8, 4: 3.4 / 1.8, 8: 6.3 / 1.8}),
    Setting("amoebanet_d_18_256", 32, {2: 1.21 / 1.21, 4: 1.84 / 1.21, 8: 3.48 / 1.21}),
)


def main() -> None:
    """Prints and writes the table."""
    columns = "  ".join(f"{f'k={k}':>9} {'over k=2':>8} {'paper':>5}" for k in STAGES)
    print(f"{'model':20} {'device':7} {'forward':>9}  {columns}")
    rows = [row for setting in SETTINGS for row in measure(setting)]
    RESULT.write_text(
        json.dumps({"schedule": "gpipe", "recompute": "stage", "rows": rows}, indent=1) + "\n"
    )


def measure(setting: Setting) -> list[dict[str, Any]]:
    """One model on every device; it is captured once."""
    target = setting.target()
    captured = capture_target(target, options(setting, target, 1, DEVICES[0]), verify=False)
    return [priced(setting, target, captured, device) for device in DEVICES]


def options(setting: Setting, target: Target, k: int, device: str) -> Options:
    return options_for(
        target,
        k=k,
        microbatches=setting.microbatches,
        schedule="gpipe",
        recompute="stage",
        costs=f"roofline:{device}",
        objective="max-load",
    )


def priced(setting: Setting, target: Target, captured: Captured, device: str) -> dict[str, Any]:
    """One model on one device, cut for every k."""
    graph = cost_graph(target, f"roofline:{device}", setting.microbatches, captured)
    shapes = [tuple(tensor.shape) for tensor in captured.capture.inputs.flatten(captured.sample)]
    steps: dict[int, int] = {}
    for k in STAGES:
        chosen = options(setting, target, k, device)
        plan = draft(
            graph,
            chosen,
            graph_digest=captured.digest,
            capture=Provenance(verified=False),
            microbatch_shapes=shapes,
        )
        steps[k] = plan.prediction.step_ns // setting.microbatches
    forward = sum(node.forward_ns for node in graph.nodes)
    print(
        f"{setting.name:20} {device:7} {forward / 1e6:7.2f}ms  {cells(steps, setting.paper)}",
        flush=True,
    )
    return {
        "model": setting.name,
        "device": device,
        "microbatches": setting.microbatches,
        "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
        "forward_ns": forward,
        "step_ns_per_microbatch": steps,
    }


def cells(steps: dict[int, int], paper: dict[int, float]) -> str:
    """For each k the step, the speedup over k = 2, and the paper's."""
    return "  ".join(
        f"{steps[k] / 1e6:7.2f}ms {steps[2] / steps[k]:8.2f} {f'{paper[k]:.2f}' if k in paper else '':>5}"
        for k in STAGES
    )


if __name__ == "__main__":
    main()
