"""The figures of a whole plan for people, each with its name: the head of a summary."""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.encodings import ENCODINGS
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.imbalance import imbalance_of
from pipecompile.ir.links import Link
from pipecompile.ir.plan import Ordering, Plan
from pipecompile.ir.plurals import counted
from pipecompile.ir.robustness import NoisyStep, Robustness
from pipecompile.ir.schedule import Kind
from pipecompile.ir.size import size_text
from pipecompile.ir.stage_ranks import has_stage_replicas
from pipecompile.report.inference import cache_text, latency_text
from pipecompile.report.joint import joint_text
from pipecompile.report.links import links_text, overhead_texts
from pipecompile.report.memory import ALLOCATOR_NAMES, cap_text
from pipecompile.report.replicas import replicas_text
from pipecompile.report.units import (
    costs_text,
    gap_text,
    objective_label,
    objective_text,
    variance_text,
)

__all__ = ["headline", "plan_head"]

_LAYOUT_WIDTH = 60
_GRANULARITIES = {
    "operators": "",
    "modules": ", cut between modules",
    "blocks": ", cut between blocks",
    "auto": ", blocks opened as needed",
}


def headline(plan: Plan) -> str:
    """Return a plan in a few words: schedule, stages, ranks, microbatches and replicas."""
    stages, ranks = counted(plan.k, "stage"), counted(plan.ranks, "rank")
    microbatches = counted(plan.microbatches, "microbatch")
    return f"{plan.schedule.name}: {stages} on {ranks}, {microbatches}{_replicas_text(plan)}"


def _replicas_text(plan: Plan) -> str:
    """Return how many replicas a plan, or each of its stages has, "" for one."""
    if has_stage_replicas(plan.schedule.placement):
        return f", stages on {' + '.join(str(len(ranks)) for ranks in plan.schedule.stage_ranks)}"
    shard = f" (shard {plan.options.shard})" if plan.options.shard else ""
    return f", {plan.replicas} replicas{shard}" if plan.replicas > 1 else ""


def plan_head(plan: Plan) -> Iterator[str]:
    """Yield the figures of the whole plan, each with its name."""
    loads, prediction, unit = plan.prediction.loads_ns, plan.prediction, plan.time_unit
    policy = plan.options.recompute
    recompute = "" if policy == "none" else f", recompute {policy}"
    cut = _GRANULARITIES[plan.options.granularity]
    yield (
        f"{counted(plan.k, 'stage')} on {counted(plan.ranks, 'rank')}, {plan.schedule.name}, "
        f"{counted(plan.microbatches, 'microbatch')}{_replicas_text(plan)}{recompute}{cut}"
    )
    if plan.capture.model:
        source = f" ({plan.capture.target})" if plan.capture.target else ""
        yield f"  model      {plan.capture.model}{source}"
    yield f"  step       {time_with_unit(prediction.step_ns, unit)}, bubble {prediction.bubble:.1%}"
    if plan.joint is not None:
        yield from (f"  {text}" for text in joint_text(plan, plan.joint))
    if plan.options.is_inference:
        yield f"  latency    {latency_text(plan)}"
    if plan.schedule.weight_versions != "synchronous":
        yield from _full_pipeline(plan)
    if plan.options.post_validation:
        yield "  updates    validated later; simulate says what a step takes in a row"
    variance = variance_text(loads, unit)
    yield (
        f"  imbalance  {imbalance_of(loads):.3f} (largest load / mean load), "
        f"variance of loads {variance}"
    )
    if plan.options.layout is not None:
        # A layout may be a file of many lines, and has one here.
        text = " ".join(plan.options.layout.split())
        shown = text if len(text) <= _LAYOUT_WIDTH else f"{text[:_LAYOUT_WIDTH]}…"
        yield f"  layout     {shown} ({plan.options.layout_format})"
    yield f"  objective  {_objective(plan)}"
    yield from _all_objectives(plan)
    yield from _ordering(plan)
    yield from _robustness(plan)
    yield f"  costs      {costs_text(plan.options.costs, unit)}"
    yield from (f"             {note}" for note in plan.cost_notes)
    yield f"  links      {links_text(plan.links)}"
    yield from (f"             {text}" for text in overhead_texts(plan.links))
    has_replicas = plan.replicas > 1 or has_stage_replicas(plan.schedule.placement)
    if has_replicas and not plan.options.is_inference:
        yield f"  replicas   {replicas_text(plan)}"
    yield (
        f"  memory     {cap_text(plan)}; predicted for {ALLOCATOR_NAMES[plan.allocator]}; "
        f"{_optimizer_text(plan)}"
    )
    if plan.options.is_inference:
        yield f"  KV cache   {cache_text(plan)}"
    may_recompute = plan.options.recompute == "auto" or plan.options.encodings
    if plan.options.memory_bytes is None and may_recompute:
        yield "  note       without a memory cap nothing is recomputed or encoded"
    yield from _encodings(plan)
    proof = "verified against the model" if plan.capture.verified else "unverified capture"
    method = "" if plan.capture.method == "recorded" else f"; {plan.capture.method}"
    yield f"  capture    {proof}{method}"
    yield from (f"             {note}" for note in plan.capture.notes)


