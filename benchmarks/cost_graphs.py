"""The cost graphs that `benchmarks.partition` cuts: synthetic ones of any size, captured models.

Only a capture imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.serialization import encode, read, write

if TYPE_CHECKING:
    from pipecompile.frontend.target import Target

__all__ = ["FAMILIES", "LAYERS", "MODELS", "captured_graph", "deep_graph", "synthetic_graph"]

MODELS = ("sequential", "unet", "gpt2", "bert", "t5", "llama", "resnet50", "gpt2_small")
LAYERS = {"llama": 61, "gpt2": 42}  # nodes of one layer, as captured
OUTSIDE = 60  # nodes before and after the layers
# Delete the cache after a change to the capture or to the costs.
CACHE = Path(__file__).parent / ".cache"
MICROBATCHES = 4


@dataclass(frozen=True)
class Operation:
    """A node of a synthetic graph: the indices of what it reads, and its output's relative size."""

    sources: tuple[int, ...]
    scale: float = 1.0


def synthetic_graph(family: str, nodes: int, seed: int = 0) -> CostGraph:
    """Return a graph of one of `FAMILIES` with about `nodes` nodes.

    The same arguments give the same graph.
    """
    random = Random(f"{family} {nodes} {seed}")
    operations = FAMILIES[family](nodes, random)
    consumers: list[list[str]] = [[] for _ in operations]
    for index, operation in enumerate(operations):
        for source in operation.sources:
            consumers[source].append(f"n{index}")
    sizes = [int(operation.scale * _between(2**16, 2**23, random)) for operation in operations]
    return CostGraph(
        nodes=tuple(_node(f"n{index}", size, random) for index, size in enumerate(sizes)),
        tensors=tuple(
            Tensor(producer=f"n{index}", consumers=tuple(names), bytes=size, gradient_bytes=size)
            for index, (names, size) in enumerate(zip(consumers, sizes, strict=True))
            if names
        ),
    )


def _node(name: str, size: int, random: Random) -> Node:
    """Return a node that saves its output of `size` bytes.

    A third of the nodes have parameters and take about ten times longer, as matrix products do
    beside elementwise operations.
    """
    has_parameters = random.random() < 1 / 3
    forward = (
        _between(300_000, 3_000_000, random)
        if has_parameters
        else _between(10_000, 300_000, random)
    )
    return Node(
        name=name,
        forward_ns=forward,
        backward_ns=int(forward * random.uniform(1.5, 2.3)),
        parameter_bytes=_between(2**14, 2**25, random) if has_parameters else 0,
        saved_bytes=size,
        group=None,
    )


def _between(low: int, high: int, random: Random) -> int:
    # Log-uniform: times and sizes of real models spread over orders of magnitude.
    return int(exp(random.uniform(log(low), log(high))))


def _chain(operations: list[Operation], source: int, length: int, scale: float = 1.0) -> int:
    """Append `length` operations one after another; return the index of the last one."""
    for _ in range(length):
        operations.append(Operation((source,), scale))
        source = len(operations) - 1
    return source


def _join(operations: list[Operation], sources: Sequence[int], scale: float = 1.0) -> int:
    """Append an operation that reads all `sources`; return its index."""
    operations.append(Operation(tuple(sources), scale))
    return len(operations) - 1


