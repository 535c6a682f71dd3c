"""From a cost graph and options to a plan.

Needs no PyTorch, and returns the same bytes for the same input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.forward_graph import forward_graph
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE, Links
from pipecompile.ir.plan import Fingerprint, Options, Plan, Provenance
from pipecompile.ir.serialization import fingerprint
from pipecompile.ir.unequal_costs import UnequalCosts
from pipecompile.layouts.assignment import assignment_of
from pipecompile.layouts.layout_text import read_layout
from pipecompile.partition.budget import THOROUGH, CutEffort
from pipecompile.partition.cheap_nodes import with_cheap_nodes_copied
from pipecompile.planner.partition_problem import problem_of
from pipecompile.planner.placement_draft import Origin, PlacementDrafter, plans_on_placement
from pipecompile.schedule.selection import placements

__all__ = ["best_plan", "check_stages", "costs_digest", "draft", "node_times", "planned_graph"]


def draft(
    graph: CostGraph,
    options: Options,
    *,
    graph_digest: str,
    capture: Provenance,
    microbatch_shapes: Sequence[tuple[int, ...]],
    links: Links = FREE,
    assignment: Mapping[str, int] | None = None,
    effort: CutEffort = THOROUGH,
) -> Plan:
    """Return the plan for `graph` under `options`; InfeasibleError says which constraint cannot be
    met.

    `microbatch_shapes` are those of the model's input tensors. Links default to free ones, because
    what a transfer costs is not known before it is measured. `assignment` is a feasible cut (node
    to stage) that is to be kept. Of what the options leave open, the placement, the order and what
    is recomputed, the plan with the shortest step is returned; under noise, of plans that are about
    as fast, the one of least regret. `effort` says for how long a cut is searched. InputError if a
    KV cache is asked for, and no attention is known.
    """
    graph = planned_graph(graph, options, links)
    origin = Origin(
        Fingerprint(graph=graph_digest, costs=costs_digest(graph)),
        capture,
        tuple(tuple(shape) for shape in microbatch_shapes),
    )
    best = _shortest(graph, options, links, origin, assignment, effort)
    # It was asked for by a layout, and not by the stage of each node.
    return msgspec.structs.replace(best, options=options)


def _shortest(
    graph: CostGraph,
    options: Options,
    links: Links,
    origin: Origin,
    assignment: Mapping[str, int] | None,
    effort: CutEffort,
) -> Plan:
    """Return the plan with the shortest step of those on the placements that are possible."""
    fixed = _fixed_by_layout(graph, options)
    # A placement on which nothing fits is no failure as long as another one has a plan.
    plans: list[Plan] = []
    refusals: list[InfeasibleError] = []
    for placement in placements(options):
        drafter = PlacementDrafter(graph, placement, links, origin, assignment, effort)
        try:
            plans += plans_on_placement(drafter, fixed)
        except InfeasibleError as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    return best_plan(plans, graph, options)


def check_stages(graph: CostGraph, options: Options, links: Links) -> None:
    """Raise InfeasibleError if the graph cannot be cut into k stages, whatever they may hold."""
    uncapped = msgspec.structs.replace(options, memory_bytes=None)
    # The units are made when they are first asked for, and refuse a k that is too large.
    _ = problem_of(planned_graph(graph, uncapped, links), uncapped, links).units


def planned_graph(graph: CostGraph, options: Options, links: Links) -> CostGraph:
    """Return the graph that is planned: `graph`, or for inference its forward alone, with its cheap
    nodes copied.

    InputError if the options speak of a KV cache, and the graph has no attention that is known.
    """
    if isinstance(graph, UnequalCosts):
        # Which nodes are cheap differs from device to device: none is copied.
        return graph.mapped(lambda kind: _needed_graph(kind, options))
    needed = _needed_graph(graph, options)
    # A layout says where nodes lie that nobody has thought of: only what a user pins is held.
    return with_cheap_nodes_copied(needed, options.k, links, options.pin)


def _needed_graph(graph: CostGraph, options: Options) -> CostGraph:
    """Return `graph`, or for inference its forward alone."""
    if not options.is_inference:
        return graph
    speaks_of_cache = options.kv_tokens is not None or options.kv_token_bytes is not None
    if speaks_of_cache and not any(node.kv_token_bytes for node in graph.nodes):
        raise InputError(
            "the KV cache of this model is unknown: no scaled_dot_product_attention over (batch, "
            "heads, tokens, width) was found in it; leave out kv_tokens and kv_token_bytes, and "
            "subtract the cache from memory"
        )
    return forward_graph(graph, options.kv_token_bytes)


def _fixed_by_layout(graph: CostGraph, options: Options) -> Options:
    """Return the options with each node in its stage, if they have a layout."""
    if options.layout is None:
        return options
    layout = read_layout(options.layout, options.layout_format)
    return msgspec.structs.replace(options, pin=assignment_of(layout, graph, options.layers))


def best_plan(plans: Sequence[Plan], graph: CostGraph, options: Options) -> Plan:
    """Return the plan with the shortest step; under the noise of `options` that of least regret.

    All are for one minibatch. The nodes of `graph` share the times of stages in draws of noise.
    """
    if options.noise is None:
        return min(plans, key=lambda plan: plan.prediction.step_ns)
    # Imported here: it needs numpy, which reading and checking a plan does not.
    from pipecompile.schedule.robust_choice import robust_choice

    choice = robust_choice(plans, [node_times(graph)] * len(plans), options.noise)
    return msgspec.structs.replace(plans[choice.place], robustness=choice.robustness)


def node_times(graph: CostGraph) -> dict[str, int]:
    """Return by name what each node takes for one microbatch, forward and backward, in ns."""
    return {node.name: node.forward_ns + node.backward_ns for node in graph.nodes}


def costs_digest(graph: CostGraph) -> str:
    """Return the SHA-256 of the costs.

    Source lines are left out, since they change without the model changing, and so are notes, which
    are no costs, and the copied nodes, which follow from the costs and the options.
    """
    if isinstance(graph, UnequalCosts):
        return fingerprint([costs_digest(graph.kinds[kind]) for kind in graph.rank_kinds])
    plain = tuple(msgspec.structs.replace(node, source="") for node in graph.nodes)
    costs = msgspec.to_builtins(msgspec.structs.replace(graph, nodes=plain, copied=()))
    del costs["cost_notes"]
    return fingerprint(costs)
