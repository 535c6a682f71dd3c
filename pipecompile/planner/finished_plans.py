"""The plans that a joint search made thoroughly, and which is its answer. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipecompile.ir.plan import Plan
from pipecompile.ir.robustness import Robustness
from pipecompile.ir.setting import Setting

__all__ = ["Answer", "FinishedPlan", "answer_of"]


class FinishedPlan(NamedTuple):
    """The plan of a setting, with what each node takes for one of its microbatches, in ns."""

    setting: Setting
    plan: Plan
    node_ns: Mapping[str, int]


class Answer(NamedTuple):
    """The plan of a search with its setting, and under noise how it was chosen among settings."""

    setting: Setting
    plan: Plan
    robustness: Robustness | None


def answer_of(finished: Sequence[FinishedPlan], noise: float | None) -> Answer:
    """Return the plan with the shortest step; under noise that of least regret, of those within 2 %
    of the shortest step that is known.

    Each plan is that of least regret under its own setting, of which another cut may be shorter.
    """
    finished = list(_different(finished))
    if noise is None or len(finished) == 1:
        setting, plan, _ = min(finished, key=lambda each: each.plan.prediction.step_ns)
        return Answer(setting, plan, None)
    # Imported here: it needs numpy, which reading and checking a plan does not.
    from pipecompile.schedule.robust_choice import robust_choice

    place, robustness = robust_choice(
        [each.plan for each in finished],
        [each.node_ns for each in finished],
        noise,
        shortest_ns=min(_shortest_ns(each.plan) for each in finished),
    )
    return Answer(finished[place].setting, finished[place].plan, robustness)


def _different(finished: Sequence[FinishedPlan]) -> Iterator[FinishedPlan]:
    """Yield the plans without those of the same cut: by two objectives it may be the same one."""
    for index, (setting, plan, _) in enumerate(finished):
        known = (each.plan.stages for each in finished[:index] if each.setting == setting)
        if plan.stages not in known:
            yield finished[index]


def _shortest_ns(plan: Plan) -> int:
    """Return the shortest step of the plans that a plan was compared with."""
    known = plan.robustness
    return plan.prediction.step_ns if known is None else known.fastest.nominal_ns
