"""From a module to a running pipeline: capture, prove, cost, plan, cut. Reads top to bottom as the pipeline itself."""

from __future__ import annotations

import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

from torch import fx, nn

from pipecompile.api.capture import capture_target
from pipecompile.api.costs import Captured, comparable, cost_graph, measured_on
from pipecompile.api.links import Given, links_for
from pipecompile.api.measure import Stopwatch, corrected
from pipecompile.api.options import Choices, options_for
from pipecompile.api.pipeline import Pipeline, check_world
from pipecompile.api.plan import draft
from pipecompile.api.soundness import violations
from pipecompile.api.target import LossFunction, Target
from pipecompile.cost_models.device import load_device
from pipecompile.cost_models.table import CostFunction
from pipecompile.errors import (
    InfeasibleError,
    InputError,
    ScheduleError,
    StalePlanError,
    StaleProfileError,
)
from pipecompile.frontend.signature import arguments_of
from pipecompile.graph.autograd_context import cast_once
from pipecompile.ir.links import FREE, Links
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.serialization import decode, encode, read
from pipecompile.runtime import world

__all__ = ["check_current", "make_plan", "pipecompile", "staleness"]


def pipecompile(
    model: nn.Module,
    sample_input: Any,
    k: int = 4,
    *,
    loss_fn: LossFunction | None = None,
    sample_target: Any = None,
    costs: str | CostFunction = "measured",
    links: Given = None,
    self_check: bool = True,
    plan: Plan | str | Path | None = None,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Pipeline:
    """Turns `model` into a pipeline of `k` stages.

    `sample_input` is one minibatch: a tensor, a tuple of positional arguments or a mapping of keyword arguments, whose
    tensors have the batch as dimension 0. It is cut into microbatches. `loss_fn(output, target)` gives the scalar to
    train; without it the model's own `loss` output is used. With `sample_target` the costs include the loss. `costs`
    names a cost model (docs/cost-models.md), or is a function of a node and its call that gives nanoseconds. `links`
    say how ranks are connected: a file that `pipecompile links` wrote, or its content; without them transfers count as
    free. Without `self_check` the graph is not compared with the model. `plan` runs a committed plan instead of making
    one; k and costs are then the plan's, and choices must not be given. `choices` are listed in `Choices`:
    microbatches, schedule, memory and others.

    Under torchrun rank 0 plans for all. Raises InputError, CaptureError, InfeasibleError or StalePlanError.
    """
    unknown = sorted(choices.keys() - Choices.__annotations__.keys())
    if unknown:
        raise InputError(
            f"{unknown[0]!r} is no choice; there are {', '.join(Choices.__annotations__)}"
        )
    world.join()
    priced = costs if callable(costs) else None
    target = Target(model, arguments_of(model, sample_input), loss_fn, sample_target, costs=priced)
    target.check_values("a pipeline")
    if plan is None:
        named = "function" if callable(costs) else costs
        # Only rank 0 need have the files that costs and links name.
        chosen = world.shared(lambda: encode(options_for(target, k=k, costs=named, **choices)))
        options = decode(chosen, Options, origin="rank 0")
        connected = world.on_first(lambda: links_for(options, links)) or FREE
        captured = _captured(target, options, self_check=self_check)
        committed = _planned(target, options, captured, connected)
    else:
        if choices or links is not None:
            given = ", ".join(sorted(choices)) or "links"
            raise InputError(
                f"a committed plan has its choices already; leave out {given}, or plan anew without `plan`"
            )
        committed = plan if isinstance(plan, Plan) else read(plan, Plan)
        captured = _captured(target, committed.options, self_check=self_check)
        _check_sound(committed)
    check_current(committed, captured)
    check_world(committed)
    return Pipeline(committed, captured, target, seed=seed, self_check=self_check)


def _captured(target: Target, options: Options, *, self_check: bool) -> Captured:
    """The same graph on every rank; the first one proves it."""
    captured = world.on_first(lambda: capture_target(target, options, verify=self_check))
    method = world.shared(lambda: captured.capture.method.encode() if captured else b"").decode()
    return captured or capture_target(target, options, verify=False, method=method)


def _planned(target: Target, options: Options, captured: Captured, links: Links) -> Plan:
    """The same plan on every rank; the first one makes it."""
    if world.rank():
        assist(target, options, captured)
    made = world.shared(lambda: encode(make_plan(target, options, captured, links)))
    return decode(made, Plan, origin="rank 0")


def _check_sound(plan: Plan) -> None:
    found = violations(plan)
    if found:
        raise ScheduleError(f"the plan is not sound: {found[0]}")


def make_plan(target: Target, options: Options, captured: Captured, links: Links = FREE) -> Plan:
    """Costs the graph and plans it; where costs are measured, whole stages too, with the ranks that `assist`."""
    tensors = captured.capture.inputs.flatten(captured.sample)
    drafted = partial(
        draft,
        options=options,
        graph_digest=captured.digest,
        capture=captured.provenance,
        microbatch_shapes=[tuple(tensor.shape) for tensor in tensors],
        links=links,
    )
    stopwatch = _stopwatch(target, options, captured)
    try:
        graph = cost_graph(
            target, options.costs, options.microbatches, captured, instructions=options.instructions
        )
        made = drafted(graph) if stopwatch is None else corrected(graph, drafted, stopwatch)
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{_bound_by_casts(captured.module.graph)}") from None
    finally:
        if stopwatch is not None:
            stopwatch.dismiss()
    _say_if_too_large(made)
    return made


def _bound_by_casts(graph: fx.Graph) -> str:
    """Why readers of a weight share a stage, if autocast is the reason, and what to do."""
    found = [[node.name for node in members] for members in cast_once(graph.nodes)]
    sets = dict.fromkeys(
        ", ".join(names if len(names) < 5 else (*names[:3], "…", names[-1])) for names in found
    )
    if not sets:
        return ""
    return (
        "; autocast casts a weight once and sums its gradients as cast, so its readers share a stage "
        f"({'; '.join(islice(sets, 3))}): to part them, call them outside autocast, or enter it with "
        "cache_enabled=False"
    )


def _say_if_too_large(plan: Plan) -> None:
    """Standard error says so if ranks may not fit the named device, and no cap was given."""
    kind, _, device = plan.options.costs.partition(":")
    if kind != "roofline" or plan.options.memory_bytes is not None:
        return
    there = load_device(device).memory_bytes
    needed = max(rank.total.bound for rank in plan.prediction.memory)
    if needed > there:
        print(
            f"a rank may need {needed} bytes, but {device} has {there}: give memory={there} to have it cut otherwise",
            file=sys.stderr,
        )


def assist(target: Target, options: Options, captured: Captured) -> None:
    """What the other ranks do while rank 0 makes a plan: they measure their stages when it asks."""
    stopwatch = _stopwatch(target, options, captured)
    if stopwatch is not None:
        stopwatch.assist()


def _stopwatch(target: Target, options: Options, captured: Captured) -> Stopwatch | None:
    device = measured_on(options.costs, target)
    return None if device is None else Stopwatch(target, captured, device)


def check_current(plan: Plan, captured: Captured) -> None:
    """StalePlanError unless `plan` was made for this graph: its nodes, shapes and parameters."""
    if plan.fingerprint.graph != captured.digest:
        raise StalePlanError(
            f"the plan was made for another graph ({plan.fingerprint.graph[:12]}…) than this model has with these "
            f"inputs ({captured.digest[:12]}…); plan again, or bring back the model, its mode and its shapes"
        )
    fault = _misplaced(plan, captured.module.graph)
    if fault is not None:
        raise StalePlanError(f"the plan was edited: {fault}; plan again")


def _misplaced(plan: Plan, graph: fx.Graph) -> str | None:
    """What is wrong with the stages of `plan` for `graph`: they come from a file."""
    stages = plan.assignment
    groups: dict[str, int] = {}
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    if stages.keys() != {node.name for node in nodes}:
        return f"its nodes are not those of the model ({sorted(stages.keys() ^ {node.name for node in nodes})[0]})"
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op != "get_attr" and stages[source.name] > stages[node.name]:
                return f"{node.name} runs before {source.name}, which it needs"
        group = node.meta["group"]
        if group is not None and groups.setdefault(group, stages[node.name]) != stages[node.name]:
            return f"it separates the nodes of group {group}"
    return None


def staleness(plan: Plan, target: Target) -> list[str]:
    """Why `plan` is no longer what these options give for this model; empty if it is.

    Costs are compared where they are the same on every machine (`comparable`): measured ones differ from run to run,
    and a function or a file may not be at hand.
    """
    captured = capture_target(target, plan.options, verify=plan.capture.verified)
    try:
        check_current(plan, captured)
    except StalePlanError as error:
        return [str(error)]
    if not comparable(plan.options.costs):
        return []
    try:
        now = make_plan(target, plan.options, captured, plan.links)
    except StaleProfileError as error:
        return [str(error)]
    if now.fingerprint.costs != plan.fingerprint.costs:
        return [
            f"the costs changed ({plan.fingerprint.costs[:12]}… to {now.fingerprint.costs[:12]}…); plan again"
        ]
    return (
        []
        if encode(now) == encode(plan)
        else ["planning again gives another plan: the file was edited; plan again"]
    )
