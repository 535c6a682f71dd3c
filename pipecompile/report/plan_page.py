"""A plan as a page: its timeline, the memory and load of each rank, and what stages recompute.

Beside it a run that was recorded of it, and what differs from another plan, if they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.imbalance import imbalance_of
from pipecompile.ir.plan import Plan
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Timeline
from pipecompile.ir.size import size_text
from pipecompile.ir.stage_ranks import ranks_text, stages_on
from pipecompile.report.front import front_chart
from pipecompile.report.inference import (
    cache_header,
    cache_rows,
    cache_text,
    latency_text,
    load_text,
)
from pipecompile.report.memory import (
    ALLOCATOR_NAMES,
    FIXED_NOTE,
    MemoryBound,
    cap_text,
    kinds_of,
    memory_bounds,
    stage_memory,
)
from pipecompile.report.model_blocks import stage_rows
from pipecompile.report.page_parts import comparison_part, difference_part
from pipecompile.report.plan_head import headline
from pipecompile.report.recompute import (
    encoding_texts,
    extra_time_header,
    extra_time_texts,
    has_recompute,
    recompute_shares,
    recompute_text,
    region_texts,
)
from pipecompile.report.run_comparison import RunComparison
from pipecompile.report.templates import page
from pipecompile.report.time_charts import NamedTimeline, chart_data, kinds_drawn, memory_rows
from pipecompile.report.units import costs_text, percent

__all__ = ["OtherPlan", "plan_page"]


@dataclass(frozen=True)
class OtherPlan:
    """A plan that the page's plan is compared with, such as an older one, by the name of its
    file.
    """

    name: str
    plan: Plan
    timeline: Timeline


@dataclass(frozen=True)
class _TableRow:
    """A row of a table; one that `is_part` belongs to the row above it."""

    cells: Sequence[object]
    is_part: bool = False


@dataclass(frozen=True)
class _PageTable:
    """A table; in the columns `text_columns` are words rather than numbers."""

    header: Sequence[str]
    rows: Sequence[_TableRow]
    text_columns: Sequence[int] = (0,)


@dataclass(frozen=True)
class _RankBars:
    """The two bars of a rank: its bound by kind, and its load by what it runs."""

    memory: MemoryBound
    parts: Sequence[tuple[str, int]]
    times: Sequence[tuple[str, int]]
    load: int
    of_mean: str
    idle: str


def plan_page(
    plan: Plan,
    timeline: Timeline,
    comparison: RunComparison | None = None,
    other: OtherPlan | None = None,
) -> str:
    """Return the page as HTML; the same values give the same text.

    With a `comparison` all charts have the predicted times that it has: nanoseconds.
    """
    # All bars of a chart have one scale, so that ranks can be compared with each other and a cap.
    loads, bounds = plan.prediction.loads_ns, memory_bounds(plan)
    scale = _memory_scale(bounds)
    kinds = [kind for kind in RankMemory.__struct_fields__ if kind in kinds_of(plan)]
    target = f"memory predicted for {ALLOCATOR_NAMES[plan.allocator]}"
    # A run is measured in seconds: relative units are converted, so that both fit one axis.
    time_unit = plan.time_unit if comparison is None else "ns"
    timelines = list(_timelines(plan, timeline, comparison, other))
    peaks = _measured_peaks(plan, comparison)
    held_scale = _held_scale(bounds, scale)
    held = memory_rows(plan, timelines[0].timeline, kinds, bounds, peaks) | {"scale": held_scale}
    return page(
        "plan.html",
        time_unit=plan.time_unit,
        title=_title(plan),
        subtitle=f"{headline(plan)}; {target}",
        figures=list(_figures(plan)),
        timelines=[each.name for each in timelines],
        kinds_drawn=kinds_drawn(timelines),
        is_interleaved=plan.stages_per_rank > 1,
        chart_data=chart_data(timelines, held, time_unit),
        has_measured_peaks=any(peak is not None for peak in peaks),
        stage_rows=stage_rows(plan),
        front=front_chart(plan),
        has_recompute=has_recompute(plan),
        comparison=None if comparison is None else comparison_part(comparison),
        difference=None if other is None else difference_part(plan, other.plan, other.name),
        kinds=[*kinds, "fixed"],
        has_cap=any(bound.cap is not None and bound.cap <= scale for bound in bounds),
        ranks=list(_ranks(plan, kinds, bounds)),
        memory_scale=scale,
        held_scale=held_scale,
        has_cap_beyond=any(bound.cap is not None and bound.cap > scale for bound in bounds),
        largest_load=max(loads),
        mean_load=sum(loads) // len(loads),
        load_kinds=_load_kinds(plan),
        load_text=load_text(plan),
        cache=_cache(plan),
        fixed_note=FIXED_NOTE,
        memory=_memory(plan, kinds),
        stages=_stages(plan),
        regions=list(_regions(plan)),
        encodings=list(_encodings(plan)),
    )


def _load_kinds(plan: Plan) -> list[str]:
    recompute, trains = has_recompute(plan), not plan.options.is_inference
    return ["forward", *["recompute"] * recompute, *["backward"] * trains]


def _timelines(
    plan: Plan, timeline: Timeline, comparison: RunComparison | None, other: OtherPlan | None
) -> Iterator[NamedTimeline]:
    """Yield the steps that are drawn to one scale of time, the predicted one first."""
    predicted = timeline if comparison is None else comparison.predicted
    yield NamedTimeline("predicted", predicted, recompute_shares(plan))
    if comparison is not None:
        # Where in a recorded backward regions were recomputed is not known.
        name = f"measured, step {comparison.typical.number}"
        yield NamedTimeline(name, comparison.typical.timeline(), {})
    # Units of `flops` that a run has turned into time are not those of another plan.
    units = {plan.time_unit, "ns" if comparison else plan.time_unit}
    if other is not None and units == {other.plan.time_unit}:
        yield NamedTimeline(other.name, other.timeline, recompute_shares(other.plan))


def _measured_peaks(plan: Plan, comparison: RunComparison | None) -> list[int | None]:
    if comparison is None:
        return [None] * plan.ranks
    return [rank.peak_bytes for rank in comparison.ranks]


def _title(plan: Plan) -> str:
    """Return the target of the command line, and the class of the model."""
    names = [plan.capture.target, plan.capture.model]
    return ": ".join(filter(None, names)) or "Plan"


def _figures(plan: Plan) -> Iterator[tuple[str, str]]:
    loads, search = plan.prediction.loads_ns, plan.search
    proof = f"{'proven' if search.proven else 'not proven'} ({search.method})"
    if plan.options.layout is not None:
        proof = "of the layout"  # nothing was searched, so there is nothing to prove
    yield "step", time_with_unit(plan.prediction.step_ns, plan.time_unit)
    yield "bubble", f"{plan.prediction.bubble:.1%}"
    if plan.options.is_inference:
        yield "latency", latency_text(plan)
        yield "KV cache", cache_text(plan)
    yield "largest load / mean load", f"{imbalance_of(loads):.3f}"
    yield "cut", f"{search.objective}, {proof}"
    if plan.options.recompute != "none":
        yield "recompute", plan.options.recompute
    yield "memory", cap_text(plan)
    if plan.options.optimizer is not None:
        yield "optimizer", plan.options.optimizer
    yield "costs", costs_text(plan.options.costs, plan.time_unit)


def _ranks(plan: Plan, kinds: Sequence[str], bounds: Sequence[MemoryBound]) -> Iterator[_RankBars]:
    loads, step_ns = plan.prediction.loads_ns, max(plan.prediction.step_ns, 1)
    for rank, (memory, bound) in enumerate(zip(plan.prediction.memory, bounds, strict=True)):
        # The fixed part of a bound is counted as workspace: here it is a part of its own.
        sizes = {kind: getattr(memory, kind).bound for kind in kinds}
        if "workspace" in sizes:
            sizes["workspace"] -= bound.fixed
        yield _RankBars(
            memory=bound,
            parts=[*sizes.items(), ("fixed", bound.fixed)],
            times=_times(plan, rank),
            load=loads[rank],
            of_mean=percent(loads[rank] * len(loads), sum(loads)),
            idle=percent(plan.prediction.idle[rank].total_ns, step_ns),
        )


def _memory_scale(bounds: Sequence[MemoryBound]) -> int:
    """Return the bytes that the whole width of the chart stands for.

    It is the largest bound, or a cap a little above that. With a cap of 80 GiB bars of 1 GiB would
    vanish: such a cap is marked at the edge.
    """
    largest = max(bound.bound for bound in bounds)
    # Bounds of 10 GiB with a cap of 12: the chart is 12 wide, and the cap a line in it. With a
    # cap of 80 it is 10 wide.
    near = [bound.cap for bound in bounds if bound.cap is not None and bound.cap <= 1.5 * largest]
    return max(largest, *near) if near else largest


def _held_scale(bounds: Sequence[MemoryBound], scale: int) -> int:
    """Return the bytes that a row of the chart over time is high: as in the chart of bounds, but
    for a small model. Beside what a GPU takes for any model it would vanish.
    """
    # A model that holds 0.2 GiB, with a bound of 1.2 GiB: rows are 0.25 GiB high.
    largest = max(bound.expected for bound in bounds)
    return scale if scale <= 4 * largest else largest * 5 // 4


def _times(plan: Plan, rank: int) -> list[tuple[str, int]]:
    """Return what a rank runs for one microbatch, by kind."""
    stages = [plan.stages[index] for index in stages_on(plan.schedule.placement, rank)]
    forward = sum(stage.forward_ns for stage in stages)
    extra = sum(stage.extra_ns for stage in stages)
    if plan.options.is_inference:
        return [("forward", plan.prediction.loads_ns[rank])]
    # What a microbatch takes besides is backward: its two halves may take longer than the whole.
    backward = max(plan.prediction.loads_ns[rank] - forward - extra, 0)
    return [("forward", forward), ("recompute", extra), ("backward", backward)]


def _memory(plan: Plan, kinds: Sequence[str]) -> _PageTable:
    """Return what is expected of each rank by kind, and of each stage of a rank that has
    several.
    """
    rows = []
    for rank, memory in enumerate(plan.prediction.memory):
        rows.append(_memory_row(f"rank {rank}", memory, kinds))
        for stage, share in stage_memory(plan, rank):
            rows.append(_memory_row(f"stage {stage}", share, kinds, is_part=True))
    return _PageTable(["", *kinds, "expected"], rows)


def _memory_row(
    name: str, memory: RankMemory, kinds: Sequence[str], *, is_part: bool = False
) -> _TableRow:
    sizes = [*(getattr(memory, kind).expected for kind in kinds), memory.total.expected]
    return _TableRow([name, *map(size_text, sizes)], is_part)


def _cache(plan: Plan) -> _PageTable:
    """Return what the KV cache of each rank takes and holds; no rows of a plan that trains."""
    rows = cache_rows(plan) if plan.options.is_inference else ()
    return _PageTable(cache_header(plan), list(map(_TableRow, rows)))


def _stages(plan: Plan) -> _PageTable:
    """Return the table of stages: their modules, times and sizes, and what they recompute if any
    does.
    """
    recompute, shared = has_recompute(plan), plan.ranks != plan.k
    extra = ["recomputed", *extra_time_header(plan)] if recompute else []
    trains = not plan.options.is_inference
    names = [*["rank"] * shared, "nodes", "forward", *["backward"] * trains, *extra]
    header = ["stage", "modules", *names, "params", "sends"]
    rows = []
    for index, (stage, ranks) in enumerate(
        zip(plan.stages, plan.schedule.stage_ranks, strict=True)
    ):
        sent = sum(tensor.bytes for tensor in stage.outputs)
        directions = [stage.forward_ns, *[stage.backward_ns] * trains]
        times = [time_text(time, plan.time_unit) for time in directions]
        recomputed = [recompute_text(stage), *extra_time_texts(plan, stage)] if recompute else []
        rows.append(
            _TableRow(
                [
                    index,
                    ", ".join(stage.modules),
                    *[ranks_text(ranks)] * shared,
                    len(stage.nodes),
                    *times,
                    *recomputed,
                    size_text(sum(parameter.bytes for parameter in plan.parameters_of(index))),
                    size_text(sent) if stage.outputs else "",
                ]
            )
        )
    words = {"modules", "recomputed"}
    text_columns = [column for column, name in enumerate(header) if name in words]
    return _PageTable(header, rows, text_columns)


def _regions(plan: Plan) -> Iterator[_TableRow]:
    for index, stage in enumerate(plan.stages):
        for text, region in zip(region_texts(stage), stage.regions, strict=True):
            yield _TableRow([text, index, len(region)])


def _encodings(plan: Plan) -> Iterator[_TableRow]:
    for index, stage in enumerate(plan.stages):
        for text, run in zip(encoding_texts(stage), stage.encoded_runs, strict=True):
            times = [time_text(time, plan.time_unit) for time in (run.forward_ns, run.backward_ns)]
            yield _TableRow([text, index, *times])
