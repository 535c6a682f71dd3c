"""From a cost graph and options to a plan. Needs no PyTorch, and gives the same bytes for the same input."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import msgspec

from pipecompile.errors import InfeasibleError, InputError, PipecompileError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.memory import Layout, buffers, floors, rank_memory
from pipecompile.ir.plan import (
    Boundary,
    Faster,
    Fingerprint,
    Link,
    Options,
    OwnedParameter,
    Plan,
    Prediction,
    Route,
    Stage,
)
from pipecompile.ir.schedule import Schedule
from pipecompile.ir.serde import encode
from pipecompile.schedule.check import check as check_schedule
from pipecompile.schedule.lower import lower
from pipecompile.schedule.named import generate, in_flight
from pipecompile.schedule.simulate import simulate
from pipecompile.schedule.stages import activation_caps, problem_of_stages

if TYPE_CHECKING:
    from pipecompile.partition.problem import Candidate, Problem
    from pipecompile.partition.result import Partition

__all__ = [
    "block_of",
    "costs_digest",
    "draft",
    "over_limits",
    "problem_of",
    "schedule_for",
    "step_ns",
    "sums_in_order",
    "violations",
]

OBJECTIVES = ("variance", "max-load", "step-time")
OTHERS_SECONDS = 0.5  # of work on each objective that was not asked for


def draft(
    graph: CostGraph,
    options: Options,
    *,
    graph_digest: str,
    verified: bool,
    microbatch_shapes: Sequence[tuple[int, ...]],
    link: Link | None = None,
) -> Plan:
    """The plan for `graph` under `options`; InfeasibleError says which constraint cannot be met.

    `microbatch_shapes` are those of the model's input tensors. Links default to free ones: a transfer between local
    stages costs nothing that is known before it is measured.
    """
    link = link or Link()
    partition = _partition(graph, options, link)
    stages = _stages(graph, partition.assignment, options)
    schedule = schedule_for(options.schedule, stages, link, options.microbatches, options.recompute == "stage")
    return Plan(
        fingerprint=Fingerprint(graph=graph_digest, costs=costs_digest(graph)),
        options=options,
        verified=verified,
        k=options.k,
        ranks=schedule.ranks,
        stages_per_rank=1,
        replicas=1,
        microbatches=options.microbatches,
        microbatch_shapes=tuple(microbatch_shapes),
        link=link,
        stages=stages,
        routes=tuple(_routes(graph, partition.assignment)),
        parameters=tuple(_owners(graph, stages)),
        schedule=schedule,
        prediction=_prediction(stages, schedule, link, options.memory_bytes),
        search=partition.search,
    )


def _partition(graph: CostGraph, options: Options, link: Link) -> Partition:
    """The cut, all objectives' values for it, and whether another objective would shorten the step."""
    # Imported here: solvers need numpy and networkx, which reading a plan does not.
    from pipecompile.partition.front import solve

    problem = problem_of(graph, options, link)
    assert problem.step_ns is not None
    try:
        found = solve(problem)
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{_what_would_fit(graph, options, link)}") from None
    step_ns = problem.step_ns(found.assignment)
    others = [
        Faster(objective=objective, step_ns=problem.step_ns(solve(other, seconds=OTHERS_SECONDS).assignment))
        for objective in OBJECTIVES
        if objective != options.objective and not (objective == "step-time" and options.schedule == "forward-only")
        for other in [replace(problem, objective=objective)]
    ]
    fastest = min(others, key=lambda other: other.step_ns)
    search = msgspec.structs.replace(
        found.search,
        values={**found.search.values, "step_ns": step_ns},
        faster=fastest if fastest.step_ns * 100 < step_ns * 99 else None,
    )
    return replace(found, search=search)


def problem_of(graph: CostGraph, options: Options, link: Link) -> Problem:
    """What the options ask of the partitioner."""
    if options.objective == "step-time" and options.schedule == "forward-only":
        raise InputError("step-time weighs a step with backwards, which forward-only has not; choose max-load")
    from pipecompile.partition.problem import Floor, Memory, Problem

    recompute, memory = options.recompute == "stage", None
    if options.memory_bytes is not None:
        flights = in_flight(options.schedule, range(options.k), options.microbatches)
        caps = (options.memory_bytes,) * options.k
        memory = Memory(
            caps,
            flights,
            *floors(graph, recompute=recompute),
            price=_price(graph, options),
            floor=Floor(*buffers(graph, options.microbatches)),
        )
    return Problem(
        graph,
        options.k,
        objective=options.objective,
        link=link,
        recompute=recompute,
        memory=memory,
        pin=options.pin,
        precedence=tuple(sums_in_order(graph)),
        parameters_everywhere=options.parameters_everywhere,
        microbatches=options.microbatches,
        step_ns=lambda assignment: step_ns(graph, assignment, options, link),
    )


