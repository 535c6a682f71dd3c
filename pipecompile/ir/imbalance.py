"""How evenly ranks are loaded, as one number."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["imbalance_of"]


def imbalance_of(loads: Sequence[int]) -> float:
    """Return the largest load over the mean load: 1 if all are equal, also if all are zero.

    For loads of 3, 3 and 2 it is 3 / (8 / 3) = 1.125: the largest is 12.5 % over an even cut.
    """
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
