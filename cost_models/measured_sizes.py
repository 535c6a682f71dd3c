"""Which sizes of microbatches are measured, and by which of them another size is judged. Needs no
PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction

__all__ = ["nearest_sizes", "sizes_to_measure"]

MOST_SIZES = 3


def sizes_to_measure(sizes: Collection[int]) -> tuple[int, ...]:
    """Return those of some sizes of microbatches whose costs tell about the others.

    They are the smallest one, the largest one, and the one nearest to their geometric mean; of
    three sizes or fewer all of them.
    """
    ordered = sorted(set(sizes))
    if len(ordered) <= MOST_SIZES:
        return tuple(ordered)
    square = ordered[0] * ordered[-1]  # of the mean

    def distance(size: int) -> Fraction:
        # As a ratio: of 1, 2, 4 and 8 the mean is √8, to which 2 is as near as 4; 2 comes first.
        return Fraction(max(size * size, square), min(size * size, square))

    nearest = min(ordered[1:-1], key=distance)
    return ordered[0], nearest, ordered[-1]


def nearest_sizes(measured: Collection[int], size: int) -> tuple[int, int]:
    """Return the two measured sizes by which a size is judged: those around it, or beside all the
    measured ones the nearest two. At least two must be measured.
    """
    ordered = sorted(set(measured))
    above = next((place for place, each in enumerate(ordered) if each >= size), len(ordered))
    # Measured 1, 4 and 16: a size of 6 or of 32 is judged by 4 and 16, one of 1 by 1 and 4.
    upper = min(max(1, above), len(ordered) - 1)
    return ordered[upper - 1], ordered[upper]
