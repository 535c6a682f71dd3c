"""How large a model fits? Table 1 of the GPipe paper (Huang et al., arXiv 1811.06965) by our memory model.

Transformer-L on K accelerators of 16 GiB: batch 32, sequences of 1024 tokens, d 2048, feed-forward 8192, 32 heads,
32,000 words, RMSProp; in float32 with attention scores in memory, as in the paper, and in bfloat16 with fused
attention. A parameter takes 12 bytes in both: weight, gradient and RMSProp's mean of squares of 4 bytes each, or
weight and gradient of 2, float32 copy and mean of 4. (While it steps, `torch.optim` needs 4 and 8 more on a GPU.)

Three layers are captured on the meta device and tiled to any depth (tiling.py). For each stage the most layers are
found that fit by what the partitioner asks, the bound of the memory model, which counts the allocator and NCCL too.
Stages differ only in being first or last and in how many microbatches they have in flight, so no cut between layers
holds more. All of them together are then planned as any model is, but for the cut: stages, order, what ranks hold. On
up to 8 accelerators the partitioner has to find a cut of as many layers itself.

AmoebaNet-D on one accelerator of 8 GiB, as in the table: (18, 208) without recompute, 16 images at once (32 would be
too many), beside (18, 416), which does not fit like that: with recompute, and in smaller microbatches.

Prints the tables, writes benchmarks/results/gpipe_memory.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from benchmarks.amoebanet import AmoebaNet
from benchmarks.fitting import Fitting, composed, planned
from benchmarks.gpipe_models import TOKENS, FusedLayer, Layer, Transformer, token_loss
from benchmarks.tiling import LEAST, tiled
from pipecompile.api.capture import capture_target
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.partition_problem import problem_of
from pipecompile.api.target import Target
from pipecompile.errors import InfeasibleError
from pipecompile.frontend.signature import arguments_of
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE
from pipecompile.ir.plan import Options
from pipecompile.partition.solver import solve

RESULT = Path(__file__).parent / "results" / "gpipe_memory.json"
COSTS = "roofline:h100"  # times only weigh what is computed again; bytes are those of PyTorch on any GPU
GIB = 1 << 30
SMALL = 8 * GIB
BATCH, IMAGES = 32, 128
SETTINGS = (
    ("1f1b", 32),
    ("1f1b", 16),
    ("1f1b", 8),
    ("gpipe", 32),
)  # schedule and microbatches, to choose among
MOST_TO_CUT = 8  # stages for which the partitioner is asked too


class Published(NamedTuple):
    """A row of table 1: the layers that fit, GB of parameters and of activations on all accelerators."""

    layers: int
    parameters: float
    activations: float


PAPER = {
    1: Published(13, 8.8, 6.4),
    8: Published(103, 59.5, 50.9),
    32: Published(415, 235.1, 199.9),
    128: Published(1663, 937.9, 796.1),
}


@dataclass(frozen=True)
class Format:
    """Numbers and attention of the Transformer."""

    name: str
    dtype: torch.dtype
    layer: type[Layer]
    master_weights: bool
    graphs: dict[int, CostGraph] = field(default_factory=dict)

    @cached_property
    def target(self) -> Target:
        """The model of a few layers with its minibatch."""
        with torch.device("meta"):
            model = Transformer(LEAST, layer=self.layer).to(self.dtype)
            tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        return Target(model, arguments_of(model, tokens), token_loss, tokens)

    def options(self, k: int, microbatches: int, schedule: str, recompute: str) -> Options:
        """Those of a plan."""
        return options_for(
            self.target,
            k=k,
            microbatches=microbatches,
            schedule=schedule,
            objective="max-load",
            memory="16GiB",
            optimizer="rmsprop",
            master_weights=self.master_weights,
            costs=COSTS,
            recompute=recompute,
            granularity="blocks",
        )

    def graph(self, microbatches: int) -> CostGraph:
        """What one of so many microbatches costs."""
        if microbatches not in self.graphs:
            self.graphs[microbatches] = costs_of(
                self.target, self.options(1, microbatches, "1f1b", "none")
            )
        return self.graphs[microbatches]


FORMATS = (
    Format("float32, attention scores in memory", torch.float32, Layer, master_weights=False),
    Format("bfloat16, fused attention", torch.bfloat16, FusedLayer, master_weights=True),
)


def costs_of(target: Target, options: Options) -> CostGraph:
    """The costs of a microbatch; the self-check would allocate the model."""
    return cost_graph(
        target, COSTS, options.microbatches, capture_target(target, options, verify=False)
    )


def main() -> None:
    """Prints and writes the tables."""
    began = time.perf_counter()
    rows = [row for format in FORMATS for row in transformers(format)]
    images = amoebanets()
    seconds = round(time.perf_counter() - began)
    print(f"\n{seconds} s in all")
    result = {"costs": COSTS, "seconds": seconds, "transformer": rows, "amoebanet": images}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def transformers(format: Format) -> list[dict[str, Any]]:
    """The largest Transformers in this format, and those of the paper."""
    for _, microbatches in SETTINGS:
        format.graph(microbatches)  # which may print notes
    print(f"\nTransformer-L, {format.name}: the largest L on K accelerators of 16 GiB")
    print(f"{'':5}{'paper':>5}  {'whole stages again':^44}  {'regions by cost (auto)':^32}")
    print(f"{'K':>4} {'L':>5}  {'L':>5} {'parameters':>10} {'fullest':>9}  {'order':17}  ", end="")
    print(f"{'L':>5} {'parameters':>10} {'fullest':>9} {'again':>5}")
    rows = [{"format": format.name, "k": k, **largest(format, k)} for k in PAPER]
    print(
        "The paper's L: memory on all accelerators beside the paper's, and the step of 32 sequences"
    )
    print(f"{'K':>4} {'L':>5}  {'parameters':>19} {'all else':>20}  {'step':>8}", end="")
    print(f" {'again':>5}  {'auto':>8} {'again':>5}")
    return [row | {"paper": compared(format, k)} for row, k in zip(rows, PAPER, strict=True)]


def largest(format: Format, k: int) -> dict[str, Any]:
    """The largest L with whole stages computed again, under the order that allows most, and with regions by cost."""
    print(f"{k:4} {PAPER[k].layers:5}  ", end="", flush=True)
    fitting = {
        (order, m): Fitting(format.graph(m), format.options(k, m, order, "stage"))
        for order, m in SETTINGS
    }
    order, m = max(SETTINGS, key=lambda setting: sum(fitting[setting].most))
    best = fitting[order, m]
    stages = described(best, f"{order}, m = {m:2}")
    auto = described(Fitting(format.graph(m), format.options(k, m, order, "auto")))
    print()
    return {
        "schedule": order,
        "microbatches": m,
        "stage": stages,
        "auto": auto,
        "stage_by_setting": [
            {"schedule": order, "microbatches": m, "layers": found if found >= LEAST else None}
            for (order, m), fit in fitting.items()
            for found in [sum(fit.most)]
        ],
        "cut_by_partitioner": is_cut(best) if k <= MOST_TO_CUT else None,
    }


def described(fitting: Fitting, order: str | None = None) -> dict[str, Any]:
    """The deepest model planned as a whole; prints it."""
    whole = planned(fitting.shallow, fitting.options, fitting.most)
    parameters = parameters_of(fitting.shallow, sum(fitting.most))
    print(f"{sum(fitting.most):5} {parameters / 1e9:9.2f}B {whole.fullest / GIB:5.1f} GiB ", end="")
    print(f" {order:17}  " if order else f"{whole.again:6.0%}", end="", flush=True)
    return {
        "layers": sum(fitting.most),
        "layers_of_stages": fitting.most,
        "parameters": parameters,
        "fullest_bound_bytes": whole.fullest,
        "again": round(whole.again, 4),
    }


def parameters_of(shallow: CostGraph, layers: int) -> int:
    """How many numbers the parameters of the deep model are."""
    return sum(prod(each.shape or ()) for each in tiled(shallow, layers).parameters)


def is_cut(fitting: Fitting) -> bool:
    """Whether the partitioner finds a cut of as many layers."""
    try:
        solve(problem_of(tiled(fitting.shallow, sum(fitting.most)), fitting.options, FREE))
    except InfeasibleError:
        return False
    return True


def compared(format: Format, k: int) -> dict[str, Any]:
    """The paper's model in even stages: what it holds beside the paper's figures, and both steps."""
    graph, paper = format.graph(BATCH), PAPER[k]
    stage, auto = (
        planned(graph, format.options(k, BATCH, "1f1b", recompute), evenly(paper.layers, k))
        for recompute in ("stage", "auto")
    )
    print(
        f"{k:4} {paper.layers:5}  {stage.parameters / GIB:6.1f} GiB ({paper.parameters:5}G) ",
        end="",
    )
    print(f"{stage.others / GIB:7.1f} GiB ({paper.activations:5}G)  ", end="")
    print(
        " ".join(f"{w.prediction.step_ns / 1e9:6.2f} s {w.again:5.0%} " for w in (stage, auto)),
        flush=True,
    )
    return {
        "layers": paper.layers,
        "parameter_bytes": stage.parameters,
        "published_parameter_gb": paper.parameters,
        "other_bytes": stage.others,
        "published_activation_gb": paper.activations,
        **{
            f"{name}_{key}": value
            for name, whole in (("stage", stage), ("auto", auto))
            for key, value in (
                ("step_ns", whole.prediction.step_ns),
                ("again", round(whole.again, 4)),
                ("fullest_bound_bytes", whole.fullest),
            )
        },
    }


def evenly(layers: int, k: int) -> list[int]:
    """Layers of stages; the last and the first have most besides, so fewer layers where it does not come out even."""
    few, more = divmod(layers, k)
    order = sorted(range(k), key=lambda stage: (stage == k - 1, stage == 0, stage))
    return [few + (stage in order[:more]) for stage in range(k)]


def amoebanets() -> list[dict[str, Any]]:
    """AmoebaNet-D on one accelerator, as the table compares it."""
    print(
        "\nAmoebaNet-D (18, D), float32, on one accelerator of 8 GiB, so many of 128 images at once"
    )
    print(
        f"{'D':>4} {'images':>6} {'recompute':9} {'parameters':>10} {'their memory':>12} {'activations':>11}",
        end="",
    )
    print(f" {'paper':>7} {'bound':>10} {'again':>5}")
    wanted: tuple[tuple[int, int, tuple[StageRecompute, ...]], ...] = (
        (208, 16, (StageRecompute(None, 6.26),)),
        (416, 16, (StageRecompute(None), StageRecompute(8), StageRecompute(7, 3.46))),
        (416, 4, (StageRecompute(None),)),
    )
    return [
        row for filters, images, policies in wanted for row in convnet(filters, images, policies)
    ]


class StageRecompute(NamedTuple):
    """Recompute to fit so many GiB, None for no recompute; and the paper's GB of activations."""

    memory_gib: int | None
    published: float | None = None