def _unet(nodes: int, random: Random) -> list[Operation]:
    """Return a U-Net: each level's output also goes to the level of its size on the way up.

    level 0  o o ──────────────────► o o
    level 1      o o ──────────► o o          half the size
    level 2          o o ──► o o              a quarter
    """
    levels = min(6, nodes // 8)
    length = nodes // (2 * levels + 1)
    operations, skips = [Operation(())], []
    source = 0
    for level in range(levels):
        source = _chain(operations, source, length, 0.5**level)
        skips.append((source, 0.5**level))
    source = _chain(operations, source, length, 0.5**levels)
    for skip, scale in reversed(skips):
        source = _join(operations, (source, skip), scale)
        source = _chain(operations, source, length - 1, scale)
    return operations


def _inception(nodes: int, random: Random) -> list[Operation]:
    """Return modules of three to five branches of one to four operations, then a concatenation."""
    operations, source = [Operation(())], 0
    while len(operations) < nodes:
        lengths = [random.randint(1, 4) for _ in range(random.randint(3, 5))]
        source = _join(operations, [_chain(operations, source, length, 0.5) for length in lengths])
    return operations


def _towers(nodes: int, random: Random) -> list[Operation]:
    """Return two to four chains that meet only at the end."""
    operations, towers = [Operation(())], random.randint(2, 4)
    _join(operations, [_chain(operations, 0, (nodes - 2) // towers) for _ in range(towers)])
    return operations


def _moe(nodes: int, random: Random) -> list[Operation]:
    """Return layers of attention, then a router, eight experts and their sum.

    Both halves of a layer have a residual connection.
    """
    operations, source = [Operation(())], 0
    while len(operations) < nodes:
        source = _join(operations, (source, _chain(operations, source, 4)))
        router = _chain(operations, source, 1, 0.1)
        experts = [
            _chain(operations, _join(operations, (source, router), 0.25), 1, 0.25) for _ in range(8)
        ]
        source = _join(operations, (source, *experts))
    return operations


def _random(nodes: int, random: Random) -> list[Operation]:
    """Return nodes that each read one to three of the twenty before them.

    One node in fifty also reads one from anywhere before it.
    """
    operations = [Operation(())]
    for index in range(1, nodes):
        sources = {random.randrange(max(0, index - 20), index) for _ in range(random.randint(1, 3))}
        if random.random() < 1 / 50:
            sources.add(random.randrange(index))
        operations.append(Operation(tuple(sorted(sources))))
    return operations


FAMILIES: dict[str, Callable[[int, Random], list[Operation]]] = {
    "unet": _unet,
    "inception": _inception,
    "towers": _towers,
    "moe": _moe,
    "random": _random,
}


def captured_graph(name: str) -> CostGraph:
    """Return the cost graph of one of `MODELS`, a factory in examples/models.py."""
    from examples import models

    return _cost_graph_of(getattr(models, name)(), name)


def deep_graph(kind: str, nodes: int) -> CostGraph:
    """Return a `llama` or a `gpt2` with as many layers as give about `nodes` nodes.

    It is captured once and read from a file after that.
    """
    path = CACHE / f"{kind}-{nodes}.json"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        layers = round((nodes - OUTSIDE) / LAYERS[kind])
        write(path, encode(_cost_graph_of(_language_model(kind, layers), kind)))
    return read(path, CostGraph)


def _language_model(kind: str, layers: int) -> tuple[Any, dict[str, Any]]:
    """Return a language model of 128 channels, with its loss inside, and 8 × 32 tokens."""
    import torch

    tokens = torch.zeros(8, 32, dtype=torch.int64)
    model = _llama(layers) if kind == "llama" else _gpt2(layers)
    return model, {"input_ids": tokens, "labels": tokens}


def _llama(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def _gpt2(layers: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=512,
            n_positions=32,
            n_embd=128,
            n_layer=layers,
            n_head=4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _cost_graph_of(example: object, name: str) -> CostGraph:
    """Return the cost graph of one microbatch by the `flops` model."""
    from pipecompile.api.costs import cost_graph
    from pipecompile.api.options import options_for
    from pipecompile.frontend.target import Target
    from pipecompile.frontend.target_capture import capture_target

    target: Target = Target.of(example, name)
    options = options_for(target, k=1, microbatches=MICROBATCHES, costs="flops")
    # The self-check would take a training step of the model, which only costs time here.
    captured = capture_target(target, options, verify=False)
    return cost_graph(target, options.costs, options.microbatches, captured)
