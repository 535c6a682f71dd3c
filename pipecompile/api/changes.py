"""The options of a plan with one thing changed: what `explain` solves again. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from pipecompile.ir.explanation import WhatIfKind
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.size import caps_by_rank
from pipecompile.report.memory import may_lack_memory

__all__ = ["ChangedOptions", "changes", "removals"]

GIB = 2**30


class ChangedOptions(NamedTuple):
    """Options that differ from a plan's in one thing, and what that is.

    The options are None where the change does not apply, for the `reason`.
    """

    kind: WhatIfKind
    text: str
    options: Options | None
    reason: str = ""


def changes(plan: Plan) -> Iterator[ChangedOptions]:
    """Yield what more of something would be, and other ways to decide: nothing is removed yet."""
    options = plan.options
    yield _more_memory(plan)
    yield _more_stages(plan)
    doubled = replace(options, microbatches=2 * plan.microbatches)
    yield ChangedOptions(
        "microbatches", f"{doubled.microbatches} microbatches, of half the size", doubled
    )
    if options.is_inference:
        yield ChangedOptions("schedule", "schedule searched", None, "forwards have one order")
    elif options.schedule == "search":
        yield ChangedOptions("schedule", "schedule searched", None, "it is searched already")
    elif options.stage_replicas is not None:
        why = "no search knows stages with several ranks"
        yield ChangedOptions("schedule", "schedule searched", None, why)
    else:
        yield ChangedOptions("schedule", "schedule searched", replace(options, schedule="search"))
    # The planner names another objective if it has found a cut by it with a shorter step.
    if plan.search.faster is not None:
        other = plan.search.faster.objective
        yield ChangedOptions("objective", f"objective {other}", replace(options, objective=other))


def _more_memory(plan: Plan) -> ChangedOptions:
    options, text = plan.options, "1 GiB more on each rank"
    if options.memory_bytes is None:
        return ChangedOptions("memory", text, None, "there is no cap")
    if not may_lack_memory(plan):
        return ChangedOptions("memory", text, None, "no rank lacks memory")
    caps = tuple(cap + GIB for cap in caps_by_rank(options.memory_bytes, plan.ranks))
    # A single cap stays a single one: the command that is printed says --memory once, as the user
    # did.
    more = caps[0] if isinstance(options.memory_bytes, int) else caps
    return ChangedOptions("memory", text, replace(options, memory_bytes=more))


def _more_stages(plan: Plan) -> ChangedOptions:
    """Return the change to one rank more, which has as many stages as the others."""
    options, k = plan.options, plan.k + plan.stages_per_rank
    text = f"k={k}, on {plan.ranks + 1} ranks"
    if options.layout is not None:
        return ChangedOptions("stages", text, None, "the layout has its own number of stages")
    if isinstance(options.memory_bytes, tuple):
        return ChangedOptions("stages", text, None, "the caps are listed for the ranks of the plan")
    if options.stage_replicas is not None:
        return ChangedOptions("stages", text, None, "each stage has its own number of ranks")
    return ChangedOptions("stages", text, replace(options, k=k))


def removals(plan: Plan) -> Iterator[ChangedOptions]:
    """Yield the options of a plan without each of the constraints that they put on its cut."""
    options = plan.options
    for node, stage in options.pin.items():
        # One at a time: removed together they would not tell which of them costs the time.
        rest = {name: other for name, other in options.pin.items() if name != node}
        yield ChangedOptions("pin", f"without pin {node}={stage}", replace(options, pin=rest))
    for index, names in enumerate(options.groups):
        others = (*options.groups[:index], *options.groups[index + 1 :])
        text = f"without group {','.join(names)}"
        yield ChangedOptions("group", text, replace(options, groups=others))
    if options.layout is not None:
        free = replace(options, layout=None, layout_format=None, layers=None)
        yield ChangedOptions("layout", "without the layout", free)
    if options.granularity in ("modules", "blocks"):
        text = "cut between operators"
        yield ChangedOptions("granularity", text, replace(options, granularity="operators"))
    if options.parameters_everywhere:
        text = "stages without parameters allowed"
        yield ChangedOptions("parameters", text, replace(options, parameters_everywhere=False))