def convnet(
    filters: int, images: int, policies: Iterable[StageRecompute]
) -> Iterator[dict[str, Any]]:
    """AmoebaNet-D (18, `filters`) with so many `images` a microbatch."""
    with torch.device("meta"):
        model, inputs = AmoebaNet(18, filters), torch.zeros(IMAGES, 3, 224, 224)
        targets = torch.zeros(IMAGES, dtype=torch.long)
    target = Target(model, arguments_of(model, inputs), nn.functional.cross_entropy, targets)
    plain = options_for(
        target, k=1, microbatches=IMAGES // images, optimizer="rmsprop", costs=COSTS
    )
    graph = costs_of(target, plain)
    everywhere = {node.name: 0 for node in graph.nodes}
    for memory_gib, published in policies:
        recompute = "none" if memory_gib is None else "auto"
        memory = None if memory_gib is None else memory_gib * GIB
        whole = composed(
            graph, replace(plain, recompute=recompute, memory_bytes=memory), everywhere
        )
        parameters, held = (
            sum(each.numel() for each in model.parameters()),
            activations_of(whole.stages[0].footprint),
        )
        label = "none" if memory_gib is None else f"to {memory_gib} GiB"
        print(
            f"{filters:4} {images:6} {label:9} {parameters / 1e6:9.1f}M {whole.parameters / 1e9:9.2f} GB",
            end="",
        )
        print(f" {held / 1e9:8.2f} GB {published or '':>7} {whole.fullest / GIB:6.2f} GiB", end="")
        print(f" {whole.again:5.0%}" + " (does not fit)" * (whole.fullest > SMALL), flush=True)
        yield {
            "cells": 18,
            "filters": filters,
            "images_at_once": images,
            "recompute": recompute,
            "memory_bytes": memory,
            "parameters": parameters,
            "parameter_bytes": whole.parameters,
            "activation_bytes": held,
            "published_activation_gb": published,
            "bound_bytes": whole.fullest,
            "again": round(whole.again, 4),
        }


def activations_of(stage: Footprint) -> int:
    """The most that one microbatch takes besides parameters, in bytes."""
    return max(stage.forward_peak.expected, (stage.activations + stage.backward_peak).expected)


if __name__ == "__main__":
    main()
