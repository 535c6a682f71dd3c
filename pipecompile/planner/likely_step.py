"""What the step of a setting is likely to be: a guess that says what to plan first, and no bound.

It is the step of equal stages without transfers, with the recompute that such stages need to fit.
Needs no PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from pipecompile.ir.plan import Options
from pipecompile.planner.setting_bounds import Work
from pipecompile.schedule.named_orders import MAY_SPLIT, generate
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.selection import placements, representative_schedule
from pipecompile.schedule.simulator import simulate

__all__ = ["LikelyStep", "likely_step"]

# After as many microbatches for each rank an order repeats itself.
SIMULATED_ROUNDS = 3


class LikelyStep(NamedTuple):
    """A guess of a step in ns, and of the share of its memory that a rank needs."""

    step_ns: int
    filled: float


def likely_step(work: Work, options: Options, state_bytes: int) -> LikelyStep:
    """Return a guess for plans with these options; all ranks together hold `state_bytes` whatever
    is in flight.
    """
    placement, m = placements(options)[0], options.microbatches
    ranks = max(placement) + 1
    work = _balanced(work, ranks)
    simulated = min(m, SIMULATED_ROUNDS * ranks)
    name = representative_schedule(options, placement)
    step, held = _equal_stages(name, placement, simulated, work)
    caps = options.caps(ranks)
    rest = (m - simulated) * (work.forward_ns + work.backward_ns)
    if caps is None:
        return LikelyStep(step + rest // ranks, 0.0)
    cap = sum(caps) // ranks
    room = cap - state_bytes // ranks
    extra, kept = _recompute(work, options, held, room, len(placement))
    filled = (state_bytes // ranks + kept) / max(1, cap)
    return LikelyStep(step + (rest + m * extra) // ranks, filled)


def _balanced(work: Work, ranks: int) -> Work:
    """Return work of which equal ranks have the loads that unequal ones have of `work`."""
    total = work.forward_ns + work.backward_ns
    if work.busiest_ns * ranks <= total:
        return work
    forward, backward, inner = (
        None if ns is None else ns * work.busiest_ns * ranks // total
        for ns in (work.forward_ns, work.backward_ns, work.input_ns)
    )
    assert forward is not None
    assert backward is not None
    return replace(work, forward_ns=forward, backward_ns=backward, input_ns=inner)


@lru_cache(maxsize=4096)
def _equal_stages(
    name: str, placement: tuple[int, ...], microbatches: int, work: Work
) -> tuple[int, int]:
    """Return the step in ns, and the most that a rank holds in flight, in bytes."""
    stages = len(placement)
    inner = work.backward_ns if work.input_ns is None else work.input_ns
    costs = StageCosts(
        forward_ns=work.forward_ns // stages,
        backward_ns=work.backward_ns // stages,
        backward_input_ns=inner // stages,
        backward_weight_ns=(work.backward_ns - inner) // stages,
        kept_bytes=work.saved_bytes // stages,
        between_bytes=work.saved_bytes // stages,
    )
    free, gradient = (0,) * (stages - 1), (True,) * (stages - 1)
    problem = PlacedProblem(placement, microbatches, (costs,) * stages, free, free, gradient)
    timeline = simulate(problem, generate(name, placement, microbatches))
    return timeline.makespan_ns, max(max(row) for row in timeline.held_bytes)


def _recompute(work: Work, options: Options, held: int, room: int, stages: int) -> tuple[int, int]:
    """Return what all stages recompute of one microbatch in ns, and what a rank then holds.

    Stages of a schedule that may split backwards recompute as a whole or not at all; others free
    the share of what they hold that is too much, by the same share of their forwards.
    """
    if options.recompute == "none" or (options.recompute == "auto" and held <= room):
        return 0, held
    one = work.saved_bytes // stages  # what a stage holds while one microbatch is recomputed
    if options.recompute != "auto" or options.schedule in MAY_SPLIT:
        return work.forward_ns, one
    return work.forward_ns * min(held, held - room) // max(1, held), max(one, min(held, room))
