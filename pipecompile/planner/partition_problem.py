"""What the options of a plan ask of the partitioner: a cost graph and options in, a problem out.

It composes the phases: what a stage recomputes to fit its rank (recompute), what it then holds
(memory_model), and when (schedule) become numbers and functions of a `PartitionProblem`. Needs no
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from operator import attrgetter

import msgspec

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.copied_nodes import without_copied
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Link, Links, links_of_pairs, slowest
from pipecompile.ir.plan import Communication, Options
from pipecompile.ir.schedule import BACKWARDS
from pipecompile.ir.size import size_text
from pipecompile.ir.stage_ranks import stage_ranks
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.empty_ranks import empty_rank_bytes
from pipecompile.memory_model.lower_bounds import (
    bytes_lower_bounds,
    freeable_bytes,
    received_bytes,
)
from pipecompile.memory_model.optimizer import optimizer_bytes
from pipecompile.memory_model.rank import available_for_activations, rank_memory
from pipecompile.partition.memory_constraint import (
    BoundaryBuffers,
    MemoryConstraint,
    Price,
    StageCandidate,
)
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.summation import gradient_sum_order
from pipecompile.planner.recompute import recompute_planner
from pipecompile.planner.step_bound import REGIONS, recomputed_share
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.policies import WHOLE_STAGE, StageSlice
from pipecompile.recompute.stages import stages_of
from pipecompile.schedule.named_orders import MAY_SPLIT, FullestMoment, held_microbatches
from pipecompile.schedule.selection import (
    fullest_moment_of,
    judging_schedule,
    placements,
    representative_schedule,
    snapshots_of,
)
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.stages import problem_of_stages

__all__ = [
    "has_recompute_in_compute",
    "may_pay_for_memory",
    "planned_step_ns",
    "problem_of",
    "rank_missing_bytes",
    "simulated_step_ns",
]

INFERENCE_LOADS = {"throughput": "max-load", "latency": "total-load"}
"""What the loads of a forward are to be for inference; every other objective is its own name."""


def problem_of(
    graph: CostGraph,
    options: Options,
    links: Links,
    placement: Sequence[int] | None = None,
    *,
    one_in_flight: bool = False,
) -> PartitionProblem:
    """Return the problem of the options.

    The stages are placed as given, or as the schedule has them. They hold as many microbatches
    between forward and backward as the schedule has in flight, or just one if `one_in_flight`.
    Copied nodes are left out: times and bytes are lower bounds, which `with_all_time` completes.
    Raise InputError if the objective does not suit the schedule.
    """
    if options.objective == "step-time" and options.schedule == "forward-only":
        raise InputError(
            "step-time weighs a step with backwards, which forward-only has not; choose throughput "
            "or latency"
        )
    placement = tuple(placement or placements(options)[0])
    copied, graph = graph.copied_set, without_copied(graph)
    replicas = tuple(map(len, stage_ranks(placement)))
    is_own = placement == tuple(range(options.k)) or max(replicas) > 1
    planner = recompute_planner(graph, options, placement)
    return PartitionProblem(
        graph,
        options.k,
        objective=INFERENCE_LOADS.get(options.objective, options.objective),
        communication=_communication(options),
        links=_links_of_stages(links.among(max(placement) + 1), placement),
        placement=None if is_own else placement,
        # Ranks that take microbatches in turns are as fast together as so many; what they pay for
        # transfers is charged as if one had all of them.
        speeds=tuple(map(Fraction, replicas)) if max(replicas) > 1 else None,
        recompute=recomputed_share(options),
        memory=_memory_constraint(planner, one_in_flight, has_copies=bool(copied)),
        # A layout has a stage for copied nodes too.
        pin={name: stage for name, stage in options.pin.items() if name not in copied},
        # Only cuts whose pipeline sums gradients in the order of the unsplit model, bit for bit.
        precedence=tuple(gradient_sum_order(graph)),
        granularity=options.granularity,
        parameters_everywhere=options.parameters_everywhere,
        microbatches=options.microbatches,
        whole_backwards=options.schedule not in MAY_SPLIT,
        step_ns=partial(planned_step_ns, planner, links),
    )


def _links_of_stages(links: Links, placement: Sequence[int]) -> Links:
    """Return the links between stages, of those that have several ranks the slowest ones."""
    ranks = stage_ranks(placement)
    if links.ranks is None or max(map(len, ranks)) == 1:
        return links

    def between(left: Sequence[int], right: Sequence[int]) -> Link:
        return slowest(links.link(*pair) for pair in product(left, right))

    table = [[between(left, right) for right in ranks] for left in ranks]
    own = {"sending": links.sending, "receiving": links.receiving}
    return msgspec.structs.replace(links_of_pairs(table), **own)


def _communication(options: Options) -> Communication:
    """Return what loads pay for transfers.

    In a full pipeline the next microbatch is computed while this one is on its way. Between its
    forward and its backward a training step waits for messages: there, cuts that pay for them in
    full have the shorter steps (docs/results.md).
    """
    return options.comm or ("overlap" if options.objective == "throughput" else "relay")


# Recompute


def has_recompute_in_compute(options: Options) -> bool:
    """Return whether the compute of stages includes what the policy recomputes.

    If it does, prices do not.
    """
    return options.recompute in WHOLE_STAGE


def may_pay_for_memory(options: Options) -> bool:
    """Return whether stages may take longer to hold less, by recompute or by encodings."""
    return options.recompute != "none" or bool(options.encodings)


# Memory


def _memory_constraint(
    planner: RecomputePlanner, one_in_flight: bool, *, has_copies: bool
) -> MemoryConstraint | None:
    """Return the caps of the ranks and what stages hold; None without caps.

    Stages alone on their ranks are priced by the plan's memory model. For others there are only
    lower bounds, and the cut is corrected afterwards (`partition.cap_correction`).
    """
    graph, options, placement = planner.graph, planner.options, planner.view.placement
    ranks = max(placement) + 1
    caps = options.caps(ranks)
    if caps is None:
        return None
    _refuse_caps_below_fixed(caps, placement, graph.allocator)
    moment = FullestMoment((1,) * options.k, have_gradients=False)
    if not one_in_flight:
        moment = fullest_moment_of(options, placement)
    # Replicas of a stage hold alike, and count as one rank here.
    caps = tuple(caps[rank] for rank in sorted(set(placement)))
    ranks = len(caps)
    has_gradients = moment.have_gradients and options.microbatches > max(moment.held)
    ranges = planner.policies.ranges
    resident, saved = bytes_lower_bounds(
        graph,
        options.recompute,
        # The gradients of parameters are there after the first backward.
        gradients=has_gradients and not ranges.divides_gradients,
        encodings=options.encodings,
        kv_tokens=options.kv_tokens or 0,
        # Of several stages of a rank only one has its parameters gathered at a time.
        parts=options.replicas if ranges.gathers_in_actions and ranks != options.k else 1,
    )
    constraint = MemoryConstraint(
        caps, moment.held, resident, saved, optimizer=_optimizer_bytes(graph, options)
    )
    if ranks != options.k:
        return constraint
    can_free = options.recompute == "auto" or bool(options.encodings)
    return replace(
        constraint,
        price=_price(planner, one_in_flight, has_copies=has_copies),
        boundary_buffers=BoundaryBuffers(
            *received_bytes(graph), _received_counts(options, placement, one_in_flight)
        ),
        freeable=freeable_bytes(graph, options.recompute, options.encodings, ranges.bytes_per_ns)
        if can_free
        else (),
    )


def _optimizer_bytes(graph: CostGraph, options: Options) -> dict[str, int]:
    """Return the state of the optimizer at the first reader of each parameter.

    It is empty where replicas share the state, and where it lies in the host's memory.
    """
    held: dict[str, int] = {}
    if options.shard or options.optimizer_on_host:
        return held
    counted: set[str] = set()
    for node in graph.nodes:
        new = [name for name in node.parameters if name not in counted]
        counted.update(new)
        trained = [each for each in map(graph.parameter_by_name.get, new) if each is not None]
        state, _ = optimizer_bytes(
            (each for each in trained if each.trainable),
            options.optimizer,
            master_weights=options.master_weights,
            lists=False,
        )
        held[node.name] = sum(state)
    return held


def _refuse_caps_below_fixed(
    caps: Sequence[int], placement: Sequence[int], allocator: AllocatorName
) -> None:
    """Raise InfeasibleError for a rank whose cap is less than it takes for any model.

    Without this every search would run to its end first, and then blame a node.
    """
    empty = empty_rank_bytes(placement, len(caps), allocator)
    for rank, (cap, fixed) in enumerate(zip(caps, empty, strict=True)):
        if cap < fixed:
            raise InfeasibleError(
                f"rank {rank} may hold {size_text(cap)}, but the allocator and the buffers of the "
                f"communication library take {size_text(fixed)} there for any model",
                "allow more memory",
            )


def _received_counts(
    options: Options, placement: tuple[int, ...], one_in_flight: bool
) -> tuple[tuple[int, int], ...]:
    """Return, by stage, the numbers of microbatches whose values and gradients have arrived.

    They are counted when most microbatches are in flight. Each stage is alone on its rank.
    """
    if one_in_flight:
        # As `available_for_activations` counts them, since the order is open.
        return ((options.microbatches, options.microbatches),) * options.k
    name = representative_schedule(options, placement)
    by_rank = snapshots_of(name, placement, options.microbatches, False)
    counts = []
    for stage, rank in enumerate(placement):
        # A stage that is recomputed as a whole holds most as a backward begins.
        backwards = [s for s in by_rank[rank] if s.kind in BACKWARDS] or by_rank[rank]
        moments = [
            max((s.states[stage] for s in snapshots), key=attrgetter("in_flight"))
            for snapshots in (by_rank[rank], backwards)
        ]
        values = min(state.values_received for state in moments)
        counts.append((values, min(state.gradients_received for state in moments)))
    return tuple(counts)


def _price(
    planner: RecomputePlanner, one_in_flight: bool, *, has_copies: bool
) -> Callable[[StageCandidate], Price]:
    """Return the price of stages, by the plan's memory model, as a function of a candidate.

    With copies that are left out it is that of the rest of the stage.
    """
    graph, options, placement = planner.graph, planner.options, planner.view.placement
    may_find_none = options.recompute == "auto" or bool(options.encodings)
    # A copy may be a block by itself: of four blocks `sqrt` makes regions of two, and of
    # five regions of three, which may hold less or take less time. So these bound nothing.
    bounds = not (has_copies and options.recompute in REGIONS)

    def price(candidate: StageCandidate) -> Price:
        """Return the extra time that a stage needs to fit its cap, with its lower bound."""
        stage_slice = StageSlice(candidate.stage, candidate.before, candidate.nodes)
        recompute = planner.of(stage_slice, candidate.cap)
        if recompute is None:
            # The planner's search is no proof that nothing fits.
            return Price(None, 0 if may_find_none else None)
        missing = rank_missing_bytes(
            graph,
            msgspec.structs.replace(options, memory_bytes=candidate.cap),
            placement,
            {candidate.stage: recompute.footprint},
            (candidate.stage,) if recompute.kind in WHOLE_STAGE else (),
            one_in_flight=one_in_flight,
        )
        if missing > 0:
            return Price(None, None if bounds else 0, missing)
        # It fits, and `recompute` of the problem has the time.
        if has_recompute_in_compute(options):
            return Price(0, 0)
        return Price(recompute.ns, recompute.least if bounds else 0)

    return price


def rank_missing_bytes(
    graph: CostGraph,
    options: Options,
    placement: Sequence[int],
    footprints: Mapping[int, Footprint],
    recomputed: Collection[int],
    *,
    one_in_flight: bool,
) -> int:
    """Return the bytes that a rank needs over its cap, at most 0 if it fits.

    `footprints` are those of its stages. The stages `recomputed` recompute as a whole. Snapshots
    are those of the named schedule. If `one_in_flight`, any order will do that has room for one
    microbatch in each stage.
    """
    caps, rank = options.caps(max(placement) + 1), placement[min(footprints)]
    assert caps is not None
    allocator = ALLOCATORS[graph.allocator]
    if one_in_flight:
        left = available_for_activations(
            footprints,
            caps[rank],
            microbatches=options.microbatches,
            allocator=allocator,
            recomputed=recomputed,
        )
        return _one_of_each_bytes(footprints.values()) - left
    snapshots = snapshots_of(
        representative_schedule(options, placement),
        tuple(placement),
        options.microbatches,
        bool(recomputed),
        options.recompute == "except-last",
    )
    held = held_microbatches(options.schedule, placement, options.microbatches)
    memory = rank_memory(footprints, snapshots[rank], microbatches=held, allocator=allocator)
    return memory.total.bound - caps[rank]


def _one_of_each_bytes(footprints: Iterable[Footprint]) -> int:
    """Return the activations of a rank whose stages hold one microbatch each at the same time."""
    # No schedule is known yet, so there are no snapshots to count from.
    return sum(
        (footprint.activations + footprint.added_by_input_backward).bound
        for footprint in footprints
    )


# Time


def simulated_step_ns(
    graph: CostGraph, assignment: Mapping[str, int], options: Options, links: Links
) -> int:
    """Return the step of an assignment, in ns, under the schedule of the options.

    A searched schedule is represented by a named one.
    """
    planner = recompute_planner(graph, options, placements(options)[0])
    return planned_step_ns(planner, links, assignment)


def planned_step_ns(planner: RecomputePlanner, links: Links, assignment: Mapping[str, int]) -> int:
    """Return the step of an assignment, in ns, with what the planner has its stages recompute."""
    options, placement = planner.options, planner.view.placement
    with_memory = may_pay_for_memory(options)  # else it does not change the times
    stages = stages_of(planner.graph, assignment, planner, with_memory=with_memory)
    problem = problem_of_stages(stages, links, placement, options.microbatches)
    return simulate(problem, judging_schedule(options, problem)).makespan_ns
