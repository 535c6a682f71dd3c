"""From a module to a running pipeline: capture, prove, cost, plan, cut. Reads top to bottom as the pipeline itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from pipecompile.api.capturing import capture_target
from pipecompile.api.checking import violations
from pipecompile.api.correcting import corrected
from pipecompile.api.costing import Captured, comparable, cost_graph, cost_model, measured_on
from pipecompile.api.linking import Given, links_for
from pipecompile.api.measuring import Stopwatch
from pipecompile.api.ordering import placements
from pipecompile.api.pipeline import Pipeline, Program, check_world
from pipecompile.api.planning import draft
from pipecompile.api.target import LossFunction, Target
from pipecompile.cost_models.device import load_device
from pipecompile.cost_models.table import CostFunction
from pipecompile.errors import InputError, ScheduleError, StalePlanError, StaleProfileError
from pipecompile.frontend.captured import batch_size
from pipecompile.frontend.signature import arguments_of
from pipecompile.ir.links import FREE, Links
from pipecompile.ir.optimizer import OPTIMIZERS
from pipecompile.ir.plan import GRANULARITIES, Granularity, Options, Plan
from pipecompile.ir.serde import decode, encode, read
from pipecompile.ir.size import parse_bytes
from pipecompile.runtime import world
from pipecompile.schedule.placement import SHAPES

__all__ = ["check_current", "make_plan", "options_for", "pipecompile", "staleness"]


def pipecompile(
    model: nn.Module,
    sample_input: Any,
    k: int = 4,
    *,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    placement: str | None = None,
    objective: str = "variance",
    memory: int | str | None = None,
    optimizer: str | None = None,
    master_weights: bool = False,
    costs: str | CostFunction = "measured",
    links: Given = None,
    loss_fn: LossFunction | None = None,
    recompute: str = "none",
    pin: Mapping[str, int] | None = None,
    groups: Iterable[Iterable[str]] = (),
    parameters_everywhere: bool = False,
    granularity: str = "operators",
    leaf: Iterable[str] = (),
    self_check: bool = True,
    sample_target: Any = None,
    plan: Plan | str | Path | None = None,
    seed: int = 0,
) -> Pipeline:
    """Turns `model` into a pipeline of `k` stages.

    `sample_input` is one minibatch: a tensor, a tuple of positional arguments or a mapping of keyword arguments, whose
    tensors have the batch as dimension 0. It is cut into `microbatches` (default k). `loss_fn(output, target)` gives
    the scalar to train; without it the model's own `loss` output is used. `schedule` is a named one (see
    docs/schedules.md) or "search"; `stages_per_rank` and `placement` (linear, loop or v) default to what it needs, and
    a search with several stages a rank tries all placements. `memory` caps each rank ("16GiB", or bytes). `optimizer`
    (sgd, momentum, rmsprop, adam, adamw or adafactor) counts its state, `master_weights` its float32 copies of
    parameters of fewer bits. `recompute="stage"` runs each stage's forward again before its backward instead of
    keeping activations. `pin` fixes the stage of nodes, `groups` keeps nodes or modules together, and with
    `parameters_everywhere` each stage has a node with parameters. `granularity` is what the model is cut between:
    operators, modules, blocks, or auto (blocks, opened where balance or memory needs it). `leaf` names modules, by path
    or class, that are one node each; without `self_check` the graph is not compared with the model. With
    `sample_target` the costs include the loss. `costs` names a cost model (docs/cost-models.md), or is a function of a
    node and its call that gives nanoseconds. `links` say how ranks are connected: a file that `pipecompile links`
    wrote, or its content; without them transfers count as free. `plan` runs a committed plan instead of making one; all
    other options are then the plan's.

    Under torchrun rank 0 plans for all. Raises InputError, CaptureError, InfeasibleError or StalePlanError.
    """
    world.join()
    priced = costs if callable(costs) else None
    target = Target(model, arguments_of(model, sample_input), loss_fn, sample_target, costs=priced)
    target.check_values("a pipeline")
    if plan is not None:
        committed = plan if isinstance(plan, Plan) else read(plan, Plan)
        options = committed.options
    else:
        chosen = partial(
            options_for,
            target,
            k=k,
            microbatches=microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            placement=placement,
            objective=objective,
            memory=memory,
            optimizer=optimizer,
            master_weights=master_weights,
            costs="function" if callable(costs) else costs,
            recompute=recompute,
            pin=pin,
            groups=groups,
            parameters_everywhere=parameters_everywhere,
            granularity=granularity,
            leaf=leaf,
        )
        # Only rank 0 need have the files that costs and links name.
        options = decode(world.shared(lambda: encode(chosen())), Options, origin="rank 0")
        connected = world.on_first(lambda: links_for(options, links)) or FREE
    captured = world.on_first(lambda: capture_target(target, options, verify=self_check))
    method = world.shared(lambda: captured.capture.method.encode() if captured else b"").decode()
    if captured is None:
        captured = capture_target(target, options, verify=False, method=method)
    if plan is not None:
        check_current(committed, captured)
        found = violations(committed)
        if found:
            raise ScheduleError(f"the plan is not sound: {found[0]}")
    else:
        if world.rank():
            assist(target, options, captured)
        made = world.shared(lambda: encode(make_plan(target, options, captured, connected)))
        committed = decode(made, Plan, origin="rank 0")
        check_current(committed, captured)
    check_world(committed)
    program = Program(captured.capture, captured.module, committed.assignment)
    return Pipeline(committed, program, target, captured.sample, seed)


def options_for(
    target: Target,
    *,
    k: int,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    placement: str | None = None,
    objective: str = "variance",
    memory: int | str | None = None,
    optimizer: str | None = None,
    master_weights: bool = False,
    costs: str = "measured",
    recompute: str = "none",
    pin: Mapping[str, int] | None = None,
    groups: Iterable[Iterable[str]] = (),
    parameters_everywhere: bool = False,
    granularity: str = "operators",
    leaf: Iterable[str] = (),
) -> Options:
    """The options of a plan, checked: InputError names what was given and what there is."""
    if k < 1:
        raise InputError(f"k={k}, but a pipeline has at least one stage")
    cost_model(costs, target.costs)
    _one_of("recompute", recompute, ("none", "stage"))
    _one_of("granularity", granularity, GRANULARITIES)
    if stages_per_rank is not None and stages_per_rank < 1:
        raise InputError(f"stages_per_rank={stages_per_rank}, but a rank has at least one stage")
    if placement is not None:
        _one_of("placement", placement, SHAPES)
    owner = "optimizer" if optimizer else "the target's optimizer"
    optimizer = optimizer or target.optimizer
    if optimizer is not None:
        _one_of(owner, optimizer, OPTIMIZERS)
    elif master_weights:
        raise InputError(f"master weights are kept for an optimizer; name one of {', '.join(OPTIMIZERS)}")
    options = Options(
        k=k,
        microbatches=_microbatches(target, k if microbatches is None else microbatches),
        schedule=schedule,
        objective=objective,
        recompute="stage" if recompute == "stage" else "none",
        memory_bytes=None if memory is None else parse_bytes(memory),
        optimizer=optimizer,
        master_weights=master_weights,
        costs=costs,
        pin=dict(pin or {}),
        groups=tuple(tuple(names) for names in groups),
        parameters_everywhere=parameters_everywhere,
        granularity=cast(Granularity, granularity),
        leaf=tuple(leaf),
        stages_per_rank=stages_per_rank,
        placement=cast(Literal["linear", "loop", "v"] | None, placement),
    )
    placements(options)  # refuses what does not go together before anything is captured
    return options


def _one_of(what: str, given: str, known: Iterable[str]) -> None:
    if given not in known:
        raise InputError(f"{what}={given!r} is not known; choose one of {', '.join(known)}")


def _microbatches(target: Target, microbatches: int) -> int:
    leaves = torch.utils._pytree.tree_leaves((target.call.args, target.call.kwargs))
    batch = batch_size([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    if microbatches < 1 or batch % microbatches:
        fitting = [str(number) for number in range(1, batch + 1) if batch % number == 0]
        raise InputError(
            f"a batch of {batch} cannot be cut into {microbatches} microbatches of one size; "
            f"choose microbatches from {', '.join(fitting)}, or another batch (microbatches is k unless given)"
        )
    return microbatches


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
        graph = cost_graph(target, options.costs, options.microbatches, captured)
        made = drafted(graph) if stopwatch is None else corrected(graph, drafted, stopwatch)
    finally:
        if stopwatch is not None:
            stopwatch.dismiss()
    _say_if_too_large(made)
    return made


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
        return [f"the costs changed ({plan.fingerprint.costs[:12]}… to {now.fingerprint.costs[:12]}…); plan again"]
    return [] if encode(now) == encode(plan) else ["planning again gives another plan: the file was edited; plan again"]
