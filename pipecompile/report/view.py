"""A plan as a page: one HTML file with its timeline, what each rank holds and may, and what is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Timeline
from pipecompile.report.markup import bar, document, line
from pipecompile.report.svg import headline, timeline_svg
from pipecompile.report.text import (
    EXTRA,
    again_text,
    cap_text,
    extra_texts,
    form_texts,
    is_bounded,
    region_texts,
    size_text,
    stage_shares,
    time_text,
)

__all__ = ["plan_page"]

_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace")
_KEY = "".join(f'<i class="{kind}"></i>{kind}' for kind in _KINDS)


def plan_page(plan: Plan, timeline: Timeline) -> str:
    """The page; the same plan gives the same bytes."""
    title = headline(plan)
    body = [f"<h1>{escape(title)}</h1>", *_figures(plan), timeline_svg(plan, timeline)]
    return document(title, [*body, *_memory(plan), *_stages(plan), *_regions(plan), *_forms(plan)])


def _figures(plan: Plan) -> Iterator[str]:
    loads, search = plan.prediction.loads_ns, plan.search
    figures = {
        "step": time_text(plan.prediction.step_ns),
        "bubble": f"{plan.prediction.bubble:.1%}",
        "largest load / mean load": f"{max(loads) * len(loads) / max(sum(loads), 1):.3f}",
        "cut": f"{search.objective}, {'proven' if search.proven else 'not proven'} ({search.method})",
        "recompute": plan.options.recompute,
        "memory": cap_text(plan),
        "costs": plan.options.costs,
    }
    yield "<dl>"
    yield from (
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in figures.items()
    )
    yield "</dl>"


def _memory(plan: Plan) -> Iterator[str]:
    """Each rank by kind, as expected, beside its bound and its budget."""
    caps, memory = plan.options.caps(plan.ranks), plan.prediction.memory
    largest = max(rank.total.bound for rank in memory)
    whole = "the largest bound" if caps is None else "the rank's budget"
    yield "<h2>Memory of each rank at its peak</h2>"
    yield f'<p>Bars are bounds, as shares of {whole}. <span class="key">{_KEY}</span></p>\n<table>'
    yield line(
        "th", ["rank", "", *_KINDS, "expected", "bound", *["budget", "left"] * (caps is not None)]
    )
    for index, rank in enumerate(memory):
        bound, cap = rank.total.bound, None if caps is None else caps[index]
        kinds = {kind: getattr(rank, kind) for kind in _KINDS}
        filled = bar(
            [(kind, held.bound) for kind, held in kinds.items()], largest if cap is None else cap
        )
        sizes = [*(held.expected for held in kinds.values()), rank.total.expected, bound]
        yield line(
            "td",
            [
                str(index),
                filled,
                *map(size_text, [*sizes, *([] if cap is None else [cap, cap - bound])]),
            ],
        )
        for name, held in stage_shares(plan, index, _KINDS):
            yield line("td", [name, "", *map(size_text, held), *[""] * (1 if cap is None else 3)])
    yield "</table>"


def _stages(plan: Plan) -> Iterator[str]:
    yield "<h2>Stages, for one microbatch</h2>\n<table>"
    extra = [*EXTRA, *["at least"] * is_bounded(plan)]
    yield line(
        "th", ["stage", "rank", "nodes", "forward", "backward", "computed again", *extra, "sends"]
    )
    for index, (stage, rank) in enumerate(zip(plan.stages, plan.schedule.placement, strict=True)):
        modules = escape(", ".join(stage.modules))
        cells = [
            f"{index} <code>{modules}</code>",
            str(rank),
            str(len(stage.nodes)),
            *map(time_text, (stage.forward_ns, stage.backward_ns)),
            again_text(stage),
            *extra_texts(stage, bounded=is_bounded(plan)),
            size_text(sum(tensor.bytes for tensor in stage.outputs)) if stage.outputs else "",
        ]
        yield line("td", cells)
    yield "</table>"


def _regions(plan: Plan) -> Iterator[str]:
    """Regions by their first and their last node."""
    if not plan.regions:
        return
    yield "<h2>Regions that are computed again</h2>\n<table>"
    yield line("th", ["region", "stage", "nodes"])
    for index, stage in enumerate(plan.stages):
        for text, region in zip(region_texts(stage), stage.regions, strict=True):
            yield line("td", [f"<code>{escape(text)}</code>", str(index), str(len(region))])
    yield "</table>"


def _forms(plan: Plan) -> Iterator[str]:
    """Runs of nodes that save in other forms, by their first and their last node."""
    if not any(stage.saving for stage in plan.stages):
        return
    yield "<h2>Saved in other forms</h2>\n<table>"
    yield line("th", ["nodes", "stage", "extra forward", "extra backward"])
    for index, stage in enumerate(plan.stages):
        for text, run in zip(form_texts(stage), stage.saving, strict=True):
            times = map(time_text, (run.forward_ns, run.backward_ns))
            yield line("td", [f"<code>{escape(text)}</code>", str(index), *times])
    yield "</table>"
