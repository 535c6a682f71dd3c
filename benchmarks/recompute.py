"""What does it cost to fit less memory, by every policy, and does a stage then hold what is predicted?

First the budget falls from what saving everything holds at its peak to 15 % of it, with 1, 4 and 8 microbatches in
flight: four blocks of a GPT (2048 channels, 16 heads, one sequence of 2048, bfloat16, fused attention) as a stage in
the middle of more, ResNet-50 (32 images of 224 × 224) and a U-Net (8 of 256 × 256) as a stage each. Costs are those of
an H100's roofline, nothing is allocated. Prints the extra compute of every policy in % of a forward, ours among them
with a bound below which no regions that fit can be, and what issue 7 asks of it. Then regions chosen for smaller models
run in this process: prints the peak of torch's CPU allocator beside the predicted one. Writes
benchmarks/results/recompute.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.memory_models import gpt_blocks
from benchmarks.memory_prediction import highest
from benchmarks.models import gpt2, unet
from examples.models import UNet
from pipecompile.api.capture import capture_target
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.target import Target
from pipecompile.codegen.stages import emit
from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.module_paths import block_of
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.recompute_problem import RecomputeProblem, recompute_problem_of
from pipecompile.memory_model.stage import footprint_of
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
from pipecompile.runtime.microbatch import split
from pipecompile.runtime.stage import EagerStage

RESULT = Path(__file__).parent / "results" / "recompute.json"
COSTS = "roofline:h100"
IN_FLIGHT = (1, 4, 8)
BUDGETS = (100, 90, 80, 70, 60, 50, 40, 30, 20, 15)  # % of what saving everything holds at its peak
MEASURED_IN_FLIGHT, MEASURED_BUDGETS = (1, 4), (100, 80, 60, 40)
MICROBATCHES = 4
SECONDS = 2.0  # deterministic ones, of the search for regions that no menu has


@dataclass(frozen=True)
class Stage:
    """A stage, whose regions are to be chosen."""

    graph: CostGraph
    before: tuple[str, ...]
    nodes: tuple[str, ...]

    @cached_property
    def ranges(self) -> LiveRanges:
        """The storages of its graph."""
        return LiveRanges(self.graph)

    @cached_property
    def problem(self) -> RecomputeProblem:
        """The stage by position, as a bound counts, in a backward that is not the first of its step."""
        return recompute_problem_of(self.ranges, self.before, self.nodes, has_gradients=True)

    @cached_property
    def blocks(self) -> list[str]:
        """The block of the model in which each node lies."""
        return [block_of(self.graph.by_name[name].module) for name in self.nodes]

    @property
    def forward_ns(self) -> int:
        """A forward of one microbatch."""
        return sum(self.problem.ns)

    @cached_property
    def policies(self) -> dict[str, RegionChoice]:
        """What the policies choose that know no budget."""
        chosen = {
            "none": (),
            "whole stage": whole(self.problem),
            "per block": per_block(self.problem, self.blocks),
            "√n": square_root(self.problem, self.blocks),
        }
        return {name: priced(self.problem, regions) for name, regions in chosen.items()}

    def without_budget(self, in_flight: int) -> dict[str, tuple[int, int]]:
        """What these policies hold at their peak, and the ns more that a microbatch takes.

        And so for whole stages in all microbatches but the last of a step, which has as many as are in flight (GPipe).
        """
        none, again = self.policies["none"], self.policies["whole stage"]
        others = (in_flight - 2) * again.kept + none.kept + again.peak if in_flight > 1 else 0
        found = {
            name: (held(choice, in_flight), choice.ns) for name, choice in self.policies.items()
        }
        return {
            **found,
            "except last": (max(none.peak, others), again.ns * (in_flight - 1) // in_flight),
        }

    def ours(self, in_flight: int, available: int) -> tuple[RegionChoice | None, int | None]:
        """The regions that a plan has, and a bound: no regions that fit take fewer ns (None: none fit).

        With several in flight that is proven of regions side by side, with one also of regions within regions.
        """
        known = cheapest(self.problem, self.blocks, in_flight, available)
        least = least_ns(self.problem, in_flight, available)
        if in_flight == 1:
            found = [known, nested_regions(self.problem, self.blocks, available)]
        else:
            regions, bound = refined(
                self.problem, in_flight, available, known and known.regions, SECONDS
            )
            found = [None if regions is None else priced(self.problem, regions)]
            least = None if least is None else max(least, bound)
        return min(filter(None, found), key=lambda choice: choice.ns, default=None), least


def held(choice: RegionChoice, in_flight: int) -> int:
    """Bytes at the peak."""
    return (in_flight - 1) * choice.kept + choice.peak


def gpt_stage() -> Stage:
    """Blocks 1 to 4 of 6: what they make is sent on."""
    graph = gpt_blocks(6)
    inside = [block_of(node.module) in ("1", "2", "3", "4") for node in graph.nodes]
    first = inside.index(True)
    names = [node.name for node in graph.nodes]
    return Stage(
        graph, tuple(names[:first]), tuple(n for n, own in zip(names, inside, strict=True) if own)
    )


def resnet_stage() -> Stage:
    """ResNet-50 with its loss."""
    with torch.device("meta"):
        model = transformers.ResNetForImageClassification(transformers.ResNetConfig())  # type: ignore[call-arg]
        images = {
            "pixel_values": torch.empty(32, 3, 224, 224),
            "labels": torch.zeros(32, dtype=torch.int64),
        }
    return _whole(Target.of((model, images), "resnet50"), COSTS, 1)


def unet_stage() -> Stage:
    """The U-Net of the examples with 64 channels, and its loss."""
    with torch.device("meta"):
        model, images, masks = (
            UNet(width=64),
            torch.empty(8, 3, 256, 256),
            torch.empty(8, 1, 256, 256),
        )
    made = {
        "model": model,
        "sample_input": images,
        "targets": masks,
        "loss_fn": torch.nn.functional.mse_loss,
    }
    return _whole(Target.of(made, "unet"), COSTS, 1)


def _whole(target: Target, costs: str, microbatches: int) -> Stage:
    """All of a model as one stage."""
    options = options_for(target, k=1, microbatches=microbatches, schedule="gpipe", costs=costs)
    graph = cost_graph(target, costs, microbatches, capture_target(target, options, verify=False))
    return Stage(graph, (), tuple(node.name for node in graph.nodes))


def small_resnet() -> dict[str, Any]:
    """ResNet-50, images of 96 × 96: on smaller ones some kernels take scratch that the memory model does not know."""
    images = torch.randn(16, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10))  # type: ignore[call-arg]
    return {
        "model": model,
        "sample_input": {"pixel_values": images, "labels": torch.arange(16) % 10},
    }


STAGES: dict[str, Callable[[], Stage]] = {
    "4 GPT blocks": gpt_stage,
    "ResNet-50": resnet_stage,
    "U-Net": unet_stage,
}

RUN: dict[str, Callable[[], dict[str, Any]]] = {
    "GPT-2, small": gpt2,
    "ResNet-50": small_resnet,
    "U-Net": unet,
}


# -- what fits, at which cost


def main() -> None:
    """Prints and writes the tables."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows, asked = [], []
    for name, make in STAGES.items():
        stage = make()
        for in_flight in IN_FLIGHT:
            rows += list(_sweep(name, stage, in_flight))
        if name == "4 GPT blocks":
            asked = list(_asked(stage))
    peaks = [row for name, make in RUN.items() for row in _peaks(name, Target.of(make(), name))]
    result = {
        "torch": torch.__version__,
        "costs": COSTS,
        "sweep": rows,
        "asked": asked,
        "peaks": peaks,
    }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def _sweep(name: str, stage: Stage, in_flight: int) -> Iterator[dict[str, Any]]:
    policies = stage.without_budget(in_flight)
    everything, _ = policies["none"]
    print(
        f"\n{name}, {len(stage.nodes)} nodes, {in_flight} in flight: saving everything holds {everything / 2**20:,.0f} "
        f"MiB; extra compute in % of a forward ({stage.forward_ns / 1e6:.2f} ms)"
    )
    print(
        f"{'budget':>7} {'MiB':>8}"
        + "".join(f"{policy:>13}" for policy in (*policies, "ours", "bound"))
        + "  regions"
    )
    for budget in BUDGETS:
        available = everything * budget // 100
        began = time.perf_counter()
        own, bound = stage.ours(in_flight, available)
        seconds = time.perf_counter() - began
        spent = {
            policy: ns if bytes_ <= available else None for policy, (bytes_, ns) in policies.items()
        }
        spent |= {"ours": own and own.ns, "bound": bound}
        extra = {policy: _percent_of_forward(stage, ns) for policy, ns in spent.items()}
        regions = "" if own is None else len(own.regions)
        print(
            f"{budget:6} % {available / 2**20:8,.0f}"
            + "".join(map(_percent, extra.values()))
            + f"  {regions}",
            flush=True,
        )
        yield {
            "stage": name,
            "in_flight": in_flight,
            "budget_percent": budget,
            "budget_bytes": available,
            "extra_percent": extra,
            "seconds": round(seconds, 3),
        }


