"""The steps of a plan under noise: one schedule, played for many draws of its times at once."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import WEIGHT_GRADIENT_KINDS, Action, Kind, Schedule
from pipecompile.schedule.dependencies import TASK_KINDS, dependents
from pipecompile.schedule.execution import execute
from pipecompile.schedule.problem import Network, PlacedProblem
from pipecompile.schedule.stages import problem_of_plan

__all__ = ["Noise", "steps_of_draws", "steps_under_noise"]

Factors = NDArray[np.float64]
"""One factor for each draw."""
Times = NDArray[np.int64]
"""One time in ns for each draw."""


@dataclass(frozen=True)
class Noise:
    """Draws of cost vectors: in each draw every device and every node has a factor of its own.

    A factor is lognormal, with mean 1 and standard deviation `share`. It depends on the seed and on
    the name of what it is for alone. So plans that are compared meet the same draws, whatever lies
    in which stage: a node that is slow in one of them is slow in all.
    """

    share: float
    draws: int
    seed: int
    known: dict[str, Factors] = field(default_factory=dict, compare=False, repr=False)

    def of_device(self, number: int) -> Factors:
        """Return the factor of a rank's device, which is counted over all replicas."""
        return self._factors(f"device {number}")

    def of_nodes(self, times_ns: Iterable[tuple[str, int]]) -> Factors:
        """Return the factor of nodes that run one after another, by their names and times."""
        total_ns, drawn_ns = 0, np.zeros(self.draws)
        for name, time_ns in times_ns:
            if time_ns:
                total_ns += time_ns
                drawn_ns += time_ns * self._factors(f"node {name}")
        return drawn_ns / total_ns if total_ns else np.ones(self.draws)

    def _factors(self, name: str) -> Factors:
        if name not in self.known:
            # A lognormal factor exp(σ·z − σ²/2) has mean 1 and variance exp(σ²) − 1.
            sigma = math.sqrt(math.log1p(self.share**2))
            # A text as seed is hashed by SHA-512, the same in
            # every process; `hash` of a text is not.
            source = random.Random(f"{self.seed} {name}")
            self.known[name] = np.array(
                [source.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(self.draws)]
            )
        return self.known[name]


def steps_under_noise(plan: Plan, node_ns: Mapping[str, int], noise: Noise) -> Times:
    """Return the step of `plan` in ns for each draw.

    `node_ns` are the times of nodes for one microbatch, by which they share the time of their
    stage. A stage takes the product of its device's and its nodes' factors; messages and sums over
    replicas take what they are predicted to take. Replicas wait for the slowest one of them.
    """
    problem, placement = problem_of_plan(plan), plan.schedule.placement
    of_nodes = [
        noise.of_nodes((name, node_ns.get(name, 0)) for name in stage.nodes)
        for stage in plan.stages
    ]
    steps = []
    for first in range(0, plan.replicas * plan.ranks, plan.ranks):
        devices = [noise.of_device(first + rank) for rank in range(plan.ranks)]
        factors = [devices[rank] * nodes for rank, nodes in zip(placement, of_nodes, strict=True)]
        steps.append(steps_of_draws(problem, plan.schedule, factors))
    slowest: Times = np.stack(steps).max(axis=0)
    return slowest


def steps_of_draws(problem: PlacedProblem, schedule: Schedule, factors: Sequence[Factors]) -> Times:
    """Return the makespan in ns for each draw, in which stage s takes `factors[s]` times as long.

    The rules are those of `schedule.simulator`, for messages that overlap with all else. The order
    of each rank is fixed, so one order of all actions suits every draw: each action is played for
    all draws at once.
    """
    assert problem.network == Network(), "plans have no blocking sends and no shared links"
    run = _DrawnRun(problem, schedule, factors)
    rows = [iter(row) for row in schedule.compute]
    for rank in execute(problem, schedule).rank_order:
        run.play(rank, next(rows[rank]))
    return run.makespan_ns()


class _DrawnRun:
    """The ranks while they run: where each stands, and what has arrived so far, in all draws."""

    def __init__(
        self, problem: PlacedProblem, schedule: Schedule, factors: Sequence[Factors]
    ) -> None:
        self.problem = problem
        self.factors = factors
        self.start_ns = np.zeros(len(factors[0]), np.int64)
        self.free_ns = [self.start_ns for _ in schedule.actions]
        # By task and microbatch, as in `schedule.execution`.
        self.arrivals: dict[tuple[int, int | None], Times] = {}
        # By rank and stage, in the order of the stage's last gradient.
        self.gradients_ns: list[dict[int, Times]] = [{} for _ in schedule.actions]
        tasks = {self._task(action) for row in schedule.compute for action in row}
        # What the schedule does not have waits for nothing.
        self.waiting = [[each for each in row if each.task in tasks] for row in dependents(problem)]
        self.durations: dict[tuple[int, Kind], Times] = {}

    def _task(self, action: Action) -> int:
        return TASK_KINDS[action.kind] * self.problem.stages + action.stage

    def _duration_ns(self, action: Action) -> Times:
        key = action.stage, action.kind
        if key not in self.durations:
            exact = self.problem.duration_ns(action) * self.factors[action.stage]
            self.durations[key] = np.rint(exact).astype(np.int64)
        return self.durations[key]

    def play(self, rank: int, action: Action) -> None:
        """Run the next action of a rank, whose inputs are all computed."""
        task, microbatch = self._task(action), action.microbatch
        begin = np.maximum(self.free_ns[rank], self.arrivals.pop((task, microbatch), self.start_ns))
        end = self.free_ns[rank] = begin + self._duration_ns(action)
        # The rank of a target does not matter here: within a rank the transfer takes no time.
        for target, _, transfer_ns, _ in self.waiting[task]:
            before = self.arrivals.get((target, microbatch), self.start_ns)
            self.arrivals[target, microbatch] = np.maximum(before, end + transfer_ns)
        if action.kind in WEIGHT_GRADIENT_KINDS:
            # Only the last gradient counts, and the stage moves to the end of the dictionary.
            self.gradients_ns[rank].pop(action.stage, None)
            self.gradients_ns[rank][action.stage] = end

    def makespan_ns(self) -> Times:
        """Return the end of the last action, or of the last sum over replicas."""
        ends = list(self.free_ns)
        for gradients_ns in self.gradients_ns:
            free = self.start_ns
            for stage, gradient_ns in gradients_ns.items():
                reduce_ns = self.problem.costs[stage].reduce_ns
                if reduce_ns:
                    free = np.maximum(free, gradient_ns) + reduce_ns
            ends.append(free)
        last: Times = np.stack(ends).max(axis=0)
        return last
