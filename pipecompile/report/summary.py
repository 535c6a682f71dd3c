"""A plan for people: what `plan` and `show` print. Lines have at most 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import takewhile

from pipecompile.ir.duration import time_text
from pipecompile.ir.plan import Plan
from pipecompile.ir.plurals import counted
from pipecompile.ir.size import size_text
from pipecompile.ir.stage import Stage
from pipecompile.ir.stage_ranks import ranks_text
from pipecompile.report.inference import cache_header, cache_rows, load_text
from pipecompile.report.joint import others_table, settings_table
from pipecompile.report.memory import FIXED_NOTE, kinds_of, memory_bounds, stage_memory
from pipecompile.report.plan_head import plan_head
from pipecompile.report.recompute import (
    encoding_texts,
    extra_time_header,
    extra_time_texts,
    has_recompute,
    recompute_text,
    region_texts,
)
from pipecompile.report.tables import DrawTable, bar, plain_table
from pipecompile.report.units import percent

__all__ = ["summary"]

_MODULES_WIDTH = 40


def summary(plan: Plan, draw: DrawTable = plain_table) -> str:
    """Return the quality of a plan, its stages and ranks, memory, recompute, relays and ties."""
    parts = [
        plan_head(plan),
        _stages(plan, draw),
        _ranks(plan, draw),
        _memory(plan, draw),
        _kv_cache(plan, draw),
        _recompute(plan, draw),
        _by_stage("regions that are recomputed", region_texts, plan),
        _by_stage("encoded saved tensors", encoding_texts, plan),
        _by_stage("run once more by each stage that reads them", copy_texts, plan),
        _routes(plan),
        _tied(plan),
        settings_table(plan, draw),
        others_table(plan, draw),
    ]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part) + "\n"


def _stages(plan: Plan, draw: DrawTable) -> Iterator[str]:
    """Yield the stages for one microbatch; their ranks and what they recompute where there is
    any.
    """
    # With one stage a rank, the rank is the stage's own number: no column says it twice.
    recompute, shared = has_recompute(plan), plan.ranks != plan.k
    trains = not plan.options.is_inference
    header = ["stage", *["rank"] * shared, "modules", "nodes", "forward", *["backward"] * trains]
    rows = [[*header, *["recompute"] * recompute, "params", "sends"]]
    for index, (stage, ranks) in enumerate(
        zip(plan.stages, plan.schedule.stage_ranks, strict=True)
    ):
        times = [stage.forward_ns, *[stage.backward_ns] * trains]
        times += [stage.recompute_ns] * recompute
        sent = sum(tensor.bytes for tensor in stage.outputs)
        rows.append(
            [
                str(index),
                *[ranks_text(ranks)] * shared,
                _modules(stage),
                str(len(stage.nodes)),
                *(time_text(time, plan.time_unit) for time in times),
                size_text(sum(parameter.bytes for parameter in plan.parameters_of(index))),
                size_text(sent) if stage.outputs else "",
            ]
        )
    return draw(rows, {2 if shared else 1})


def _modules(stage: Stage) -> str:
    """Return the modules of a stage, or the first and the last of them where not all fit."""
    # A graph from elsewhere may have no modules.
    names = stage.modules or (stage.nodes[0], stage.nodes[-1])
    text = ", ".join(names)
    if len(text) > _MODULES_WIDTH:
        # transformer.h.0, transformer.h.1, …, transformer.ln_f  becomes  transformer.h.0 … ln_f
        first, last = names[0].split("."), names[-1].split(".")
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
        rest = ".".join(last[len(list(same)) :])
        text = f"{names[0]} … {rest}" if len(names) > 1 and rest else names[0]
    return text if len(text) <= _MODULES_WIDTH else f"…{text[1 - _MODULES_WIDTH :]}"


def _ranks(plan: Plan, draw: DrawTable) -> Iterator[str]:
    """Load, idle time and memory of each rank; caps where there are any."""
    # Loads belong to ranks, not to stages: where stages share a rank, only the sum keeps it busy.
    loads, bounds = plan.prediction.loads_ns, memory_bounds(plan)
    mean, largest = sum(loads) / len(loads), max(*loads, 1)
    has_cap = plan.options.memory_bytes is not None
    header = ["rank", "load", "", "of mean", "idle", "expected", "fixed", "bound"]
    rows = [[*header, *["cap", "left"] * has_cap]]
    for rank, (load, bound) in enumerate(zip(loads, bounds, strict=True)):
        idle = plan.prediction.idle[rank].total_ns
        sizes = [bound.expected, bound.fixed, bound.bound]
        if bound.cap is not None and bound.left is not None:
            sizes += [bound.cap, bound.left]
        rows.append(
            [
                str(rank),
                time_text(load, plan.time_unit),
                bar(load / largest, 8),
                percent(load, mean),
                percent(idle, max(plan.prediction.step_ns, 1)),
                *map(size_text, sizes),
            ]
        )
    yield from draw(rows, {2})
    yield f"load: {load_text(plan)}"
    yield FIXED_NOTE


def _memory(plan: Plan, draw: DrawTable) -> Iterator[str]:
    """Yield what each rank is expected to hold at its peak, by kind, and what of that its stages
    hold.
    """
    kinds = kinds_of(plan)
    rows = [["rank", *kinds, "expected"]]
    for rank, memory in enumerate(plan.prediction.memory):
        holders = [(str(rank), memory)]
        holders += [(f"stage {stage}", share) for stage, share in stage_memory(plan, rank)]
        for name, held in holders:
            sizes = [*(getattr(held, kind).expected for kind in kinds), held.total.expected]
            rows.append([name, *map(size_text, sizes)])
    return draw(rows, ())


def _kv_cache(plan: Plan, draw: DrawTable) -> Iterable[str]:
    """Return what the KV cache of each rank takes and holds; nothing of a plan that trains."""
    rows = list(cache_rows(plan)) if plan.options.is_inference else []
    return draw([cache_header(plan), *rows], ()) if rows else ()


def _recompute(plan: Plan, draw: DrawTable) -> Iterable[str]:
    """Return what each stage recomputes, and how long that takes; nothing if no stage does."""
    if not has_recompute(plan):
        return ()
    rows = [["stage", "recomputed", *extra_time_header(plan)]]
    for index, stage in enumerate(plan.stages):
        rows.append([str(index), recompute_text(stage), *extra_time_texts(plan, stage)])
    return draw(rows, {1})


def _by_stage(title: str, texts: Callable[[Stage], Iterable[str]], plan: Plan) -> list[str]:
    """Return the title, and a line for each stage that has any of what it says."""
    rows = [(index, ", ".join(texts(stage))) for index, stage in enumerate(plan.stages)]
    lines = [_fitted(f"  stage {index:>2}  {text}", 100) for index, text in rows if text]
    return [title, *lines] if lines else []


def copy_texts(stage: Stage) -> Iterator[str]:
    """Yield the nodes that a stage runs besides earlier ones, by the first and the last of them."""
    if stage.copies:
        first, last = stage.copies[0], stage.copies[-1]
        ends = first if first == last else f"{first} … {last}"
        yield f"{counted(len(stage.copies), 'node')}: {ends}"


def _routes(plan: Plan) -> list[str]:
    # A relayed tensor crosses several boundaries, with the same bytes at each.
    sizes = {tensor.name: tensor.bytes for stage in plan.stages for tensor in stage.outputs}
    lines = [
        f"  {_fitted(route.name, 50)}  {_stage_numbers(route.stages, ' → ')}  "
        f"{size_text(sizes.get(route.name, 0))}"
        for route in plan.routes
    ]
    return ["relayed through the stages between", *lines] if lines else []


def _tied(plan: Plan) -> list[str]:
    lines = []
    for parameter in plan.parameters:
        # Also one that has two names in one stage: nothing is summed, but files have both names.
        if parameter.aliases or len(parameter.stages) > 1:
            names = _fitted(f"  {parameter.name} = {', '.join(parameter.aliases)}", 60)
            stages = f"stages {_stage_numbers(parameter.stages, ', ')}, owner {parameter.owner}"
            lines.append(f"{names}  {size_text(parameter.bytes)}, {stages}")
    return ["tied parameters", *lines] if lines else []


def _stage_numbers(stages: Collection[int], between: str) -> str:
    return between.join(map(str, stages))


def _fitted(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
