"""How large a model fits? Table 1 of the GPipe paper (Huang et al., arXiv 1811.06965), predicted.

    python -m benchmarks.gpipe_memory

Transformer-L on K accelerators of 16 GiB: batch 32, sequences of 1024 tokens, d 2048, feed-forward
8192, 32 heads, 32,000 words, RMSProp. It is planned in float32 with attention scores in memory, as
in the paper, and in bfloat16 with fused attention. A parameter takes 12 bytes in both: in float32
4 each for weight, gradient and RMSProp's mean of squares; in bfloat16 2 each for weight and
gradient, 4 each for the float32 copy and the mean. (While it steps, `torch.optim` needs 4 and 8
more on a GPU.)

Three layers are captured on the meta device and tiled to any depth (tiled_graphs.py). For each
stage the most layers are found whose bound fits, by the memory model that the partitioner asks; it
counts the allocator and NCCL too. Stages differ only in being first or last and in how many
microbatches they have in flight, so no cut between layers holds more. The whole model with these
stages is then planned. For up to 8 accelerators the partitioner also has to find a cut of as many
layers itself.

AmoebaNet-D on one accelerator of 8 GiB, as in the table: (18, 208) without recompute and with 16
images at once (32 would be too many), and (18, 416), which does not fit in that way: with
recompute, and in smaller microbatches.

Prints the tables; writes results/gpipe_memory.json. It takes about half an hour.
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
from benchmarks.command_line import no_arguments
from benchmarks.deep_plans import DeepPlan, LayerCapacity, plan_assignment, plan_layers
from benchmarks.gpipe_models import TOKENS, FusedLayer, Transformer, TransformerLayer, token_loss
from benchmarks.tiled_graphs import LEAST_LAYERS, tile
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.errors import InfeasibleError
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE
from pipecompile.ir.plan import Options
from pipecompile.partition.solver import solve
from pipecompile.planner.partition_problem import problem_of

RESULT = Path(__file__).parent / "results" / "gpipe_memory.json"
# Times only weigh what is recomputed; bytes are those of PyTorch on any GPU.
COSTS = "roofline:h100"
GIB = 1 << 30
SMALL_MEMORY = 8 * GIB
BATCH, IMAGES = 32, 128
# Schedules and numbers of microbatches, of which the one with the deepest model is reported.
SETTINGS = (("1f1b", 32), ("1f1b", 16), ("1f1b", 8), ("gpipe", 32))
MOST_STAGES_TO_CUT = 8  # up to which the partitioner has to find the cut too


class Published(NamedTuple):
    """A row of table 1: the layers that fit, and what all accelerators hold, in GB."""

    layers: int
    parameter_gb: float
    activation_gb: float


PAPER = {
    1: Published(13, 8.8, 6.4),
    8: Published(103, 59.5, 50.9),
    32: Published(415, 235.1, 199.9),
    128: Published(1663, 937.9, 796.1),
}


@dataclass(frozen=True)
class Format:
    """The number format and the kind of attention of a Transformer."""

    name: str
    dtype: torch.dtype
    layer: type[TransformerLayer]
    master_weights: bool
    graphs: dict[int, CostGraph] = field(default_factory=dict)

    @cached_property
    def target(self) -> Target:
        """The model of three layers with its minibatch."""
        with torch.device("meta"):
            model = Transformer(LEAST_LAYERS, layer=self.layer).to(self.dtype)
            tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        return Target(model, arguments_of(model, tokens), token_loss, tokens)

    def options(self, k: int, microbatches: int, schedule: str, recompute: str) -> Options:
        """Return the options of a plan on K = `k` accelerators of 16 GiB."""
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
        """Return the costs of one of so many microbatches; each is captured once."""
        if microbatches not in self.graphs:
            self.graphs[microbatches] = costs_of(
                self.target, self.options(1, microbatches, "1f1b", "none")
            )
        return self.graphs[microbatches]


FORMATS = (
    Format(
        "float32, attention scores in memory", torch.float32, TransformerLayer, master_weights=False
    ),
    Format("bfloat16, fused attention", torch.bfloat16, FusedLayer, master_weights=True),
)


def costs_of(target: Target, options: Options) -> CostGraph:
    """Return the costs of a microbatch."""
    # The self-check would allocate the model.
    captured = capture_target(target, options, verify=False)
    return cost_graph(target, COSTS, options.microbatches, captured)


def main() -> None:
    """Print and write the tables."""
    began = time.perf_counter()
    rows = [row for format in FORMATS for row in transformers(format)]
    images = amoebanets()
    seconds = round(time.perf_counter() - began)
    print(f"\n{seconds} s in all")
    result = {"costs": COSTS, "seconds": seconds, "transformer": rows, "amoebanet": images}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def transformers(format: Format) -> list[dict[str, Any]]:
    """Return a row for each K: the deepest Transformer in this format, and the paper's."""
    for _, microbatches in SETTINGS:
        format.graph(
            microbatches
        )  # A capture may print notes, which must not tear the table apart.
    print(f"\nTransformer-L, {format.name}: the largest L on K accelerators of 16 GiB")
    print(f"{'':5}{'paper':>5}  {'whole stages recomputed':^44}  {'regions by cost (auto)':^32}")
    print(f"{'K':>4} {'L':>5}  {'L':>5} {'parameters':>10} {'peak':>9}  {'order':17}  ", end="")
    print(f"{'L':>5} {'parameters':>10} {'peak':>9} {'recompute':>9}")
    rows = [{"format": format.name, "k": k, **deepest(format, k)} for k in PAPER]
    print("The paper's L: memory on all accelerators beside the paper's, the step of 32 sequences")
    print(f"{'K':>4} {'L':>5}  {'parameters':>19} {'all else':>20}  {'step':>8}", end="")
    print(f" {'recompute':>9}  {'auto':>8} {'recompute':>9}")
    return [
        row | {"paper": compare_to_paper(format, k)} for row, k in zip(rows, PAPER, strict=True)
    ]


