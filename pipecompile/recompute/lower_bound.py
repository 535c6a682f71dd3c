"""The least time that any regions take which fit: a bound that needs no search."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from pipecompile.memory_model.recompute_problem import RecomputeProblem, StoredTensor

__all__ = ["least_ns"]


def least_ns(problem: RecomputeProblem, in_flight: int, available: int) -> int | None:
    """No regions whose `in_flight` microbatches fit into `available` bytes take fewer ns; None if there are none.

    Every microbatch in flight keeps what is not computed again, so the bytes to be freed are known at the least. Who
    frees a storage runs its producer once more: a fractional knapsack over the producers.
    """
    kept = problem.sent + sum(held.bytes for held in problem.held if held.saved and not held.sent)
    missing = kept - max(0, available) // in_flight
    spent = Fraction(0)
    for rate, size in sorted(_rates(problem)):
        freed = max(0, min(missing, size))
        spent, missing = spent + rate * freed, missing - freed
    return None if missing > 0 else ceil(spent)


def _rates(problem: RecomputeProblem) -> list[tuple[Fraction, int]]:
    """By producer the ns per byte, and the bytes, that may be freed."""
    sizes: dict[int, int] = {}
    free = 0
    for held in problem.held:
        if held.sent or not held.saved or held.made < 0 or held.made in problem.fixed:
            continue
        if _is_early(problem, held):
            free += held.bytes
        else:
            sizes[held.made] = sizes.get(held.made, 0) + held.bytes
    return [
        (Fraction(0), free),
        *((Fraction(problem.ns[place], size), size) for place, size in sizes.items() if size),
    ]


def _is_early(problem: RecomputeProblem, held: StoredTensor) -> bool:
    """Whether only its producer saves it, before its kernels run: they need not run again."""
    return problem.packs[held.made] == "before" and set(held.saved) == {held.made}
