"""The peak of a stage that is run in this process with chosen regions, beside the predicted one.

`benchmarks.recompute` prints these figures after its sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers

from benchmarks.memory_prediction import peak_allocation
from benchmarks.models import gpt2, unet
from benchmarks.recompute_stages import CostedStage, held_bytes, whole_model
from pipecompile.api.options import options_for
from pipecompile.codegen.stages import emit
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.graph.random_streams import StreamKey
from pipecompile.memory_model.stage import footprint_of
from pipecompile.recompute.choice import RegionChoice
from pipecompile.runtime.stage import EagerStage

__all__ = ["MODELS", "peaks"]

IN_FLIGHT = (1, 4)
CAPS = (100, 80, 60, 40)  # % of the peak without recompute
MICROBATCHES = 4


def small_resnet() -> dict[str, Any]:
    """Return ResNet-50 on images of 96 × 96.

    On smaller images some kernels take kernel workspace that the memory model does not know.
    """
    images = torch.randn(16, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    config = transformers.ResNetConfig(num_labels=10)  # type: ignore[call-arg]
    return {
        "model": transformers.ResNetForImageClassification(config),
        "sample_input": {"pixel_values": images, "labels": torch.arange(16) % 10},
    }


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "GPT-2, small": gpt2,
    "ResNet-50": small_resnet,
    "U-Net": unet,
}


def peaks(name: str) -> Iterator[dict[str, Any]]:
    """Print and yield the expected and measured peaks of one of `MODELS`, for each cap."""
    target = Target.of(MODELS[name](), name)
    stage = whole_model(target, "flops", MICROBATCHES)
    print(f"\n{name}, run here, {len(stage.nodes)} nodes:", end=" ")
    print("activations and workspace at the peak, in bytes")
    print(f"{'in flight':>9} {'cap':>8} {'regions':>7} {'extra':>8} {'expected':>12}", end=" ")
    print(f"{'measured':>12} {'error':>7} {'allowed':>12}")
    for in_flight in IN_FLIGHT:
        for percent in CAPS:
            available = held_bytes(stage.policies["none"], in_flight) * percent // 100
            choice, _ = stage.ours(in_flight, available)
            if choice is None:
                print(f"{in_flight:9} {percent:6} %    does not fit")
                continue
            row = _peak(target, stage, in_flight, choice)
            print(f"{in_flight:9} {percent:6} % {_cells(row)} {available:12,}", flush=True)
            yield {"model": name, "in_flight": in_flight, "cap_bytes": available, **row}


def _cells(row: dict[str, Any]) -> str:
    expected, measured = row["expected_bytes"], row["measured_bytes"]
    figures = f"{expected:12,} {measured:12,} {expected / measured - 1:+7.2%}"
    return f"{row['regions']:7} {row['extra_percent']:6.1f} % {figures}"


def _peak(
    target: Target, stage: CostedStage, in_flight: int, choice: RegionChoice
) -> dict[str, Any]:
    regions = [stage.nodes[start:stop] for start, stop in choice.regions]
    footprint = footprint_of(stage.live_ranges, stage.before, stage.nodes, regions)
    kept = footprint.activations.expected
    forward, backward = footprint.forward_peak.expected, footprint.backward_peak.expected
    return {
        "regions": len(regions),
        "extra_percent": round(100 * choice.ns / stage.forward_ns, 2),
        # The last forward runs beside the activations of the others, the first backward beside all.
        "expected_bytes": max((in_flight - 1) * kept + forward, in_flight * kept + backward),
        "measured_bytes": _measured(target, in_flight, regions),
    }


def _measured(target: Target, in_flight: int, regions: Sequence[Sequence[str]]) -> int:
    """Return the peak in bytes while so many microbatches go forward and then backward.

    All gradients exist before, so that they are no part of it.
    """
    options = options_for(target, k=1, microbatches=MICROBATCHES, schedule="gpipe", costs="flops")
    captured = capture_target(target, options, verify=False)
    assignment = {node.name: 0 for node in captured.module.graph.nodes if node.op != "get_attr"}
    (emitted,) = emit(captured.module, assignment, {0: regions})
    targets = target.cut_targets(MICROBATCHES)[0]
    stage = EagerStage(
        emitted.module,
        gradient_inputs=emitted.gradient_inputs,
        buffers=emitted.buffers,
        random=emitted.random,
        loss=lambda outputs, _: target.trained_by(
            captured.capture.outputs.unflatten(outputs), targets
        ),
    )
    values = captured.capture.inputs.flatten(captured.sample)
    for parameter in target.model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        saved = [stage.forward(values, StreamKey(0, 0, index))[1] for index in range(in_flight)]
        while saved:
            stage.backward(saved.pop(0), (), {})

    return peak_allocation(step)