def deepest(format: Format, k: int) -> dict[str, Any]:
    """Return the largest L with whole stages recomputed, and with regions chosen by cost.

    Both are under the schedule that allows the largest L with whole stages recomputed.
    """
    print(f"{k:4} {PAPER[k].layers:5}  ", end="", flush=True)
    capacities = {
        (order, m): LayerCapacity(format.graph(m), format.options(k, m, order, "stage"))
        for order, m in SETTINGS
    }
    layers = {setting: sum(capacity.most_layers) for setting, capacity in capacities.items()}
    order, m = max(SETTINGS, key=lambda setting: layers[setting])
    best = capacities[order, m]
    stages = plan_deepest(best, f"{order}, m = {m:2}")
    auto = plan_deepest(LayerCapacity(format.graph(m), format.options(k, m, order, "auto")))
    print()
    by_setting = []
    for (schedule, microbatches), most in layers.items():
        setting = {"schedule": schedule, "microbatches": microbatches}
        by_setting.append(setting | {"layers": most if most >= LEAST_LAYERS else None})
    return {
        "schedule": order,
        "microbatches": m,
        "stage": stages,
        "auto": auto,
        "stage_by_setting": by_setting,
        "cut_by_partitioner": has_cut(best) if k <= MOST_STAGES_TO_CUT else None,
    }


def plan_deepest(capacity: LayerCapacity, order: str | None = None) -> dict[str, Any]:
    """Plan the deepest model that fits; print and return its figures."""
    layers = sum(capacity.most_layers)
    plan = plan_layers(capacity.shallow, capacity.options, capacity.most_layers)
    parameters = parameters_of(capacity.shallow, layers)
    print(f"{layers:5} {parameters / 1e9:9.2f}B {plan.peak_bound_bytes / GIB:5.1f} GiB ", end="")
    print(f" {order:17}  " if order else f"{plan.recompute_share:10.0%}", end="", flush=True)
    return {
        "layers": layers,
        "layers_of_stages": capacity.most_layers,
        "parameters": parameters,
        "peak_bound_bytes": plan.peak_bound_bytes,
        "recompute_share": round(plan.recompute_share, 4),
    }


def parameters_of(shallow: CostGraph, layers: int) -> int:
    """Return how many numbers the parameters of the deep model have."""
    return sum(prod(parameter.shape or ()) for parameter in tile(shallow, layers).parameters)


def has_cut(capacity: LayerCapacity) -> bool:
    """Return whether the partitioner finds a cut of as many layers."""
    deep = tile(capacity.shallow, sum(capacity.most_layers))
    try:
        solve(problem_of(deep, capacity.options, FREE))
    except InfeasibleError:
        return False
    return True


def compare_to_paper(format: Format, k: int) -> dict[str, Any]:
    """Plan the paper's model in even stages; print and return its figures beside the paper's."""
    graph, paper = format.graph(BATCH), PAPER[k]
    layers = even_layers(paper.layers, k)
    plans = {
        recompute: plan_layers(graph, format.options(k, BATCH, "1f1b", recompute), layers)
        for recompute in ("stage", "auto")
    }
    stage = plans["stage"]
    parameters, others = stage.parameter_bytes, stage.other_bytes
    print(f"{k:4} {paper.layers:5}  {parameters / GIB:6.1f} GiB ({paper.parameter_gb:5}G) ", end="")
    print(f"{others / GIB:7.1f} GiB ({paper.activation_gb:5}G)  ", end="")
    print(" ".join(_step_and_recompute(plan) for plan in plans.values()), flush=True)
    row = {
        "layers": paper.layers,
        "parameter_bytes": parameters,
        "published_parameter_gb": paper.parameter_gb,
        "other_bytes": others,
        "published_activation_gb": paper.activation_gb,
    }
    for name, plan in plans.items():
        row[f"{name}_step_ns"] = plan.prediction.step_ns
        row[f"{name}_recompute_share"] = round(plan.recompute_share, 4)
        row[f"{name}_peak_bound_bytes"] = plan.peak_bound_bytes
    return row


