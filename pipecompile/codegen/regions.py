"""Regions and encoded runs of a stage, and the check that a stage can have them.

A region is recomputed in the backward. The saved tensors of an encoded run are kept in another form
between forward and backward. Both are runs of nodes that follow each other in a stage, and the
limits of regions (graph/recomputability.py) hold for both. `emit` calls the check before it
replaces them by single nodes (region_replacement.py).

    nodes of a stage   a  b  c  d  e  f  g  h
    regions            [a  b  c  d]            an outer region,
                          [b  c]               and a region within it
    encoded runs                      [f  g]   apart from every region
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from torch import fx

from pipecompile.errors import InputError
from pipecompile.graph.copied_nodes import stages_of_copies
from pipecompile.graph.recomputability import RecomputeLimits, recompute_limits
from pipecompile.ir.encodings import Encoding

__all__ = ["EncodedRuns", "Regions", "check_regions", "region_error", "stage_order"]

Regions = Mapping[int, Sequence[Sequence[str]]]
"""By stage its regions, each as the names of its nodes in order. A region may contain another."""
EncodedRuns = Mapping[int, Sequence[tuple[Sequence[str], tuple[Encoding, ...]]]]
"""By stage its encoded runs: the names of the nodes in order, and the encodings by name."""


def stage_order(
    graph: fx.Graph, assignment: Mapping[str, int], stage: int, copied: Collection[str] = ()
) -> list[str]:
    """Return the names of a stage's nodes in their order, without reads of parameters.

    Nodes of `copied` are in each stage that reads them.
    """
    copies = stages_of_copies(graph, assignment, copied)
    return [
        node.name
        for node in graph.nodes
        if node.op != "get_attr" and stage in copies.get(node.name, (assignment[node.name],))
    ]


def check_regions(
    module: fx.GraphModule,
    assignment: Mapping[str, int],
    regions: Regions,
    encoded_runs: EncodedRuns,
    copied: Collection[str] = (),
) -> None:
    """Check that stages can have these regions and encoded runs under `assignment`; nodes of
    `copied` are in each stage that reads them.

    Raise InputError with the nodes of the first one that is not possible.
    """
    limits = recompute_limits(module)
    for stage, runs in encoded_runs.items():
        order = stage_order(module.graph, assignment, stage, copied)
        for names, _ in runs:
            if error := region_error(limits, order, names):
                raise InputError(
                    f"the run {_shortened(names)} of stage {stage}, which encodes saved tensors, "
                    f"{error}"
                )
        _check_runs_are_apart(stage, [names for names, _ in runs], regions.get(stage, ()))
    for stage, stage_regions in regions.items():
        order = stage_order(module.graph, assignment, stage, copied)
        for region in stage_regions:
            if error := region_error(limits, order, region):
                raise InputError(f"region {_shortened(region)} of stage {stage} {error}")
        _check_nesting(stage, stage_regions)


def _check_runs_are_apart(
    stage: int, runs: Sequence[Sequence[str]], regions: Iterable[Sequence[str]]
) -> None:
    """Raise InputError if a node of a run is in another run or in a region too."""
    # What a region saves is made by its second run, in the backward: between the two there is
    # nothing to be encoded.
    counts = Counter(name for names in (*runs, *regions) for name in set(names))
    for name in (name for names in runs for name in names):
        if counts[name] > 1:
            raise InputError(
                f"{name} of stage {stage} encodes its saved tensors twice, or in a region too; a "
                "node may be in one run at most, and not in a region besides"
            )


def _check_nesting(stage: int, regions: Sequence[Sequence[str]]) -> None:
    """Raise InputError if two regions overlap and neither contains the other."""
    for one, other in combinations(map(frozenset, regions), 2):
        is_nested = one < other or other < one
        # Of two that overlap, neither could be inside the other's body.
        if one == other or (one & other and not is_nested):
            raise InputError(
                f"two regions of stage {stage} share {_shortened(sorted(one & other))}; two "
                "regions must have no node in common, or one must contain the other"
            )


def region_error(
    limits: RecomputeLimits, order: Sequence[str], region: Sequence[str]
) -> str | None:
    """Return why `region` is not possible in a stage with the nodes `order`, and what to change.

    The text continues a sentence that begins with the region. Return None if it is possible.
    """
    members, stage_nodes = frozenset(region), frozenset(order)
    if not region:
        return "is empty; leave it out"
    for name in region:
        if name in limits.never:
            return f"may not hold {name}: {limits.never[name]}; leave it out"
    for name in region:
        if name not in stage_nodes:
            return f"names {name}, which is no node of the stage"
    # A region becomes one node, at one place. With a gap, a node in it could read one end of the
    # region and be read by the other: then there would be no place for it.
    first = order.index(region[0])
    if list(region) != list(order[first : first + len(region)]):
        return "is no run of the stage's nodes; name nodes that follow each other, in their order"
    for group in limits.together:
        # The cut may have put some nodes of the group into other stages. They do not count.
        group_here = [name for name in group if name in stage_nodes]
        inside = [name for name in group_here if name in members]
        outside = [name for name in group_here if name not in members]
        if inside and outside:
            return (
                f"parts {inside[0]} from {_shortened(outside)}; a region must contain all of "
                "them or none"
            )
    return None


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 5 else f"{names[0]}, …, {names[-1]}"
