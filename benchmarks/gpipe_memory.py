"""How large a model fits? Table 1 of the GPipe paper (Huang et al., arXiv 1811.06965) by our memory model.

Transformer-L: 16 GiB an accelerator, batch 32, sequences of 1024 tokens, d 2048, feed-forward 8192, 32 heads, 32,000
words, RMSProp. In float32 with attention scores in memory, as in the paper, and in bfloat16 with fused attention. A
parameter takes 12 bytes either way: weight, gradient and RMSProp's mean of squares of 4 bytes each; or weight and
gradient of 2, float32 copy and mean of 4. (`torch.optim` on a GPU needs 4 and 8 more while it steps.)

A capture of three layers on the meta device is tiled to any depth (tiling.py). For each stage the most layers are
found with which `price`, which the partitioner asks whether a stage fits, says so; what fits is judged by the bound of
the memory model, allocator and communication buffers included. Nothing else than its number in flight, and whether it
is first or last, tells stages apart, so these are the largest stages that are cut between layers. The plan of all of
them together is then made as any other: stages, order, and what ranks hold. For few stages the partitioner is given
the model too, and has to find a cut.

Prints the tables, writes benchmarks/results/gpipe_memory.json.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from benchmarks.gpipe_models import TOKENS, FusedLayer, Layer, Transformer, token_loss
from benchmarks.tiling import tiled
from pipecompile.api.capturing import capture_target
from pipecompile.api.costing import cost_graph
from pipecompile.api.cutting import problem_of
from pipecompile.api.options import options_for
from pipecompile.api.ordering import flights, ordered, placements
from pipecompile.api.planning import predicted
from pipecompile.api.recomputing import Recomputing
from pipecompile.api.staging import stages_of
from pipecompile.api.target import Target
from pipecompile.errors import InfeasibleError
from pipecompile.frontend.signature import arguments_of
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE
from pipecompile.ir.modules import block_of
from pipecompile.ir.plan import Options, Prediction, Recompute, Stage
from pipecompile.partition.front import solve
from pipecompile.partition.problem import Candidate

RESULT = Path(__file__).parent / "results" / "gpipe_memory.json"
COSTS = "roofline:h100"
BATCH, GIB = 32, 1 << 30
MEMORY = 16 * GIB
SHALLOW = 3  # layers that are captured
PAPER = {1: 13, 8: 103, 32: 415, 128: 1663}  # by accelerators the layers that fit


@dataclass(frozen=True)
class Format:
    """Numbers and attention."""

    name: str
    type: torch.dtype
    layer: type[Layer]
    master_weights: bool
    graphs: dict[int, CostGraph] = field(default_factory=dict)

    @cached_property
    def target(self) -> Target:
        """The model of a few layers with its minibatch."""
        with torch.device("meta"):
            model = Transformer(SHALLOW, layer=self.layer).to(self.type)
            tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        return Target(model, arguments_of(model, tokens), token_loss, tokens)

    def options(self, k: int, microbatches: int, schedule: str, recompute: Recompute) -> Options:
        """Those of a plan."""
        return options_for(
            self.target,
            k=k,
            microbatches=microbatches,
            schedule=schedule,
            objective="max-load",
            memory=MEMORY,
            optimizer="rmsprop",
            master_weights=self.master_weights,
            costs=COSTS,
            recompute=recompute,
            granularity="blocks",
        )

    def graph(self, microbatches: int) -> CostGraph:
        """Costs of one of so many microbatches."""
        if microbatches not in self.graphs:
            options = self.options(1, microbatches, "1f1b", "none")
            captured = capture_target(self.target, options, verify=False)
            self.graphs[microbatches] = cost_graph(self.target, COSTS, microbatches, captured)
        return self.graphs[microbatches]


FORMATS = (
    Format("float32, scores in memory", torch.float32, Layer, master_weights=False),
    Format("bfloat16, fused attention", torch.bfloat16, FusedLayer, master_weights=True),
)


@dataclass(frozen=True)
class Fitting:
    """The stages of a deep model under these options, each alone on its accelerator."""

    shallow: CostGraph
    options: Options

    @cached_property
    def most(self) -> tuple[int, ...]:
        """The most layers of each stage."""
        k, known = self.options.k, dict[tuple[bool, bool, int], int]()
        alike = [(s == 0, s == k - 1, count) for s, count in enumerate(flights(self.options, range(k)))]
        for stage, kind in enumerate(alike):
            if kind not in known:
                known[kind] = self._most(stage, [most for other, most in known.items() if other[:2] == kind[:2]])
        return tuple(known[kind] for kind in alike)

    def _most(self, stage: int, fewer: Sequence[int]) -> int:
        """By bisection: more layers hold more. Of stages with more in flight no `fewer` fit than here."""
        least = max(fewer, default=SHALLOW if self.options.k == 1 else 1)
        counts = range(least, self._beyond)
        return least - 1 + bisect_left(counts, True, key=lambda layers: not self.fits(stage, layers))

    @cached_property
    def _beyond(self) -> int:
        """So many layers are too many for their parameters alone."""
        layer = sum(each.bytes for each in self.shallow.parameters if each.name.startswith("layers.1."))
        return MEMORY // layer + 1

    def fits(self, stage: int, layers: int) -> bool:
        """Whether a stage of so many layers fits, by what the partitioner asks; others lie before and behind it."""
        before, behind = int(stage > 0), int(stage < self.options.k - 1)
        total = max(SHALLOW, before + layers + behind)
        rest = total - layers - behind if before else 0
        graph = tiled(self.shallow, total)
        runs = runs_of(graph, [rest] * before + [layers] + [total - layers - rest] * behind)
        memory = problem_of(graph, self.options, FREE).memory
        assert memory is not None and memory.price is not None
        names = tuple(name for run in runs[:before] for name in run)
        candidate = Candidate(stage, names, runs[before], memory.in_flight[stage], MEMORY)
        return memory.price(candidate) is not None


def runs_of(graph: CostGraph, layers: Sequence[int]) -> list[tuple[str, ...]]:
    """The nodes of stages of so many layers; what lies around the layers goes to the first and to the last."""
    runs: list[list[str]] = [[] for _ in layers]
    ends, now = list(accumulate(layers)), 0
    for node in graph.nodes:
        number = block_of(node.module).rpartition(".")[2]
        now = bisect_right(ends, int(number)) if number.isdigit() else now
        runs[now].append(node.name)
    return [tuple(run) for run in runs]


class Whole(NamedTuple):
    """A plan of a deep model: all but what only its emission needs."""

    stages: tuple[Stage, ...]
    prediction: Prediction

    @property
    def fullest(self) -> int:
        """The most that any rank may hold, in bytes."""
        return max(rank.total.bound for rank in self.prediction.memory)

    @property
    def again(self) -> float:
        """What is computed again as a share of a forward."""
        return sum(stage.recompute_ns for stage in self.stages) / sum(stage.forward_ns for stage in self.stages)


def planned(shallow: CostGraph, options: Options, layers: Sequence[int]) -> Whole:
    """The plan with so many layers in each stage; InfeasibleError if a rank does not fit."""
    graph = tiled(shallow, sum(layers))
    assignment = {name: stage for stage, run in enumerate(runs_of(graph, layers)) for name in run}
    placement = placements(options)[0]
    stages = stages_of(graph, assignment, Recomputing(graph, options, placement))
    schedule, _ = ordered(options, stages, FREE, placement, graph.memory)
    return Whole(stages, predicted(stages, schedule, FREE, options.memory_bytes, graph.memory))
