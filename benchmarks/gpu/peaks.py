"""Allocator peaks of ranks against `expected` and `bound`, and the times of their actions.

Part `memory`: the ten models, each under several plans, one rank at a time.
Part `rank`: GPT-2 medium on four ranks, peaks and times.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any

from benchmarks.gpu.bench import Bench, warm_up
from benchmarks.gpu.cases import Case
from benchmarks.gpu.models import MODELS, gpt2_medium
from benchmarks.gpu.rows import Row
from benchmarks.gpu.single_rank import SingleRank, ranks_of
from benchmarks.gpu.subject import Subject, subject_of
from benchmarks.gpu.times import action_rows
from pipecompile.ir.plan import Plan
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.rank import neighbour_ranks

__all__ = ["memory_cases", "rank_cases"]

MICROBATCHES = 4
FACTORS = (1, 1.05, 1.1, 1.2, 1.5, 2)  # of a bound, until a rank runs within it


def memory_cases(bench: Bench) -> Iterator[Case]:
    """Yield the workspace of the libraries, then each model under all plans."""
    yield Case("library workspaces", lambda: _workspaces(bench))
    for name, factory in MODELS.items():
        yield Case(name, partial(_model_rows, bench, name, factory))


def _workspaces(bench: Bench) -> Iterator[Row]:
    """Yield what cuBLAS and cuDNN keep from their first kernels on, which no plan counts."""
    usage = bench.meter.usage(lambda: warm_up(bench.device))
    note = "cuBLAS and cuDNN, kept from their first kernels on; in no other row"
    yield Row("library workspaces", None, usage.kept, "bytes", note=note)


def _model_rows(bench: Bench, name: str, factory: Any) -> Iterator[Row]:
    warm_up(bench.device)
    subject = subject_of(bench, factory, microbatches=MICROBATCHES)
    for label, plan in _plans(subject):
        for rank, alone in enumerate(ranks_of(subject, plan)):
            yield from _peak_rows(bench, plan, rank, alone, f"{name}, {label}, rank {rank}")


def _plans(subject: Subject) -> Iterator[tuple[str, Plan]]:
    """Yield four plans for two ranks, which save, recompute and go backward in different ways.

    The caps of the third lie half way between what the ranks of the first two need.
    """
    options: dict[str, Any] = {"k": 2, "schedule": "1f1b", "optimizer": "adamw"}
    plain = subject.plan(**options)
    yield "plain", plain
    options["pin"] = plain.assignment
    whole = subject.plan(**options, recompute="stage")
    yield "stages recomputed", whole
    caps = []
    for most, least in zip(plain.prediction.memory, whole.prediction.memory, strict=True):
        caps.append((most.total.bound + min(most.total.bound, least.total.bound)) // 2)
    yield "regions recomputed", subject.plan(**options, recompute="auto", memory=caps)
    yield "split backward", subject.plan(k=2, schedule="zb-h1", optimizer="adam")


def _peak_rows(bench: Bench, plan: Plan, rank: int, alone: SingleRank, what: str) -> Iterator[Row]:
    """Yield the peak of two steps with the optimizer, beside what is expected and the bound.

    Expected bytes are those that are asked for. The bound holds if the steps run where the
    allocator may not take more. What libraries and NCCL keep is in it, but not in what is measured.
    """
    resident, total = alone.resident_bytes, plan.prediction.memory[rank].total
    optimizer = plan.options.optimizer or "sgd"
    usage = bench.meter.usage(lambda: alone.train(optimizer))
    peak, requested = resident + usage.peak, resident + usage.requested
    note = f"{peak:,} in blocks, reserved {resident + usage.reserved:,}"
    yield Row(what, total.expected, requested, "bytes", "expected", note)
    factor = _least_factor(bench, plan, rank, alone)
    note = "runs within it" if factor == 1 else f"DOES NOT HOLD, runs within {factor} of it"
    measured = peak if factor == 1 else factor * total.bound
    yield Row(what, total.bound, measured, "bytes", "bound", note)


def _least_factor(bench: Bench, plan: Plan, rank: int, alone: SingleRank) -> float:
    """Return the first of FACTORS of its bound within which a rank runs; infinity if none."""
    bound, rules = plan.prediction.memory[rank].total.bound, ALLOCATORS[plan.allocator]
    apart = rules.library_bytes + rules.peer_bytes * neighbour_ranks(plan.footprints(rank))
    for factor in FACTORS:
        left = int(factor * bound) - apart - alone.resident_bytes
        if bench.meter.runs_within(lambda: alone.train(plan.options.optimizer or "sgd"), left):
            return factor
        alone.clear()
    return inf


def rank_cases(bench: Bench) -> Iterator[Case]:
    """Yield the one case: GPT-2 medium on four ranks, each run alone."""
    yield Case("gpt2 medium", lambda: _gpt2_medium_rows(bench))


def _gpt2_medium_rows(bench: Bench) -> Iterator[Row]:
    warm_up(bench.device)
    subject = subject_of(bench, gpt2_medium, microbatches=min(8, bench.scale.batch))
    plan = subject.plan(k=4, schedule="1f1b", optimizer="adamw")
    for rank, alone in enumerate(ranks_of(subject, plan)):
        what = f"gpt2 medium, rank {rank}"
        yield from _peak_rows(bench, plan, rank, alone, what)
        yield from action_rows(what, plan.stages[alone.index], alone.action_ns(), bench.costs)