def sums_in_order(graph: CostGraph) -> Iterator[tuple[str, str]]:
    """Pairs of nodes whose stages must not fall, so that gradients are summed in the order of the unsplit model.

    Autograd adds what the consumers of a tensor give from the last in the forward to the first, and what later stages
    give comes before what the tensor's own stage adds. Only the first two summands may change places.
    """
    place = {node.name: index for index, node in enumerate(graph.nodes)}
    for tensor in graph.tensors:
        consumers = sorted(set(tensor.consumers), key=place.__getitem__)
        if tensor.gradient_bytes and len(consumers) > 2:
            yield from pairwise(consumers[:-1])
            yield consumers[-3], consumers[-1]


def _price(graph: CostGraph, options: Options) -> Callable[[Candidate], int | None]:
    """A stage fits its budget by the plan's memory model, or it does not: nothing is recomputed to make it fit."""

    def price(candidate: Candidate) -> int | None:
        taken = {*candidate.before, *candidate.nodes}
        rest = tuple(node.name for node in graph.nodes if node.name not in taken)
        units = [names for names in (candidate.before, candidate.nodes, rest) if names]
        start = int(bool(candidate.before))
        held = Layout(graph, tuple(units)).footprint(start, start + 1)
        needed = held.bound(
            in_flight=candidate.in_flight,
            microbatches=options.microbatches,
            recompute=options.recompute == "stage" and candidate.stage < options.k - 1,
        )
        return 0 if needed <= candidate.budget else None

    return price


def step_ns(graph: CostGraph, assignment: Mapping[str, int], options: Options, link: Link) -> int:
    """The simulated step of an assignment under the schedule of `options`."""
    stages = _stages(graph, assignment, options)
    schedule = schedule_for(options.schedule, stages, link, options.microbatches, options.recompute == "stage")
    return simulate(problem_of_stages(stages, link, schedule.placement, options.microbatches), schedule).makespan_ns


def _what_would_fit(graph: CostGraph, options: Options, link: Link) -> str:
    """The options nearest to these that can be met, as a sentence; at most a few are tried, and only for memory."""
    if options.memory_bytes is None:
        return ""
    more = [msgspec.structs.replace(options, k=k) for k in range(options.k + 1, 2 * options.k + 3)]
    changed = {f"k={other.k}": other for other in more}
    if options.recompute == "none":
        changed = {"recompute=stage": msgspec.structs.replace(options, recompute="stage"), **changed}
    fitting = [text for text, other in changed.items() if _is_feasible(graph, other, link)]
    if not fitting:
        return f"; neither up to {more[-1].k} stages nor recompute would fit: allow more memory or fewer microbatches"
    return f"; this would fit: {' or '.join(fitting[:2])}"


def _is_feasible(graph: CostGraph, options: Options, link: Link) -> bool:
    from pipecompile.partition.front import solve

    try:
        solve(problem_of(graph, options, link), seconds=OTHERS_SECONDS)
    except PipecompileError:
        return False
    return True


def _stages(graph: CostGraph, assignment: Mapping[str, int], options: Options) -> tuple[Stage, ...]:
    names = [tuple(n.name for n in graph.nodes if assignment[n.name] == s) for s in range(options.k)]
    layout = Layout(graph, tuple(names))
    boundaries = [tuple(_crossing(graph, assignment, stage)) for stage in range(-1, options.k)]
    return tuple(_stage(graph, layout, index, boundaries, options) for index in range(options.k))


def _stage(
    graph: CostGraph, layout: Layout, index: int, boundaries: Sequence[tuple[Boundary, ...]], options: Options
) -> Stage:
    nodes = [graph.by_name[name] for name in layout.units[index]]
    forward_ns = sum(node.forward_ns for node in nodes)
    recompute = options.recompute if index < options.k - 1 else "none"
    return Stage(
        nodes=layout.units[index],
        modules=tuple(module_ranges(node.module for node in nodes)),
        groups=tuple(sorted({node.group for node in nodes if node.group is not None})),
        parameters=tuple(sorted({name for node in nodes for name in node.parameters})),
        forward_ns=forward_ns,
        backward_ns=sum(node.backward_ns for node in nodes),
        backward_input_ns=_sum_if_known(node.backward_input_ns for node in nodes),
        backward_weight_ns=_sum_if_known(node.backward_weight_ns for node in nodes),
        recompute_ns=forward_ns if recompute == "stage" else 0,
        inputs=boundaries[index],
        outputs=boundaries[index + 1],
        recompute=recompute,
        footprint=layout.footprint(index, index + 1),
    )