def _full_pipeline(plan: Plan) -> Iterator[str]:
    """Yield what a minibatch takes where the pipeline is never emptied."""
    versions = plan.schedule.weight_versions
    yield f"  weights    {versions}; no flush: the step is that of one minibatch alone"
    minibatch_ns, loads = plan.prediction.minibatch_ns, plan.prediction.loads_ns
    if minibatch_ns is None:  # of a plan that was made before plans had it
        return
    minibatch = time_with_unit(minibatch_ns, plan.time_unit)
    # Loads of 8 and 10 and 4 microbatches, of which a minibatch takes 40: 18 · 4 / (2 · 40) =
    # 0.9.
    busy = sum(loads) * plan.microbatches / max(len(loads) * minibatch_ns, 1)
    # Loads are rounded down, each by less than one.
    is_held_up = minibatch_ns > (max(loads) + 1) * plan.microbatches
    waits = "messages are waited for"
    if has_stage_replicas(plan.schedule.placement):
        waits = "ranks wait for messages, or for other ranks of their stage"
    why = waits if is_held_up else "its slowest rank never waits"
    yield f"             in a full pipeline one takes {minibatch}, bubble {1 - busy:.1%}: {why}"


def _encodings(plan: Plan) -> Iterator[str]:
    """Yield the encodings that stages use, if any may be used."""
    used = {
        encoding
        for stage in plan.stages
        for run in stage.encoded_runs
        for encoding in run.encodings
    }
    if used or plan.options.encodings:
        exact = ", not exact" if "half" in used else ""
        names = [encoding for encoding in ENCODINGS if encoding in used]
        yield f"  encodings  {', '.join(names) or 'not needed'}{exact}"


def _optimizer_text(plan: Plan) -> str:
    if plan.options.is_inference:
        return "forward only"
    if plan.options.optimizer is None:
        return "no optimizer named"
    master = " and master weights" if plan.options.master_weights else ""
    if plan.options.optimizer_on_host:
        # Ranks of one machine share its memory.
        host = sum(stage.footprint.host.expected for stage in plan.stages)
        return f"{plan.options.optimizer}{master} on the host, {size_text(host)} for all ranks"
    return f"with the state of {plan.options.optimizer}{master}"


def _ordering(plan: Plan) -> Iterator[str]:
    """Yield what the search for a schedule gave, beside the best named schedule."""
    ordering = plan.ordering
    if ordering is None:
        return

    def text(time_ns: int) -> str:
        return time_with_unit(time_ns, plan.time_unit)

    searched, bound = text(ordering.searched_ns), text(ordering.bound_ns)
    best = min(ordering.named_ns, key=ordering.named_ns.__getitem__, default=None)
    if best is None:
        yield (
            f"  order      searched: {searched}, bound {bound}; no named schedule fits the memory"
        )
        yield from _recompute_hint(plan, ordering)
        return
    # 1 − 95 / 100 is a gain of 5 %, written as −5.0 %: the step is that much shorter.
    gain = 1 - ordering.searched_ns / max(ordering.named_ns[best], 1)
    noise = "" if ordering.is_in_plan else ", does not survive noise"
    change = (
        f"search {searched} ({-gain:+.1%}){noise}" if gain > 0 else "the search found none shorter"
    )
    yield f"  order      best named {best} {text(ordering.named_ns[best])}, {change}; bound {bound}"
    yield from _recompute_hint(plan, ordering)


