"""Cuts of one topological order into intervals.

Every search starts with them, and on large graphs they are all of it.

The dynamic program of `chains` runs over the order's prefixes. Where an order has too many pairs of
prefixes, a few are tried first: spread evenly over the compute, each where little crosses. Then all
prefixes near the cut that they give are tried, until it no longer moves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipecompile.partition.boundaries import Rows
from pipecompile.partition.chains import Chain, Chains
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.windows import Limit

__all__ = ["PAIRS_MAX", "BestChain", "cut_order"]

PAIRS_MAX = 5_000_000  # pairs of prefixes per dynamic program: about a second

BestChain = Callable[[Chains, Limit], Chain | None]  # as `PricedSearch.best`


def cut_order(
    prefixes: Prefixes, limit: Limit, best: BestChain, pairs: int = PAIRS_MAX
) -> Chain | None:
    """Return the best cut of an order within the limit that is found with about `pairs`.

    It is the best cut of the order if the order has no more pairs than that, and None if no cut is
    found.
    """
    chains = Chains(prefixes)
    if chains.pairs(limit) <= pairs:
        return best(chains, limit)
    k = chains.problem.k
    # A band of w rows at each boundary has about k w² pairs.
    width = max(2, int((pairs / k) ** 0.5))
    chain = best(Chains(prefixes, _spread_rows(prefixes, width), rough=True), limit)
    width = max(2, int((pairs / k / chains.pair_cost) ** 0.5))
    while chain is not None:
        near = {s: _rows_around(prefixes, row, width) for s, row in enumerate(chain.rows)}
        better = best(Chains(prefixes, near), limit)
        if better is None or better.rows == chain.rows:
            break
        chain = better
    return chain


def _spread_rows(prefixes: Prefixes, count: int) -> dict[int, Rows]:
    """Return about `count` prefixes, the same ones for every boundary.

    Of each of `count` equal shares of the compute it is the prefix with the least transfers; the
    prefixes on both sides of each pinned unit are added.
    """
    compute, k = prefixes.sums.compute[0], prefixes.unit_graph.k
    share = np.minimum(compute * count // max(int(compute[-1]), 1), count - 1)
    transfers = np.zeros(len(prefixes), np.int64)
    for hop in prefixes.unit_graph.hops:
        transfers = transfers + prefixes.crossing(hop)
    # Sorted by share, then transfers, then row; the first row of each share is taken.
    order = np.lexsort((np.arange(len(prefixes)), transfers, share))
    first_of_share = np.flatnonzero(np.diff(share[order], prepend=-1))
    pinned = [
        prefixes.place[unit] + side for unit in prefixes.unit_graph.restricted for side in (0, 1)
    ]
    rows = np.unique(np.concatenate([order[first_of_share], np.array(pinned, np.intp)]))
    return dict.fromkeys(range(1, k), rows)


def _rows_around(prefixes: Prefixes, row: int, width: int) -> Rows:
    first, last = max(0, row - width // 2), min(len(prefixes) - 1, row + width // 2)
    return np.arange(first, last + 1, dtype=np.intp)