def _sum_if_known(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _crossing(graph: CostGraph, assignment: Mapping[str, int], stage: int) -> Iterable[Boundary]:
    """The tensors that go from `stage` to the next one, relayed ones included, in the order of the graph."""
    for tensor in graph.tensors:
        last = max((assignment[name] for name in tensor.consumers), default=-1)
        if assignment[tensor.producer] <= stage < last:
            yield Boundary(name=tensor.producer, bytes=tensor.bytes, gradient_bytes=tensor.gradient_bytes)


def _routes(graph: CostGraph, assignment: dict[str, int]) -> Iterable[Route]:
    for tensor in graph.tensors:
        first = assignment[tensor.producer]
        last = max((assignment[name] for name in tensor.consumers), default=first)
        if last - first > 1:
            yield Route(name=tensor.producer, stages=tuple(range(first, last + 1)))


def _owners(graph: CostGraph, stages: Sequence[Stage]) -> Iterable[OwnedParameter]:
    """Every parameter with the stages that hold it; one that no node reads stays with the first stage."""
    for parameter in graph.parameters:
        holders = [index for index, stage in enumerate(stages) if parameter.name in stage.parameters] or [0]
        yield OwnedParameter(
            name=parameter.name,
            aliases=parameter.aliases,
            bytes=parameter.bytes,
            trainable=parameter.trainable,
            owner=holders[0],
            stages=tuple(holders),
        )


def schedule_for(name: str, stages: Sequence[Stage], link: Link, microbatches: int, recompute: bool) -> Schedule:
    """The named schedule for these stages, with its transfers; AssertionError if it were not sound."""
    placement = tuple(range(len(stages)))
    problem = problem_of_stages(stages, link, placement, microbatches)
    lowered = lower(problem, generate(name, placement, microbatches, recompute))
    found = check_schedule(lowered, problem)
    assert not found, f"the generated schedule is not sound: {found}"
    return lowered


def _prediction(stages: Sequence[Stage], schedule: Schedule, link: Link, memory_bytes: int | None) -> Prediction:
    caps = activation_caps(stages, schedule.placement, schedule.microbatches, memory_bytes)
    problem = problem_of_stages(stages, link, schedule.placement, schedule.microbatches, caps)
    timeline = simulate(problem, schedule)
    held = [{i: s.footprint for i, s in enumerate(stages) if schedule.placement[i] == r} for r in range(schedule.ranks)]
    memory = [
        rank_memory(held[rank], row, microbatches=schedule.microbatches) for rank, row in enumerate(schedule.rows)
    ]
    return Prediction(
        step_ns=timeline.makespan_ns,
        span_ns=timeline.span_ns,
        bubble=timeline.bubble,
        loads_ns=tuple(busy // schedule.microbatches for busy in timeline.busy_ns),
        idle=timeline.idle,
        memory=tuple(memory),
    )


def violations(plan: Plan) -> list[str]:
    """What is wrong with a plan by itself: its schedule, its prediction, its memory caps. Empty if it is sound."""
    cap = plan.options.memory_bytes
    try:
        problem = problem_of_stages(plan.stages, plan.link, plan.schedule.placement, plan.microbatches)
        found = check_schedule(plan.schedule, problem)
        prediction = None if found else _prediction(plan.stages, plan.schedule, plan.link, cap)
    except PipecompileError as error:
        return [str(error)]
    if prediction not in (None, plan.prediction):
        found.append("the prediction is not what the plan's stages and schedule give: the file was edited; plan again")
    for rank, memory in enumerate(plan.prediction.memory):
        if cap is not None and memory.total.bound > cap:
            found.append(f"rank {rank} may need {memory.total.bound} bytes, {memory.total.bound - cap} over its cap")
    return found


def over_limits(
    plan: Plan, *, max_imbalance: float | None, max_memory_bytes: int | None, max_bubble: float | None
) -> list[str]:
    """Which of the given limits the plan's prediction exceeds."""
    loads, found = plan.prediction.loads_ns, []
    imbalance = max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
    if max_imbalance is not None and imbalance > max_imbalance:
        found.append(f"imbalance {imbalance:.3f} (largest load / mean load) is over {max_imbalance}")
    if max_bubble is not None and plan.prediction.bubble > max_bubble:
        found.append(f"bubble {plan.prediction.bubble:.3f} is over {max_bubble}; more microbatches make it smaller")
    for rank, memory in enumerate(plan.prediction.memory):
        if max_memory_bytes is not None and memory.total.bound > max_memory_bytes:
            excess = memory.total.bound - max_memory_bytes
            found.append(f"rank {rank} may need {memory.total.bound} bytes, {excess} over {max_memory_bytes}")
    return found


def costs_digest(graph: CostGraph) -> str:
    """SHA-256 of the costs; source lines are left out, since they change without the model changing."""
    plain = tuple(msgspec.structs.replace(node, source="") for node in graph.nodes)
    return hashlib.sha256(encode(msgspec.structs.replace(graph, nodes=plain))).hexdigest()


def module_ranges(paths: Iterable[str]) -> Iterable[str]:
    """Module paths as ranges: `transformer.h.0-2` for blocks 0 to 2, each with all that lies in it."""
    blocks = [block for block, _ in groupby(block_of(path) for path in paths) if block]
    for parent, run in groupby(dict.fromkeys(blocks), key=lambda block: re.sub(r"\.\d+$", "", block)):
        members = list(run)
        numbers = [block[len(parent) + 1 :] for block in members]
        yield f"{parent}.{numbers[0]}-{numbers[-1]}" if len(members) > 1 else members[0]


def block_of(path: str) -> str:
    """The path up to its first number: the block that a module lies in."""
    match = re.match(r"(.*?\.\d+|\d+)(\.|$)", path)
    return match[1] if match else path
