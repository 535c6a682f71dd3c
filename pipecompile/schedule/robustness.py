"""Does a gain survive when the durations are not quite what they were said to be?"""

from __future__ import annotations

import random
from dataclasses import replace

from pipecompile.ir.schedule import Schedule
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.simulator import simulate

__all__ = ["NOISE", "SURVIVES", "is_gain_robust"]

NOISE = 0.1
DRAWS = 24
SURVIVES = 0.75  # of the draws


def is_gain_robust(problem: PlacedProblem, searched: Schedule, named: Schedule) -> bool:
    """Whether `searched` makes the shorter step in three of four draws, every time of `problem` off by up to 10 %."""
    source = random.Random(0)
    draws = [_disturbed(problem, source) for _ in range(DRAWS)]
    shorter = sum(
        simulate(draw, searched).makespan_ns < simulate(draw, named).makespan_ns for draw in draws
    )
    return shorter >= SURVIVES * DRAWS


def _disturbed(problem: PlacedProblem, source: random.Random) -> PlacedProblem:
    def off(time: int) -> int:
        return round(time * source.uniform(1 - NOISE, 1 + NOISE))

    def costs(stage: StageCosts) -> StageCosts:
        return replace(
            stage,
            forward_ns=off(stage.forward_ns),
            backward_ns=off(stage.backward_ns),
            backward_input_ns=off(stage.backward_input_ns),
            backward_weight_ns=off(stage.backward_weight_ns),
            recompute_ns=off(stage.recompute_ns),
            reduce_ns=off(stage.reduce_ns),
        )

    return replace(
        problem,
        costs=tuple(map(costs, problem.costs)),
        forward_transfer_ns=tuple(map(off, problem.forward_transfer_ns)),
        backward_transfer_ns=tuple(map(off, problem.backward_transfer_ns)),
    )