def _step_and_recompute(plan: DeepPlan) -> str:
    return f"{plan.prediction.step_ns / 1e9:6.2f} s {plan.recompute_share:9.0%} "


def even_layers(layers: int, k: int) -> list[int]:
    """Return the layers of k stages that differ by one at most.

    The last stage and the first one hold most besides layers, so these two are the first to have
    one fewer: 9 layers in 4 stages are 2, 3, 2, 2.
    """
    few, more = divmod(layers, k)
    order = sorted(range(k), key=lambda stage: (stage == k - 1, stage == 0, stage))
    return [few + (stage in order[:more]) for stage in range(k)]


class RecomputeCase(NamedTuple):
    """Recompute to fit into `memory_gib` (None: none at all), and the paper's GB of activations."""

    memory_gib: int | None
    published_gb: float | None = None

    @property
    def label(self) -> str:
        """The name of this case in the table."""
        return "none" if self.memory_gib is None else f"to {self.memory_gib} GiB"


def amoebanets() -> list[dict[str, Any]]:
    """Return the rows of AmoebaNet-D on one accelerator, as the paper's table compares it."""
    print(
        "\nAmoebaNet-D (18, D), float32, on one accelerator of 8 GiB; of 128 images so many at once"
    )
    print(f"{'D':>4} {'images':>6} {'recompute':9} {'parameters':>10} {'their memory':>12}", end="")
    print(f" {'activations':>11} {'paper':>7} {'bound':>10} {'recompute':>9}")
    cases: tuple[tuple[int, int, tuple[RecomputeCase, ...]], ...] = (
        (208, 16, (RecomputeCase(None, 6.26),)),
        (416, 16, (RecomputeCase(None), RecomputeCase(8), RecomputeCase(7, 3.46))),
        (416, 4, (RecomputeCase(None),)),
    )
    rows = []
    for filters, images, recompute_cases in cases:
        rows += list(amoebanet_rows(filters, images, recompute_cases))
    return rows


def amoebanet_rows(
    filters: int, images: int, cases: Iterable[RecomputeCase]
) -> Iterator[dict[str, Any]]:
    """Print and yield the figures of AmoebaNet-D (18, `filters`) with `images` a microbatch."""
    with torch.device("meta"):
        model, inputs = AmoebaNet(18, filters), torch.zeros(IMAGES, 3, 224, 224)
        targets = torch.zeros(IMAGES, dtype=torch.long)
    target = Target(model, arguments_of(model, inputs), nn.functional.cross_entropy, targets)
    plain = options_for(
        target, k=1, microbatches=IMAGES // images, optimizer="rmsprop", costs=COSTS
    )
    graph = costs_of(target, plain)
    one_stage = {node.name: 0 for node in graph.nodes}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for case in cases:
        recompute = "none" if case.memory_gib is None else "auto"
        memory = None if case.memory_gib is None else case.memory_gib * GIB
        options = replace(plain, recompute=recompute, memory_bytes=memory)
        plan = plan_assignment(graph, options, one_stage)
        activations = activations_of(plan.stages[0].footprint)
        print(f"{filters:4} {images:6} {case.label:9} {parameters / 1e6:9.1f}M ", end="")
        print(f"{plan.parameter_bytes / 1e9:9.2f} GB {activations / 1e9:8.2f} GB", end="")
        print(f" {case.published_gb or '':>7} {plan.peak_bound_bytes / GIB:6.2f} GiB", end="")
        too_large = " (does not fit)" * (plan.peak_bound_bytes > SMALL_MEMORY)
        print(f" {plan.recompute_share:9.0%}{too_large}", flush=True)
        yield {
            "cells": 18,
            "filters": filters,
            "images_at_once": images,
            "recompute": recompute,
            "memory_bytes": memory,
            "parameters": parameters,
            "parameter_bytes": plan.parameter_bytes,
            "activation_bytes": activations,
            "published_activation_gb": case.published_gb,
            "bound_bytes": plan.peak_bound_bytes,
            "recompute_share": round(plan.recompute_share, 4),
        }


def activations_of(stage: Footprint) -> int:
    """Return the most that one microbatch holds besides parameters, in bytes."""
    return max(stage.forward_peak.expected, (stage.activations + stage.backward_peak).expected)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
