"""How many layers fit into each stage, and the plan of a deep model with so many layers a stage.

`benchmarks.gpipe_memory` asks both. The deep model is a captured model of three layers, tiled by
`benchmarks.tiled_graphs`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from benchmarks.tiled_graphs import LEAST_LAYERS, tile
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Options, Prediction
from pipecompile.ir.stage import Stage
from pipecompile.partition.memory_constraint import StageCandidate
from pipecompile.planner.partition_problem import problem_of
from pipecompile.planner.recompute import recompute_planner
from pipecompile.planner.scheduled_stages import scheduled
from pipecompile.schedule.selection import placements

__all__ = ["DeepPlan", "LayerCapacity", "plan_assignment", "plan_layers"]


@dataclass(frozen=True)
class LayerCapacity:
    """How many layers of a deep model each stage holds, with one stage on each rank."""

    shallow: CostGraph
    options: Options

    @cached_property
    def most_layers(self) -> tuple[int, ...]:
        """The most layers of each stage; less than `LEAST_LAYERS` if a single stage holds fewer.

        From stage 1 to stage k − 2 ever fewer microbatches are in flight, so ever more layers fit.
        The ends of that range are bisected first; `_rising` fills it.
        """
        k, bound = self.options.k, self._too_many_layers
        if k == 1:
            return (self._most_of(0, LEAST_LAYERS - 1, bound),)
        first, last = (self._most_of(stage, 0, bound) for stage in (0, k - 1))
        ends = [self._most_of(stage, 0, bound) for stage in sorted({1, k - 2} - {0, k - 1})]
        return (first, *ends[:1], *self._rising(1, k - 2, *ends[:1], *ends[-1:]), *ends[1:], last)

    def _rising(self, first: int, last: int, low: int = 0, high: int = 0) -> tuple[int, ...]:
        """Return the most layers of each stage between `first`, of `low`, and `last`, of `high`.

        Where both ends are equal, so is all between them: 128 stages take about 20 bisections.
        """
        between, middle = max(0, last - first - 1), (first + last) // 2
        if low == high or not between:
            return (low,) * between
        here = self._most_of(middle, low, high + 1)
        return (
            *self._rising(first, middle, low, here),
            here,
            *self._rising(middle, last, here, high),
        )

    def _most_of(self, stage: int, least: int, too_many: int) -> int:
        """Return the most layers of a stage, at least `least` and less than `too_many`.

        It is found by bisection, because a stage of more layers holds more.
        """
        counts = range(least + 1, too_many)
        return least + bisect_left(counts, True, key=lambda layers: not self.fits(stage, layers))

    @cached_property
    def _too_many_layers(self) -> int:
        """A number of layers whose parameters and gradients alone do not fit."""
        layer_bytes = sum(
            parameter.bytes
            for parameter in self.shallow.parameters
            if block_of(parameter.name) == "layers.1"
        )
        return self._memory_bytes // (2 * layer_bytes) + 2

    @property
    def _memory_bytes(self) -> int:
        caps = self.options.caps(self.options.k)
        assert caps is not None
        return min(caps)

    def fits(self, stage: int, layers: int) -> bool:
        """Return whether so many layers fit into a stage, by the price that the partitioner sees.

        The model has as few other layers as possible: one before the stage and one after it, if it
        has such neighbours.
        """
        before, after = int(stage > 0), int(stage < self.options.k - 1)
        total = max(LEAST_LAYERS, before + layers + after)
        earlier_layers = (total - layers - after) * before
        later_layers = total - layers - earlier_layers
        graph = tile(self.shallow, total)
        runs = _nodes_of_stages(
            graph, [earlier_layers] * before + [layers] + [later_layers] * after
        )
        memory = problem_of(graph, self.options, FREE).memory
        assert memory is not None and memory.price is not None
        earlier = tuple(name for run in runs[:before] for name in run)
        candidate = StageCandidate(
            stage, earlier, runs[before], memory.in_flight[stage], self._memory_bytes
        )
        return memory.price(candidate).ns is not None


class DeepPlan(NamedTuple):
    """The parts of a deep model's plan that say what its ranks hold and how long a step takes."""

    stages: tuple[Stage, ...]
    prediction: Prediction

    @property
    def peak_bound_bytes(self) -> int:
        """The largest bound on the peak of a rank."""
        return max(memory.total.bound for memory in self.prediction.memory)

    @property
    def parameter_bytes(self) -> int:
        """Expected bytes of parameters, their gradients and the optimizer's state on all ranks."""
        total = 0
        for stage in self.stages:
            held = stage.footprint
            total += (held.parameters + held.gradients + held.optimizer).expected
        return total

    @property
    def other_bytes(self) -> int:
        """Expected bytes of all else at the peaks of all ranks: activations, buffers, workspace."""
        held = [
            memory.activations + memory.buffers + memory.workspace
            for memory in self.prediction.memory
        ]
        return sum(amount.expected for amount in held)

    @property
    def recompute_share(self) -> float:
        """The time of recompute divided by that of all forwards."""
        recompute_ns = sum(stage.recompute_ns for stage in self.stages)
        return recompute_ns / sum(stage.forward_ns for stage in self.stages)


def plan_layers(shallow: CostGraph, options: Options, layers: Sequence[int]) -> DeepPlan:
    """Return the plan with `layers[s]` layers in stage s.

    InfeasibleError if a rank does not fit into its memory.
    """
    graph = tile(shallow, sum(layers))
    assignment = {}
    for stage, names in enumerate(_nodes_of_stages(graph, layers)):
        assignment |= dict.fromkeys(names, stage)
    return plan_assignment(graph, options, assignment)


def plan_assignment(graph: CostGraph, options: Options, assignment: Mapping[str, int]) -> DeepPlan:
    """Return the plan of this cut; InfeasibleError if a rank does not fit into its memory."""
    placement = placements(options)[0]
    plan = scheduled(recompute_planner(graph, options, placement), FREE, assignment)
    return DeepPlan(plan.stages, plan.prediction)


def _nodes_of_stages(graph: CostGraph, layers: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the nodes of each stage, where stage s has `layers[s]` layers.

    Nodes before all layers are in the first stage, nodes after them in the last one.
    """
    names: list[list[str]] = [[] for _ in layers]
    ends, stage = list(accumulate(layers)), 0
    for node in graph.nodes:
        number = block_of(node.module).rpartition(".")[2]
        if number.isdigit():
            stage = bisect_right(ends, int(number))
        names[stage].append(node.name)
    return [tuple(stage_names) for stage_names in names]
