"""Cuts of topological orders: the start of every search, and all of it where graphs are large.

Each order is cut by the dynamic program over its prefixes. Where an order is too long for all pairs of prefixes, some
are tried first, spread evenly over the compute where little crosses, and then all those near the cut that was found.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipecompile.partition.boundaries import Prefixes, Rows
from pipecompile.partition.chains import Chain, Chains
from pipecompile.partition.windows import Limit

__all__ = ["PAIRS_MAX", "cut_order"]

PAIRS_MAX = 5_000_000  # pairs of prefixes per dynamic program: about a second

Best = Callable[[Chains, Limit], Chain | None]


def cut_order(prefixes: Prefixes, limit: Limit, best: Best, pairs: int = PAIRS_MAX) -> Chain | None:
    """The best cut of one order within the limit that was found; None if there is none."""
    chains = Chains(prefixes)
    if chains.pairs(limit) <= pairs:
        return best(chains, limit)
    width = max(2, int((pairs / chains.problem.k) ** 0.5))
    found = best(Chains(prefixes, _spread(prefixes, width), rough=True), limit)
    width = max(2, int((pairs / chains.problem.k / chains.effort) ** 0.5))
    while found is not None:
        near = {s: _around(prefixes, row, width) for s, row in enumerate(found.rows)}
        better = best(Chains(prefixes, near), limit)
        if better is None or better.rows == found.rows:
            break
        found = better
    return found


def _spread(prefixes: Prefixes, count: int) -> dict[int, Rows]:
    """For every boundary the same prefixes: of each equal share of the compute that over which least is sent."""
    compute, k = prefixes.sums.compute[0], prefixes.instance.k
    share = np.minimum(compute * count // max(int(compute[-1]), 1), count - 1)
    crossing = sum(prefixes.crossing(hop) for hop in prefixes.instance.hops) + np.zeros(
        len(prefixes), np.int64
    )
    order = np.lexsort((np.arange(len(prefixes)), crossing, share))
    first = np.flatnonzero(np.diff(share[order], prepend=-1))
    pinned = [prefixes.place[unit] + step for unit in prefixes.instance.decided for step in (0, 1)]
    rows = np.unique(np.concatenate([order[first], np.array(pinned, np.intp)]))
    return dict.fromkeys(range(1, k), rows)


def _around(prefixes: Prefixes, row: int, width: int) -> Rows:
    return np.arange(
        max(0, row - width // 2), min(len(prefixes), row + width // 2 + 1), dtype=np.intp
    )