def _percent_of_forward(stage: Stage, ns: int | None) -> float | None:
    return None if ns is None else round(100 * ns / stage.forward_ns, 2)


def _percent(extra: float | None) -> str:
    return f"{'does not fit':>13}" if extra is None else f"{extra:11.1f} %"


def _asked(stage: Stage) -> Iterator[dict[str, Any]]:
    """At the peak of whole-stage recompute, relative to its extra compute; and at a share of what everything takes."""
    print("\nAsked of ours on the GPT blocks:")
    all_again, nothing = stage.policies["whole stage"], stage.policies["none"]
    for in_flight, most in ((1, 5), (4, 65), (8, 85)):
        own, bound = stage.ours(in_flight, held(all_again, in_flight))
        share, least = (
            None if ns is None else 100 * ns / all_again.ns for ns in (own and own.ns, bound)
        )
        text = f"{in_flight} in flight, whole-stage recompute's peak: % of its extra compute"
        yield _verdict(text, share, most, least)
    for budget, most in ((80, 6), (60, 20)):
        kept = 4 * nothing.kept * budget // 100
        for available, what in (
            (kept + nothing.peak - nothing.kept, "the activations that saving everything keeps"),
            (held(nothing, 4) * budget // 100, "its peak, with gradients and workspace"),
        ):
            own, bound = stage.ours(4, available)
            text = f"4 in flight, {budget} % of {what}: % of a forward"
            yield _verdict(
                text,
                _percent_of_forward(stage, own and own.ns),
                most,
                _percent_of_forward(stage, bound),
            )


def _verdict(
    text: str, got: float | None, most: float, least: float | None = None
) -> dict[str, Any]:
    told = "does not fit" if got is None else f"{got:.1f}"
    proof = "" if least is None else f" (no regions take less than {least:.1f})"
    print(
        f"  {text}: {told}, at most {most}: {'holds' if got is not None and got <= most else 'DOES NOT HOLD'}{proof}"
    )
    return {
        "what": text,
        "got": None if got is None else round(got, 2),
        "at_most": most,
        "bound": least,
    }


# -- what is held


def _peaks(name: str, target: Target) -> Iterator[dict[str, Any]]:
    """The regions chosen for a model, run in this process."""
    stage = _whole(target, "flops", MICROBATCHES)
    print(
        f"\n{name}, run here, {len(stage.nodes)} nodes: activations and workspace at the peak, in bytes"
    )
    print(
        f"{'in flight':>9} {'budget':>8} {'regions':>7} {'extra':>8} {'expected':>12} {'measured':>12} {'error':>7} "
        f"{'allowed':>12}"
    )
    for in_flight in MEASURED_IN_FLIGHT:
        for budget in MEASURED_BUDGETS:
            available = held(stage.policies["none"], in_flight) * budget // 100
            own, _ = stage.ours(in_flight, available)
            if own is None:
                print(f"{in_flight:9} {budget:6} %    does not fit")
            else:
                row = _peak(target, stage, in_flight, own)
                print(f"{in_flight:9} {budget:6} % {_told(row)} {available:12,}", flush=True)
                yield {"model": name, "in_flight": in_flight, "budget_bytes": available, **row}


def _told(row: dict[str, Any]) -> str:
    expected, measured = row["expected_bytes"], row["measured_bytes"]
    figures = f"{expected:12,} {measured:12,} {expected / measured - 1:+7.2%}"
    return f"{row['regions']:7} {row['extra_percent']:6.1f} % {figures}"


def _peak(target: Target, stage: Stage, in_flight: int, choice: RegionChoice) -> dict[str, Any]:
    regions = [stage.nodes[start:stop] for start, stop in choice.regions]
    footprint = footprint_of(stage.ranges, stage.before, stage.nodes, regions)
    kept = footprint.activations.expected
    forward, backward = footprint.forward_peak.expected, footprint.backward_peak.expected
    return {
        "regions": len(regions),
        "extra_percent": _percent_of_forward(stage, choice.ns),
        "expected_bytes": max((in_flight - 1) * kept + forward, in_flight * kept + backward),
        "measured_bytes": _measured(target, in_flight, regions),
    }


def _measured(target: Target, in_flight: int, regions: Sequence[Sequence[str]]) -> int:
    """The highest sum of allocations while so many microbatches go forward, and then back, with gradients at hand."""
    options = options_for(target, k=1, microbatches=MICROBATCHES, schedule="gpipe", costs="flops")
    captured = capture_target(target, options, verify=False)
    assignment = {node.name: 0 for node in captured.module.graph.nodes if node.op != "get_attr"}
    (made,) = emit(captured.module, assignment, {0: regions})
    targets = split(target.targets, MICROBATCHES)[0]
    stage = EagerStage(
        made.module,
        gradient_inputs=made.gradient_inputs,
        buffers=made.buffers,
        random=made.random,
        loss=lambda outputs, _: target.trained_by(
            captured.capture.outputs.unflatten(outputs), targets
        ),
    )
    values = captured.capture.inputs.flatten(captured.sample)
    for parameter in target.model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        saved = [
            stage.forward(values, StreamKey(0, 0, microbatch))[1] for microbatch in range(in_flight)
        ]
        while saved:
            stage.backward(saved.pop(0), (), {})

    return highest(step)


if __name__ == "__main__":
    main()
