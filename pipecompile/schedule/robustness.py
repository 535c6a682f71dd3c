"""Whether a searched order is still the better one when durations are not quite as stated."""

from __future__ import annotations

import random
from dataclasses import replace

from pipecompile.ir.schedule import Schedule
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.simulator import simulate

__all__ = ["NOISE", "REQUIRED_SHARE", "is_gain_robust"]

NOISE = 0.1
DRAWS = 24
REQUIRED_SHARE = 0.75  # of the draws in which the searched order must be shorter


def is_gain_robust(problem: PlacedProblem, searched: Schedule, named: Schedule) -> bool:
    """Return whether `searched` makes the shorter step in three of four draws.

    In a draw every time of the problem is off by up to 10 %. The draws are always the same, so that
    the same problem gives the same plan.
    """
    source = random.Random(0)
    # Both orders meet each draw, so that what differs is the order and not the luck.
    draws = [_disturbed(problem, source) for _ in range(DRAWS)]
    shorter = sum(
        simulate(draw, searched).makespan_ns < simulate(draw, named).makespan_ns for draw in draws
    )
    return shorter >= REQUIRED_SHARE * DRAWS


def _disturbed(problem: PlacedProblem, source: random.Random) -> PlacedProblem:
    """Return the problem with every time multiplied by a factor between 0.9 and 1.1."""

    def disturbed_ns(time_ns: int) -> int:
        return round(time_ns * source.uniform(1 - NOISE, 1 + NOISE))

    def disturbed_costs(stage: StageCosts) -> StageCosts:
        return replace(
            stage,
            forward_ns=disturbed_ns(stage.forward_ns),
            backward_ns=disturbed_ns(stage.backward_ns),
            backward_input_ns=disturbed_ns(stage.backward_input_ns),
            backward_weight_ns=disturbed_ns(stage.backward_weight_ns),
            recompute_ns=disturbed_ns(stage.recompute_ns),
            reduce_ns=disturbed_ns(stage.reduce_ns),
        )

    return replace(
        problem,
        costs=tuple(map(disturbed_costs, problem.costs)),
        forward_transfer_ns=tuple(map(disturbed_ns, problem.forward_transfer_ns)),
        backward_transfer_ns=tuple(map(disturbed_ns, problem.backward_transfer_ns)),
    )
