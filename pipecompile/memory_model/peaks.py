"""The most that lives while nodes run one after the other.

stage.py calls it for every action of a stage, and recompute_problem.py takes the same steps by
position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipecompile.ir.graph import Node
from pipecompile.memory_model.stage_values import Counting
from pipecompile.memory_model.subgraph import LivenessChange

__all__ = ["NO_WORK", "WorkBeforeNode", "highest"]


class WorkBeforeNode(NamedTuple):
    """Something that is done as a node begins: a recompute, a decoding, a copy.

    `peak` is the most that lives meanwhile and `stays` what lives when it is done. `beside` lives
    with the node's own kernels, until it is done.
    """

    peak: int
    stays: int
    beside: int = 0


NO_BYTES: Mapping[int, int] = {}
NO_WORK: Mapping[int, Sequence[WorkBeforeNode]] = {}


def highest(
    graph_nodes: Sequence[Node],
    places: Sequence[int],
    changes: Iterable[LivenessChange],
    rises: Sequence[int],
    counting: Counting,
    at_end: Mapping[int, int] = NO_BYTES,
    work: Mapping[int, Sequence[WorkBeforeNode]] = NO_WORK,
) -> int:
    """Return the most that lives above what lived before, while the nodes at `places` run.

    `rises` has for each of them the most that its kernels make live: storages that begin in it
    included, workspace excluded. `at_end` lives for a moment when a node is done. For two nodes, of
    which the first makes 10 bytes and the second 4 and then frees the 10:

        live            0 ─ work ─ kernels (rise 10) ─ 10 ─ kernels (rise 4) ─ 14 − 10 = 4
        peak of each              10 + workspace              10 + 4 + workspace

    A rise is in bytes that are asked for. Where an allocator rounds storages up, the padding of
    those that begin in the node is added to it.
    """
    net_change: dict[int, int] = defaultdict(int)
    padding: dict[int, int] = defaultdict(int)
    size_of = counting.size_of
    for place, size, begins in changes:
        counted = size_of(size)
        if begins:
            net_change[place] += counted
            padding[place] += counted - size
        else:
            net_change[place] -= counted
    # Stages are priced by thousands, and most of that time is spent here: without calls of `max`.
    live = peak = 0
    for place, rise in zip(places, rises, strict=True):
        node_work = work.get(place, ())
        # One after the other: each peak is on top of what those before it left.
        for item in node_work:
            if live + item.peak > peak:
                peak = live + item.peak
            live += item.stays
        if rise or node_work or place in padding:
            needed = counting.needed(rise, graph_nodes[place].workspace_bytes) if rise else 0
            beside = max(item.beside for item in node_work) if node_work else 0
            meanwhile = live + needed + beside + padding.get(place, 0)
            if meanwhile > peak:
                peak = meanwhile
        live += net_change.get(place, 0)
        left = live + at_end.get(place, 0)
        if left > peak:
            peak = left
    return peak
