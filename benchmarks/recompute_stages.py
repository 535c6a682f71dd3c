"""The stages whose regions the recompute benchmarks choose, and what each policy makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import transformers

from benchmarks.memory_models import gpt_blocks
from examples.models import UNet
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.module_paths import block_of
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.recompute_problem import RecomputeProblem, recompute_problem_of
from pipecompile.recompute.choice import (
    RegionChoice,
    cheapest,
    per_block,
    priced,
    square_root,
    whole,
)
from pipecompile.recompute.integer_program import refined
from pipecompile.recompute.lower_bound import least_ns
from pipecompile.recompute.nested_regions import nested_regions

__all__ = ["COSTS", "STAGES", "CostedStage", "held_bytes", "whole_model"]

COSTS = "roofline:h100"
SECONDS = 2.0  # of deterministic time, for regions that no menu has


@dataclass(frozen=True)
class CostedStage:
    """A stage, given by its nodes in a cost graph and by those of all stages before it."""

    graph: CostGraph
    before: tuple[str, ...]
    nodes: tuple[str, ...]

    @cached_property
    def live_ranges(self) -> LiveRanges:
        """The live ranges of the storages of its graph."""
        return LiveRanges(self.graph)

    @cached_property
    def problem(self) -> RecomputeProblem:
        """The stage as the recompute planner sees it, in a backward that is not its step's first.

        In such a backward gradients are already there and are summed into.
        """
        return recompute_problem_of(self.live_ranges, self.before, self.nodes, has_gradients=True)

    @cached_property
    def blocks(self) -> list[str]:
        """The block of the model in which each node lies."""
        return [block_of(self.graph.by_name[name].module) for name in self.nodes]

    @property
    def forward_ns(self) -> int:
        """The time of a forward of one microbatch."""
        return sum(self.problem.ns)

    @cached_property
    def policies(self) -> dict[str, RegionChoice]:
        """The regions of each policy that knows no cap."""
        regions_of = {
            "none": (),
            "whole stage": whole(self.problem),
            "per block": per_block(self.problem, self.blocks),
            "√n": square_root(self.problem, self.blocks),
        }
        return {name: priced(self.problem, regions) for name, regions in regions_of.items()}

    def without_cap(self, in_flight: int) -> dict[str, tuple[int, int]]:
        """Return for each of these policies its peak in bytes and the extra ns of a microbatch.

        "except last" is added: whole stages are recomputed for all microbatches of a step but the
        last one. Under GPipe a step has as many microbatches as are in flight.
        """
        none, whole_stage = self.policies["none"], self.policies["whole stage"]
        # At its peak one microbatch is being recomputed, the last one is kept whole, and of the
        # others only the stage's inputs are kept.
        others = 0
        if in_flight > 1:
            others = (in_flight - 2) * whole_stage.kept + none.kept + whole_stage.peak
        figures = {}
        for name, choice in self.policies.items():
            figures[name] = (held_bytes(choice, in_flight), choice.ns)
        extra_ns = whole_stage.ns * (in_flight - 1) // in_flight
        return {**figures, "except last": (max(none.peak, others), extra_ns)}

    def ours(self, in_flight: int, available: int) -> tuple[RegionChoice | None, int | None]:
        """Return the regions that a plan has, and a lower bound on their ns; None if none fit.

        With several microbatches in flight the bound holds for regions side by side, with one also
        for regions within regions.
        """
        known = cheapest(self.problem, self.blocks, in_flight, available)
        least = least_ns(self.problem, in_flight, available)
        if in_flight == 1:
            choices = [known, nested_regions(self.problem, self.blocks, available)]
        else:
            start = None if known is None else known.regions
            regions, bound = refined(self.problem, in_flight, available, start, SECONDS)
            choices = [None if regions is None else priced(self.problem, regions)]
            least = None if least is None else max(least, bound)
        fitting = [choice for choice in choices if choice is not None]
        return min(fitting, key=lambda choice: choice.ns, default=None), least


def held_bytes(choice: RegionChoice, in_flight: int) -> int:
    """Return the bytes at the peak: one microbatch is at its own peak, the others are kept."""
    return (in_flight - 1) * choice.kept + choice.peak


def gpt_stage() -> CostedStage:
    """Return blocks 1 to 4 of 6 as a stage, which sends its output on."""
    graph = gpt_blocks(6)
    names = [node.name for node in graph.nodes]
    inside = [n.name for n in graph.nodes if block_of(n.module) in ("1", "2", "3", "4")]
    return CostedStage(graph, tuple(names[: names.index(inside[0])]), tuple(inside))


def resnet_stage() -> CostedStage:
    """Return ResNet-50 with its loss as a stage."""
    with torch.device("meta"):
        config = transformers.ResNetConfig()  # type: ignore[call-arg]
        model = transformers.ResNetForImageClassification(config)
        images = {
            "pixel_values": torch.empty(32, 3, 224, 224),
            "labels": torch.zeros(32, dtype=torch.int64),
        }
    return whole_model(Target.of((model, images), "resnet50"), COSTS, 1)


def unet_stage() -> CostedStage:
    """Return the U-Net of the examples with 64 channels, and its loss, as a stage."""
    with torch.device("meta"):
        example = {
            "model": UNet(width=64),
            "sample_input": torch.empty(8, 3, 256, 256),
            "targets": torch.empty(8, 1, 256, 256),
            "loss_fn": torch.nn.functional.mse_loss,
        }
    return whole_model(Target.of(example, "unet"), COSTS, 1)


def whole_model(target: Target, costs: str, microbatches: int) -> CostedStage:
    """Return all of a model as one stage."""
    options = options_for(target, k=1, microbatches=microbatches, schedule="gpipe", costs=costs)
    graph = cost_graph(target, costs, microbatches, capture_target(target, options, verify=False))
    return CostedStage(graph, (), tuple(node.name for node in graph.nodes))


STAGES: dict[str, Callable[[], CostedStage]] = {
    "4 GPT blocks": gpt_stage,
    "ResNet-50": resnet_stage,
    "U-Net": unet_stage,
}
