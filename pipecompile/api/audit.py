"""`pipecompile audit`: what a layout costs, beside the best cuts of its grain and of finer ones.
Needs no PyTorch.

The layout and the best cuts are drafted as plans by the same options, so all have schedule and
memory of their own. Of them only the cut differs:

    layout       where its owner cuts
    layers       the best cut between layers: what the layout could be in its own words
    halves       the best one that may also part attention and MLP
    operators    the best one between any operators
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipecompile.api.choices import requested_options
from pipecompile.api.cut_figures import CutFigures, caps_of, parts_of
from pipecompile.api.links import LinksInput, links_for
from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.audit import GRAINS, WHERE, Audit, Grain
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE, Links
from pipecompile.ir.plan import Fingerprint, Options, Plan, Provenance
from pipecompile.ir.serialization import read
from pipecompile.ir.size import caps_by_rank
from pipecompile.layouts.assignment import assignment_of, layers_of
from pipecompile.layouts.grains import Sections, kept_whole, sections_by_node
from pipecompile.layouts.layer_times import read_layer_times
from pipecompile.layouts.layout_text import read_layout
from pipecompile.layouts.sections import Section
from pipecompile.layouts.shared_state import shared_tensors
from pipecompile.partition.cheap_nodes import with_cheap_nodes_copied
from pipecompile.partition.objective import lower_bound
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.units import units
from pipecompile.planner.partition import best_cut, with_all_time
from pipecompile.planner.partition_problem import problem_of
from pipecompile.planner.placement_draft import Origin, assembled
from pipecompile.planner.recompute import recompute_planner
from pipecompile.planner.scheduled_stages import scheduled
from pipecompile.schedule.selection import placements
from pipecompile.schedule.stages import most_by_rank

__all__ = ["audit_file", "audit_graph", "is_file_of_costs"]


class _Drafted(NamedTuple):
    """A plan, and whether it was made within the cap."""

    plan: Plan
    fits: bool


class _Grained(NamedTuple):
    """The best cut of a grain: its plan, and lower bounds for all cuts of the grain.

    `bound_ns` is for cuts within the cap if the plan `fits` it, `free_bound_ns` for all cuts.
    """

    grain: Grain
    plan: Plan
    fits: bool
    bound_ns: int
    free_bound_ns: int
    step_bound_ns: int

    def bound_for(self, fits: bool) -> int:
        """Return what bounds the cuts of this grain, within the cap or without one."""
        return self.bound_ns if fits or not self.fits else self.free_bound_ns


def is_file_of_costs(target: str) -> bool:
    """Return whether TARGET is a file of costs by its name, and not a factory."""
    return Path(target).suffix in (".json", ".csv")


def audit_file(path: str | Path, *, links: LinksInput = None, **choices: Any) -> Audit:
    """Return the audit of a layout on the costs in a file: a cost graph (JSON, which `profile`
    writes), or a table of layer times (CSV, see `layouts.layer_times`).

    `choices` are those of `pipecompile.Choices`, `layout` among them. FormatError if the file is
    neither; InputError as in `audit_graph`.
    """
    # Asked before the file is read: the file brings its own costs, and to pass over the others
    # would give an audit that a reader takes for one by those.
    costs = choices.pop("costs", None)
    if costs is not None:
        raise InputError(f"costs={costs!r}, but {path} has the costs; leave one of them out")
    # "flops" only stands in: it needs no file and no device to be checked, and is replaced below
    # by the name of the table.
    requested = requested_options(costs="flops", **choices)
    if requested.optimizer is None and requested.master_weights:
        raise InputError("master weights are kept for an optimizer; name one (optimizer)")
    is_table = Path(path).suffix == ".csv"
    graph = read_layer_times(path) if is_table else read(path, CostGraph)
    options = msgspec.structs.replace(requested, costs=f"table:{Path(path).name}")
    return audit_graph(graph, options, links_for(requested, links))


def audit_graph(graph: CostGraph, options: Options, links: Links = FREE) -> Audit:
    """Return what the layout of `options` costs on a cost graph, beside the best cuts.

    The objective is the heaviest rank, whatever that of the options is. What does not fit the cap
    is planned without it, which a note says. InputError if there is no layout, or if it does not
    match the graph; InfeasibleError if it cannot be planned at all.
    """
    if options.layout is None or options.layout_format is None:
        raise InputError("an audit is of a layout; give one (--layout, in Python layout=)")
    if options.schedule == "forward-only":
        raise InputError("an audit is of training steps; choose a schedule with backwards")
    layout = read_layout(options.layout, options.layout_format)
    options = msgspec.structs.replace(options, objective="max-load")
    # Both by the graph as it came: copies of cheap nodes, which come next, are no part of what
    # the owner of the layout wrote.
    sections, notes = _sections(graph, options.layers)
    assignment = assignment_of(layout, graph, options.layers)
    graph = with_cheap_nodes_copied(graph, options.k, links, options.pin)
    # Plans of any cut: the layout is one of them.
    free = msgspec.structs.replace(options, layout=None, layout_format=None)
    hand = _drafted(graph, free, links, assignment)
    if not hand.fits:
        notes.append("the layout does not fit the memory cap; it is planned without one")
    # The layout itself is a candidate for the best cut of its grain, and of every finer one, so
    # no row of the answer can be worse than the layout: the search for a cut need not find it
    # again.
    known = [(_grain_of(hand.plan, graph, sections), hand.plan)] if hand.fits else []
    best = _best_cuts(_graphs(graph, sections), free, links, known, notes)
    return _audit_of(graph, options, sections, hand, best, notes)


def _sections(graph: CostGraph, container: str | None) -> tuple[dict[Grain, Sections], list[str]]:
    """Return the sections of the nodes by grain, as far as there are some, and what is missing."""
    sections: dict[Grain, Sections] = {}
    notes = []
    for grain in GRAINS[:-1]:
        try:
            sections[grain] = sections_by_node(graph, grain, container)
        except InputError as error:
            notes.append(f"no cuts {WHERE[grain]}: {error}")
    return sections, notes


# Plans that are compared


def _drafted(
    graph: CostGraph,
    options: Options,
    links: Links,
    assignment: Mapping[str, int] | None = None,
) -> _Drafted:
    """Return the plan for a graph, of the cut `assignment` or of the best one, without the cap if
    nothing fits it.
    """
    if options.memory_bytes is not None:
        # Two ways not to fit: the planner may find no cut, or may be given one (`assignment`)
        # that holds more than the cap, which only the prediction tells.
        with suppress(InfeasibleError):
            plan = _plan(graph, options, links, assignment)
            needed = (rank.total.bound for rank in plan.prediction.memory)
            caps = caps_by_rank(options.memory_bytes, plan.ranks)
            if all(size <= cap for size, cap in zip(needed, caps, strict=True)):
                return _Drafted(plan, True)
    uncapped = msgspec.structs.replace(options, memory_bytes=None)
    return _Drafted(_plan(graph, uncapped, links, assignment), options.memory_bytes is None)


def _plan(
    graph: CostGraph, options: Options, links: Links, assignment: Mapping[str, int] | None
) -> Plan:
    """Return the plan that `draft` makes, without what only a plan in a file needs: no other
    objective is tried, and memory is that under any times.
    """
    origin = Origin(Fingerprint(graph="", costs=""), Provenance(verified=False), ())
    plans, refusals = [], []
    for placement in placements(options):
        planner = recompute_planner(graph, options, placement, settled=True)
        try:
            if assignment is None:
                problem, best = best_cut(graph, options, links, placement)
            else:
                problem = problem_of(graph, options, links, placement)
                best = Partition.of(problem, assignment, method="layout", bound=0)
            partition = with_all_time(planner, problem, links, best.assignment, best.search)
            result = scheduled(planner, links, best.assignment, most_by_rank)
            plans.append(assembled(planner, links, origin, partition, result))
        except InfeasibleError as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    return min(plans, key=_worth)


# The best cuts


def _best_cuts(
    graphs: Mapping[Grain, CostGraph],
    options: Options,
    links: Links,
    known: Sequence[tuple[Grain, Plan]],
    notes: list[str],
) -> list[_Grained]:
    """Return the best cut of each grain, from coarse to fine, and add to `notes` what has none.

    `known` are plans that fit, each with its grain. A cut of a coarse grain is one of a fine grain
    too, and what bounds cuts of a fine grain bounds those of a coarse one.
    """
    found: list[_Grained] = []
    plans = list(known)
    for grain, graph in graphs.items():
        try:
            drafted = _drafted(graph, options, links)
        except InfeasibleError as error:
            notes.append(f"no cut {WHERE[grain]}: {error}")
            continue
        if drafted.fits:
            plans.append((grain, drafted.plan))
        within = [plan for at, plan in plans if GRAINS.index(at) <= GRAINS.index(grain)]
        if not within:
            notes.append(f"no cut {WHERE[grain]} was found that fits the memory cap")
        best = min(within or [drafted.plan], key=_worth)
        uncapped = msgspec.structs.replace(options, memory_bytes=None)
        # Two bounds are kept. One of cuts within the cap may be higher, but says nothing of a
        # layout that does not fit; for that the bound without a cap is used (`bound_for`).
        problem = replace(problem_of(graph, uncapped, links), objective="max-load")
        bounds = drafted.plan.search.bound, lower_bound(problem), _step_bound_ns(problem)
        found.append(_Grained(grain, best, bool(within), *bounds))
    return _with_finer_bounds(found)


def _graphs(graph: CostGraph, sections: Mapping[Grain, Sections]) -> dict[Grain, CostGraph]:
    """Return the graph that each grain cuts, without those that allow no more cuts than a coarser
    one.
    """
    graphs: dict[Grain, CostGraph] = {}
    # With an embedding, 2 layers of an attention and an MLP each, and a head, and no other nodes:
    #     layers      E | A M | A M | L      4 units
    #     halves      E | A | M | A | M | L  6 units
    # Where a model's halves cannot be told, `sections` lacks them, and where halves allow no more
    # cuts than layers, a second search would only print the same row twice.
    most = 0
    for grain in GRAINS:
        whole = kept_whole(graph, sections[grain]) if grain in sections else graph
        if (grain in sections or grain == "operators") and len(units(whole)) > most:
            graphs[grain], most = whole, len(units(whole))
    return graphs


def _worth(plan: Plan) -> tuple[int, int]:
    """Return the heaviest rank of a plan, then its step: the less of both, the better."""
    return plan.search.values["max_load_ns"], plan.prediction.step_ns


def _grain_of(plan: Plan, graph: CostGraph, sections: Mapping[Grain, Sections]) -> Grain:
    """Return the coarsest grain that a cut is of."""
    stage = plan.assignment
    for grain, found in sections.items():
        stages_of = defaultdict[Section, set[int]](set)
        for node, section in zip(graph.nodes, found, strict=True):
            # What lies in no section goes where its inputs are: it parts nothing.
            if section is not None:
                stages_of[section].add(stage[node.name])
        if all(len(stages) == 1 for stages in stages_of.values()):
            return grain
    return "operators"


def _step_bound_ns(problem: PartitionProblem) -> int:
    """Return a lower bound of the step of all cuts, under any order of actions."""
    # A rank that runs its backwards whole does M microbatches one after the other, so the step
    # takes at least M times the heaviest load. The halves of a split backward may take less than
    # the whole by which the loads are counted.
    from_loads = problem.microbatches * lower_bound(problem) if problem.whole_backwards else 0
    return max(lower_bound(replace(problem, objective="step-time")), from_loads)


def _with_finer_bounds(found: Sequence[_Grained]) -> list[_Grained]:
    """Return the cuts with the best bounds of their own grain and of finer ones."""
    # A cut between layers is one between operators too, so no such cut goes below what bounds
    # those. Bounds may come out the other way around, since solvers bound large problems loosely:
    #     layers 90, halves 80, operators 85   →   layers 90, halves 85, operators 85
    bounded = []
    for index, each in enumerate(found):
        own_and_finer = found[index:]
        better = each._replace(
            bound_ns=max(other.bound_for(each.fits) for other in own_and_finer),
            free_bound_ns=max(other.free_bound_ns for other in own_and_finer),
            step_bound_ns=max(other.step_bound_ns for other in own_and_finer),
        )
        bounded.append(better)
    return bounded


# The result


def _audit_of(
    graph: CostGraph,
    options: Options,
    sections: Mapping[Grain, Sections],
    drafted: _Drafted,
    best: Sequence[_Grained],
    notes: Sequence[str],
) -> Audit:
    """Return the figures of the layout's plan, which is `drafted`, and of the best cuts."""
    assert options.layout is not None and options.layout_format is not None
    figures = CutFigures(graph, options, sections.get("layers"))
    hand = drafted.plan
    grain = _grain_of(hand, graph, sections)
    # Without a cut of its own grain, the layout is bounded by what bounds finer ones.
    like_hand = [each for each in best if GRAINS.index(each.grain) >= GRAINS.index(grain)]
    bound_ns = like_hand[0].bound_for(drafted.fits) if like_hand else 0
    cuts = [figures.of(hand, None, bound_ns, like_hand[0].step_bound_ns if like_hand else 0)]
    cuts += [figures.of(each.plan, each.grain, each.bound_ns, each.step_bound_ns) for each in best]
    layers = sections.get("layers")
    return Audit(
        layout=options.layout,
        layout_format=options.layout_format,
        costs=options.costs,
        time_unit=graph.time_unit,
        schedule=hand.schedule.name,
        k=hand.k,
        ranks=hand.ranks,
        microbatches=hand.microbatches,
        layers="" if layers is None else str(layers_of(graph, options.layers)),
        parts=tuple(parts_of(graph, sections.get("halves", layers or ()))),
        cuts=tuple(cuts),
        caps=caps_of(options, hand.ranks),
        shared=() if layers is None else tuple(shared_tensors(graph, layers, hand.assignment)),
        notes=tuple(notes),
    )
