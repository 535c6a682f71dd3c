"""Which settings are likely to have a plan, and a short one: in that order they are planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from pipecompile.ir.setting import Setting
from pipecompile.planner.likely_step import LikelyStep
from pipecompile.planner.setting_costs import SettingCosts

__all__ = ["Likeliness", "LikelyOrder"]

LIKELY_FILLED = 0.85  # of a rank, by what is known before it is planned: the rest is workspace
FAILURES = 4  # without a plan, after which settings of other numbers of replicas are more likely
MOST_FILLED = 1.0  # beyond which a setting is tried only if nothing else has a plan


class Likeliness(NamedTuple):
    """The sort key of a setting: `doubt` is 0 if it is likely to fit, 1 if it may, else 2. Behind
    it come whether none of several with as many replicas fitted, whether the setting is not likely
    to be better than a plan, the stages on each rank, the likely step, that without messages, and
    what tells which of equal ones takes less time to plan.
    """

    doubt: int
    fails: bool
    is_no_better: bool
    stages_per_rank: int
    step_ns: int
    free_ns: int
    ranks: int
    is_auto: bool


@dataclass
class LikelyOrder:
    """What is guessed of settings by their costs, by what has `planned`, and by what did not fit.

    `least_filled` is by recompute the least share of its memory that a rank was likely to need
    under a setting without a plan. `failures` are such settings by replicas.
    """

    costs: SettingCosts
    planned: Collection[Setting]
    least_filled: dict[str, float] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)

    def note_failed(self, setting: Setting) -> None:
        """Note how full a rank is under a setting for which no cut was found: what holds more is
        not likely to fit either. One that is guessed to hold as much may fit by another order.
        """
        known = self.least_filled.get(setting.recompute, inf)
        self.least_filled[setting.recompute] = min(known, self.costs.likely(setting).filled)
        self.failures[setting.replicas] += 1

    def key(self, setting: Setting) -> Likeliness:
        """Return the sort key of a setting."""
        likely = self.costs.likely(setting)
        failed = self.least_filled.get(setting.recompute, inf)
        doubt = 2 if likely.filled > min(MOST_FILLED, failed) else 0
        return Likeliness(
            max(doubt, int(likely.filled >= LIKELY_FILLED)),
            self._fails(setting.replicas),
            self._is_no_better(setting, likely),
            setting.stages_per_rank,
            likely.step_ns,
            likely.free_ns,
            setting.ranks,
            setting.recompute == "auto",
        )

    def emptiness(self, setting: Setting) -> tuple[int, float]:
        """Return a key by which what is likely to hold the least comes first. Stages alone on their
        ranks come before others: their cuts are found sooner.
        """
        return setting.stages_per_rank, self.costs.likely(setting).filled

    def needs_no_recompute(self, setting: Setting) -> bool:
        """Return whether there is a plan of the setting without the recompute that it has."""
        without = replace(setting, recompute="none")
        return setting != without and without in self.planned

    def _fails(self, replicas: int) -> bool:
        """Return whether several settings with a number of replicas have no plan, and none has."""
        is_planned = any(each.replicas == replicas for each in self.planned)
        return self.failures[replicas] >= FAILURES and not is_planned

    def _is_no_better(self, setting: Setting, likely: LikelyStep) -> bool:
        """Return whether there is a plan under another schedule of the same stages that is likely
        to be no longer and to hold no more, whatever either recomputes.
        """
        free = {"schedule": setting.schedule, "recompute": setting.recompute}
        others = (each for each in self.planned if each.schedule != setting.schedule)
        guesses = (self.costs.likely(each) for each in others if replace(each, **free) == setting)
        return any(
            each.step_ns <= likely.step_ns and each.filled <= likely.filled for each in guesses
        )
