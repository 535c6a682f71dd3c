"""Simulates a step: when each action happens, what each rank holds, and why it idles.

Each rank performs its row in order, one compute action at a time. An action starts when its rank is
free, and when all its inputs are computed and have arrived. Transfers overlap with compute and with
each other. These rules reproduce table 5 of the Zero Bubble paper (Qi et al., arXiv 2401.10241).
Further rules:

- With `Network.shared` the messages from one rank to another travel one at a time, in the order of
  the actions that produce them. An action's message to the neighbouring stage goes first, then
  those over skips, as the problem lists them.
- With `Network.blocking` a rank sends the messages of an action, one after the other in that same
  order, before it goes on. Its links are then never busy when a message is ready, so that `shared`
  adds nothing.
- A message whose receiver does not occur in the schedule is not sent.
- If `reduce_ns` is not zero, a stage's sum over its replicas starts when its last full backward or
  weight backward ends. The sums of one rank follow each other in that order, beside its compute.
  A step may end with a sum, but not with any other message.
- An optimizer step takes no time. No action waits for a weight version, since the order of each
  rank ensures that it is there; behind a step of a stage with replicas, a rank waits until all of
  them have the gradients that are summed in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.errors import InputError
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import WEIGHT_GRADIENT_KINDS, Action, Event, Kind, Schedule, Timeline
from pipecompile.schedule.execution import execute
from pipecompile.schedule.idle_time import idle_of
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.stages import problem_of_plan

__all__ = ["simulate", "simulate_plan"]


def simulate(problem: PlacedProblem, schedule: Schedule) -> Timeline:
    """Return the timeline of a schedule, with or without its transfers.

    ScheduleError if it deadlocks; InputError if it is for another placement or number of
    microbatches.
    """
    if (schedule.placement, schedule.microbatches) != (problem.placement, problem.microbatches):
        raise InputError(
            f"the schedule is for placement {list(schedule.placement)} and "
            f"{schedule.microbatches} microbatches, the problem for {list(problem.placement)} "
            f"and {problem.microbatches}"
        )
    run = execute(problem, schedule)
    held = tuple(map(problem.held_bytes, schedule.compute))
    sums = tuple(tuple(_reductions(problem, row)) for row in run.events)
    timeline = Timeline(run.events, (), held, sums)
    return Timeline(run.events, idle_of(problem, run, timeline), held, sums)


def simulate_plan(plan: Plan) -> Timeline:
    """Return the timeline that a plan predicts."""
    return simulate(problem_of_plan(plan), plan.schedule)


def _reductions(problem: PlacedProblem, row: Sequence[Event]) -> Iterator[Event]:
    """Yield the sums of a rank's stages, one after another in the order in which they are ready."""
    ready: dict[int, int] = {}  # by stage, in the order of its last gradients
    for (stage, kind, *_), _, end in row:
        if kind in WEIGHT_GRADIENT_KINDS:
            # Only the last gradient counts, and the stage moves to the end of the dictionary.
            ready.pop(stage, None)
            ready[stage] = end
    free = 0
    for stage, end in ready.items():
        if problem.costs[stage].reduce_ns:
            start = max(free, end)
            free = start + problem.costs[stage].reduce_ns
            yield Event(Action(stage, Kind.REDUCE), start, free)
