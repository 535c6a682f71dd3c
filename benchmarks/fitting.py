"""How many layers fit, and the plan of a deep model whose stages are given by their layers.

The shallow model's blocks are its layers; see tiling.py for what is made of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from benchmarks.tiling import LEAST, tiled
from pipecompile.api.partition_problem import problem_of
from pipecompile.api.plan import scheduled
from pipecompile.api.recompute import recompute_planner
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Options, Prediction, Stage
from pipecompile.partition.problem import StageCandidate
from pipecompile.schedule.selection import placements

__all__ = ["Fitting", "Whole", "composed", "planned"]


@dataclass(frozen=True)
class Fitting:
    """The stages of a deep model under these options, each alone on its rank."""

    shallow: CostGraph
    options: Options

    @cached_property
    def most(self) -> tuple[int, ...]:
        """The most layers of each stage; of a single one less than `LEAST` if so few do not fit.

        Stages between the first and the last have ever fewer in flight.
        """
        k = self.options.k
        if k == 1:
            return (self._most(0, LEAST - 1, self._beyond),)
        first, last = (self._most(stage, 0, self._beyond) for stage in (0, k - 1))
        ends = [self._most(stage, 0, self._beyond) for stage in sorted({1, k - 2} - {0, k - 1})]
        return (first, *ends[:1], *self._rising(1, k - 2, *ends[:1], *ends[-1:]), *ends[1:], last)

    def _rising(self, first: int, last: int, low: int = 0, high: int = 0) -> tuple[int, ...]:
        """Of the stages between two that are known."""
        between, middle = max(0, last - first - 1), (first + last) // 2
        if low == high or not between:
            return (low,) * between
        here = self._most(middle, low, high + 1)
        return (
            *self._rising(first, middle, low, here),
            here,
            *self._rising(middle, last, here, high),
        )

    def _most(self, stage: int, least: int, beyond: int) -> int:
        """By bisection, as more layers hold more: not fewer than `least`, fewer than `beyond`."""
        counts = range(least + 1, beyond)
        return least + bisect_left(counts, True, key=lambda layers: not self.fits(stage, layers))

    @cached_property
    def _beyond(self) -> int:
        """So many layers are too many for their parameters and gradients alone."""
        layer = sum(
            each.bytes for each in self.shallow.parameters if block_of(each.name) == "layers.1"
        )
        return self._memory_bytes // (2 * layer) + 2

    @property
    def _memory_bytes(self) -> int:
        caps = self.options.caps(self.options.k)
        assert caps is not None
        return min(caps)

    def fits(self, stage: int, layers: int) -> bool:
        """Whether a stage of so many layers fits, by what the partitioner asks; others lie before and behind it."""
        before, behind = int(stage > 0), int(stage < self.options.k - 1)
        total = max(LEAST, before + layers + behind)
        skipped = (total - layers - behind) * before
        graph = tiled(self.shallow, total)
        runs = _runs(graph, [skipped] * before + [layers] + [total - layers - skipped] * behind)
        memory = problem_of(graph, self.options, FREE).memory
        assert memory is not None and memory.price is not None
        earlier = tuple(name for run in runs[:before] for name in run)
        candidate = StageCandidate(
            stage, earlier, runs[before], memory.in_flight[stage], self._memory_bytes
        )
        return memory.price(candidate).ns is not None


class Whole(NamedTuple):
    """A plan of a deep model: all that tells what it holds and how long it takes."""

    stages: tuple[Stage, ...]
    prediction: Prediction

    @property
    def fullest(self) -> int:
        """The most that a rank may hold, in bytes."""
        return max(memory.total.bound for memory in self.prediction.memory)

    @property
    def parameters(self) -> int:
        """Expected bytes of parameters, their gradients and the optimizer's state on all ranks."""
        return sum(
            (
                stage.footprint.parameters + stage.footprint.gradients + stage.footprint.optimizer
            ).expected
            for stage in self.stages
        )

    @property
    def others(self) -> int:
        """Expected bytes of all else at the peaks of all ranks: activations, buffers, scratch."""
        held = [
            memory.activations + memory.buffers + memory.workspace
            for memory in self.prediction.memory
        ]
        return sum(amount.expected for amount in held)

    @property
    def again(self) -> float:
        """What is computed again as a share of a forward."""
        return sum(stage.recompute_ns for stage in self.stages) / sum(
            stage.forward_ns for stage in self.stages
        )


def planned(shallow: CostGraph, options: Options, layers: Sequence[int]) -> Whole:
    """The plan with so many layers in each stage; InfeasibleError if a rank does not fit its memory."""
    graph = tiled(shallow, sum(layers))
    runs = _runs(graph, layers)
    return composed(graph, options, {name: stage for stage, run in enumerate(runs) for name in run})


def composed(graph: CostGraph, options: Options, assignment: Mapping[str, int]) -> Whole:
    """The plan of a cut that is given; InfeasibleError if a rank does not fit its memory."""
    placement = placements(options)[0]
    made = scheduled(recompute_planner(graph, options, placement), FREE, assignment)
    return Whole(made.stages, made.prediction)


def _runs(graph: CostGraph, layers: Sequence[int]) -> list[tuple[str, ...]]:
    """The nodes of stages of so many layers; what lies before all layers goes to the first, what behind to the last."""
    runs: list[list[str]] = [[] for _ in layers]
    ends, now = list(accumulate(layers)), 0
    for node in graph.nodes:
        number = block_of(node.module).rpartition(".")[2]
        now = bisect_right(ends, int(number)) if number.isdigit() else now
        runs[now].append(node.name)
    return [tuple(run) for run in runs]
