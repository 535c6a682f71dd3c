"""A step, simulated: when each action happens, what each rank holds, and why it idles.

Each rank performs its row in order, one compute action at a time. An action starts when its rank is free and all
that it needs has ended and, if that was on another rank, arrived. Transfers overlap with compute and with each
other. These rules reproduce table 5 of the Zero Bubble paper (Qi et al., arXiv 2401.10241). Besides:

- With `Network.shared` the messages from one rank to another travel one at a time, in the order of the actions that
  make them; of one action first that to the neighbouring stage, then those over skips, as the problem lists them.
- With `Network.blocking` a rank sends what an action made, one message after the other in that same order, before it
  goes on. Its links are then never busy when a message is ready, so `shared` adds nothing.
- A message whose receiver does not occur in the schedule is not sent.
- A stage's data-parallel sum starts with the end of its last full backward or gradients of weights, if `reduce_ns` is
  not zero; those of one rank follow each other in that order, beside its compute. Sums, but no other messages, can
  be what a step ends with.
- An optimizer's step takes no time, and no action waits for a version of the weights: the order says it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.errors import InputError
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import WEIGHT_GRADIENT_KINDS, Action, Event, Kind, Schedule, Timeline
from pipecompile.schedule.execution import execute
from pipecompile.schedule.idle import idle_of
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.stages import problem_of_plan

__all__ = ["simulate", "simulate_plan"]


def simulate(problem: PlacedProblem, schedule: Schedule) -> Timeline:
    """The timeline of `schedule`, lowered or not; ScheduleError if it cannot come to its end."""
    if (schedule.placement, schedule.microbatches) != (problem.placement, problem.microbatches):
        raise InputError(
            f"the schedule is for placement {list(schedule.placement)} and {schedule.microbatches} microbatches, "
            f"the problem for {list(problem.placement)} and {problem.microbatches}"
        )
    run = execute(problem, schedule)
    held = tuple(map(problem.held_bytes, schedule.compute))
    sums = tuple(tuple(_reductions(problem, row)) for row in run.events)
    timeline = Timeline(run.events, (), held, sums)
    return Timeline(run.events, idle_of(problem, run, timeline), held, sums)


def simulate_plan(plan: Plan) -> Timeline:
    """The timeline that a plan predicts."""
    return simulate(problem_of_plan(plan), plan.schedule)


def _reductions(problem: PlacedProblem, row: Sequence[Event]) -> Iterator[Event]:
    """The sums of a rank's stages, one after another in the order in which they are ready."""
    ready: dict[int, int] = {}
    for (stage, kind, *_), _, end in row:
        if kind in WEIGHT_GRADIENT_KINDS:
            ready.pop(stage, None)  # the last one counts, and comes last
            ready[stage] = end
    free = 0
    for stage, end in ready.items():
        if problem.costs[stage].reduce_ns:
            start = max(free, end)
            free = start + problem.costs[stage].reduce_ns
            yield Event(Action(stage, Kind.REDUCE), start, free)
