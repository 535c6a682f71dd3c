"""Whole stages timed as their rank runs them, against the plan.

The plan has the sum of what its nodes take, by the device's roofline or as each was measured alone.
What stages take beyond that is what `profiling/stage_correction.py` corrects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import Case
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.rows import Row
from benchmarks.gpu.subject import subject_of
from pipecompile.ir.schedule import Kind
from pipecompile.ir.stage import Stage
from pipecompile.training.stage_timer import StageTimer

__all__ = ["action_rows", "costs_name", "time_cases"]

NAMES = ("gpt2", "llama", "vit", "resnet")
MICROBATCHES = 4


def time_cases(bench: Bench) -> Iterator[Case]:
    """Yield each model under costs of the roofline, and then under measured ones."""
    for name in NAMES:
        for costs in (bench.costs, f"measured:{bench.device.type}"):
            yield Case(f"{name}, {costs}", partial(_rows, bench, name, MODELS[name], costs))


def _rows(bench: Bench, name: str, factory: Any, costs: str) -> Iterator[Row]:
    subject = subject_of(bench, factory, microbatches=MICROBATCHES, costs=costs)
    plan = subject.plan(k=2, schedule="1f1b")
    times = StageTimer(subject.target, subject.captured, bench.device)(plan)
    for index, (stage, measured) in enumerate(zip(plan.stages, times, strict=True)):
        yield from action_rows(f"{name}, stage {index}", stage, measured, costs)


def action_rows(what: str, stage: Stage, measured: Mapping[Kind, int], costs: str) -> Iterator[Row]:
    """Yield the time of each kind of action of a stage for one microbatch."""
    predicted = {
        Kind.FORWARD: stage.forward_ns,
        Kind.BACKWARD: stage.backward_ns,
        Kind.BACKWARD_INPUT: stage.backward_input_ns,
        Kind.BACKWARD_WEIGHT: stage.backward_weight_ns,
        Kind.RECOMPUTE: stage.recompute_ns,
    }
    for kind, ns in measured.items():
        if kind in predicted:
            what_kind = f"{what}, {kind.name.lower()}"
            yield Row(what_kind, predicted[kind], ns, "ns", costs_name(costs))


def costs_name(costs: str) -> str:
    """Return how rows name these costs: a device file of this run is no name to quote."""
    kind, _, place = costs.partition(":")
    return f"{kind}:fitted" if Path(place).is_absolute() else costs
