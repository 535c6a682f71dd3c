"""The amounts of work that count as one second.

A time limit is counted in steps of work and not in seconds, so that the same input gives the same
output on any machine. The rates were measured on one core of 2020.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ACTIONS_PER_SECOND",
    "CUT_UNITS_PER_SECOND",
    "IDEALS_PER_SECOND",
    "INTEGER_SHARE",
    "NODES_PRICED_PER_SECOND",
    "ONE_OF_SEVERAL",
    "PAIRS_PER_SECOND",
    "PRICE_OVERHEAD_NODES",
    "QUICK",
    "ROUND_SECONDS",
    "SECONDS",
    "SHIFTS_PER_SECOND",
    "THOROUGH",
    "UNITS_PER_SECOND",
    "CutEffort",
]

SECONDS = 10.0  # of work on a problem by default
PAIRS_PER_SECOND = 6_000_000  # pairs of ideals in the dynamic program
IDEALS_PER_SECOND = 1_000_000  # ideals enumerated
CUT_UNITS_PER_SECOND = 100_000  # units × boundaries for which minimum cuts are found
UNITS_PER_SECOND = 40_000  # units put in order and laid out
SHIFTS_PER_SECOND = 400_000  # pairs of stages, for each step of boundary shifts
ROUND_SECONDS = 0.005  # the fixed cost of one round of a search
NODES_PRICED_PER_SECOND = 4_000  # nodes of stages that are priced
PRICE_OVERHEAD_NODES = 60  # the fixed cost of one price, in nodes
ACTIONS_PER_SECOND = 2_500  # actions simulated
# CP-SAT's deterministic second takes three to ten seconds.
INTEGER_SHARE = {"max-load": 0.3, "variance": 0.1, "total-load": 0.3}


class CutEffort(NamedTuple):
    """How much is done for one cut: about `seconds` of work, and whether the user is told more: of
    a faster objective, or if there is none what is in the way, and if `is_advised` which other
    options would fit.
    """

    seconds: float
    is_explained: bool
    is_advised: bool = True


THOROUGH = CutEffort(SECONDS, is_explained=True)
# For one of several settings, which a search over these options tries by itself.
ONE_OF_SEVERAL = THOROUGH._replace(is_advised=False)
QUICK = CutEffort(1.0, is_explained=False)  # for one of many plans that are compared
