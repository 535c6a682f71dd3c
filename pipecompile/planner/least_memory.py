"""How much memory would do where nothing fits: settings planned under larger caps. Needs no torch.

"Found" is all that is said of it: a longer search, or another setting, may do with less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from pipecompile.errors import InfeasibleError
from pipecompile.ir.plan import Plan
from pipecompile.ir.setting import Setting
from pipecompile.ir.size import exact_size_text

__all__ = ["LeastMemory", "larger_caps", "least_memory"]

FIRST_PARTS = 16  # the first cap is larger by this part
CAPS = 10  # that are tried, each with twice as much more: the last one is 33 times as large


class LeastMemory(NamedTuple):
    """The bytes of the fullest rank of the plan that was found, and its setting."""

    bytes: int
    setting: Setting

    def __str__(self) -> str:
        return (
            f"the least memory that was found to do is {exact_size_text(self.bytes)} a rank, under "
            f"{self.setting}"
        )


def larger_caps(cap: int) -> Iterator[int]:
    """Yield the caps that are tried where `cap` does not do."""
    # For 16 GiB they are 17, 18, 20, 24, 32 GiB and so on.
    for doublings in range(CAPS):
        yield cap + (cap << doublings) // FIRST_PARTS


def least_memory(
    settings: Sequence[Setting],
    cap: int,
    planned: Callable[[Setting, int], Plan],
    has_fitting_cut: Callable[[Setting, int], bool],
) -> LeastMemory | None:
    """Return what the first plan needs that `planned` makes of a setting under a cap above `cap`;
    None if even the largest one gives none.

    The first cap is tried by a plan in any case, since what does with so little more is searched
    for longer. Under larger ones a setting is planned only if it `has_fitting_cut`, which takes
    little time.
    """
    for index, larger in enumerate(larger_caps(cap)):
        for setting in settings:
            if index and not has_fitting_cut(setting, larger):
                continue
            with suppress(InfeasibleError):
                plan = planned(setting, larger)
                return LeastMemory(max(r.total.bound for r in plan.prediction.memory), setting)
    return None