def _recompute_hint(plan: Plan, ordering: Ordering) -> Iterator[str]:
    """Yield what recompute would give, where ranks wait because they have no memory for more."""
    if ordering.recomputed_ns is not None:
        change = ordering.recomputed_ns / max(plan.prediction.step_ns, 1) - 1
        step = time_with_unit(ordering.recomputed_ns, plan.time_unit)
        yield (
            f"  note       memory keeps the ranks waiting: recompute auto would shorten the "
            f"simulated step to {step} or less ({change:+.1%})"
        )


def _robustness(plan: Plan) -> Iterator[str]:
    """Yield what noise does to the step of the plan, and to the fastest of those compared: of
    several settings, and of its own.
    """
    own, unit = plan.robustness, plan.time_unit
    among = own if plan.joint is None else plan.joint.robustness or own
    if among is None:
        return
    of_which = " of all settings" if among is not own else ""
    yield f"  noise      {100 * among.noise:.3g}%: {_choice_text(among, of_which)}"
    yield f"             {_noisy_text(among.chosen, unit)}"
    if among.chosen != among.fastest:
        yield f"             fastest plan: {_noisy_text(among.fastest, unit)}"
    if own is not None and among is not own:
        yield f"             {_choice_text(own, ' of its setting')}"


def _choice_text(robustness: Robustness, of_which: str) -> str:
    """Return how a plan was chosen under noise among some."""
    number = robustness.candidates
    is_fastest = robustness.chosen == robustness.fastest
    rank = "the only plan" if number == 1 else f"least regret of {number} plans"
    fastest = ", also the fastest" if is_fastest and number > 1 else ""
    return f"{rank} within 2 % of the shortest step{of_which}{fastest}"


def _noisy_text(step: NoisyStep, unit: TimeUnit) -> str:
    nominal, p90, regret = (
        time_with_unit(each, unit) for each in (step.nominal_ns, step.p90_ns, step.regret_ns)
    )
    return f"step {nominal}, 90th percentile {p90}, regret {regret}"


def _objective(plan: Plan) -> str:
    search = plan.search
    value = objective_text(search.objective, search.value, plan.time_unit)
    if plan.options.layout is not None:
        # Among cuts that are all fixed there is one only: its bound would say nothing.
        return f"{objective_label(search.objective)} {value}, of the layout's cut"
    bound = objective_text(search.objective, search.bound, plan.time_unit)
    proof = "proven" if search.proven else "not proven"
    return (
        f"{objective_label(search.objective)} {value}, bound {bound}, gap {gap_text(search.gap)}, "
        f"{proof} ({search.method})"
    )


def _all_objectives(plan: Plan) -> Iterator[str]:
    """Yield what the cut is worth by each objective, and another objective if its cut is faster.

    The objectives add transfers to loads, and do not know that an order splits backwards; the table
    of ranks has the loads of the order.
    """
    values, unit = plan.search.values, plan.time_unit
    costs = []
    if "max_load_ns" in values:
        costs.append(f"max {objective_text('max-load', values['max_load_ns'], unit)}")
    if "sum_of_squares_ns2" in values:
        costs.append(f"Σ² {objective_text('variance', values['sum_of_squares_ns2'], unit)}")
    # Where transfers are free they add nothing, and the shorter name says the same.
    join = "or" if plan.search.objective == "throughput" else "+"
    load = "load" if plan.links.one == Link() else f"load {join} transfers"
    # Objectives count whole backwards, and where an order splits them the loads are of the
    # halves.
    kinds = {action.kind for row in plan.schedule.compute for action in row}
    load += ", backwards whole" if Kind.BACKWARD_INPUT in kinds else ""
    texts = [f"{load}: {', '.join(costs)}"] if costs else []
    if "step_ns" in values:
        texts.append(f"simulated step {time_with_unit(values['step_ns'], unit)}")
    if texts:
        yield f"             {'; '.join(texts)}"
    faster = plan.search.faster
    if faster is not None:
        change = faster.step_ns / max(plan.prediction.step_ns, 1) - 1
        step = f"the simulated step to {time_with_unit(faster.step_ns, unit)} ({change:+.1%})"
        yield f"  note       objective {faster.objective} would shorten {step}"
