"""What stages recompute and encode, in words. The summary and the page of a plan use these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from pipecompile.ir.duration import time_text
from pipecompile.ir.plan import Plan
from pipecompile.ir.plurals import counted
from pipecompile.ir.stage import Stage
from pipecompile.report.units import percent

__all__ = [
    "encoding_texts",
    "extra_time_header",
    "extra_time_texts",
    "has_recompute",
    "recompute_shares",
    "recompute_text",
    "region_texts",
]

_WHOLE = {"none": "nothing", "stage": "all", "except-last": "all but the last microbatch"}


def has_recompute(plan: Plan) -> bool:
    """Return whether any stage recomputes nodes or encodes saved tensors."""
    return any(stage.recompute != "none" or stage.encoded_runs for stage in plan.stages)


def recompute_shares(plan: Plan) -> dict[int, float]:
    """Return by stage the share of a backward in which regions are recomputed, if it has any."""
    return {
        # Regions are recomputed within the backward: 30 of a backward of 90 and these 30 is a
        # quarter.
        index: stage.recompute_ns / max(stage.backward_ns + stage.recompute_ns, 1)
        for index, stage in enumerate(plan.stages)
        # Whole stages recompute in actions of their own, which timelines draw as they are.
        if stage.regions
    }


def recompute_text(stage: Stage) -> str:
    """Return what a stage recomputes, and whether it encodes saved tensors."""
    encodings = ", encodings" if stage.encoded_runs else ""
    if stage.recompute != "regions":
        return f"{_WHOLE[stage.recompute]}{encodings}"
    # Regions may nest: a node in several of them counts once.
    regions, nodes = len(stage.regions), len(set(chain.from_iterable(stage.regions)))
    return f"{nodes} of {len(stage.nodes)} nodes in {counted(regions, 'region')}{encodings}"


def extra_time_header(plan: Plan) -> list[str]:
    """Return the names of the columns that `extra_time_texts` fills."""
    return ["extra time", "of forward", *["at least"] * _has_bound(plan)]


def extra_time_texts(plan: Plan, stage: Stage) -> list[str]:
    """Return the extra time of a microbatch, its share of the forward, and its lower bound.

    The bound is only there if it was searched for; all are empty for a stage without extra time.
    """
    if stage.recompute == "none" and not stage.encoded_runs:
        return [""] * len(extra_time_header(plan))
    times = [stage.extra_ns, *[stage.recompute_bound_ns] * _has_bound(plan)]
    extra, *bound = (time_text(time, plan.time_unit) for time in times)
    return [extra, percent(stage.extra_ns, max(stage.forward_ns, 1)), *bound]


def _has_bound(plan: Plan) -> bool:
    """Return whether the least extra time was searched for, so that there is a lower bound of
    it.
    """
    return plan.options.recompute == "auto"


def region_texts(stage: Stage) -> Iterator[str]:
    """Yield each region of a stage by its first and its last node."""
    return map(_ends, stage.regions)


def encoding_texts(stage: Stage) -> Iterator[str]:
    """Yield each run of nodes whose saved tensors are encoded, with the encodings."""
    for run in stage.encoded_runs:
        yield f"{_ends(run.nodes)} ({', '.join(run.encodings)})"


def _ends(nodes: Sequence[str]) -> str:
    return f"{nodes[0]} … {nodes[-1]}" if len(nodes) > 1 else nodes[0]
