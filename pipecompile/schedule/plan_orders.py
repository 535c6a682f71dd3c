"""The orders in which the stages of a plan run, for training and for evaluation."""

from __future__ import annotations

from pipecompile.ir.action_order import dependency_order
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Action, Schedule
from pipecompile.schedule.dependencies import compute_dependencies
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.stages import problem_of_stages
from pipecompile.schedule.transfers import add_transfers

__all__ = ["PlanOrders"]


class PlanOrders:
    """The orders of one plan, by the number of microbatches; each is computed once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._evaluations: dict[int, Schedule] = {}
        self._actions: dict[int, list[Action]] = {}

    def evaluation(self, microbatches: int) -> Schedule:
        """Return a schedule that sends each microbatch once through the stages, on the plan's
        ranks.
        """
        if microbatches not in self._evaluations:
            compute = generate("forward-only", self._plan.schedule.placement, microbatches)
            self._evaluations[microbatches] = add_transfers(self._problem(compute), compute)
        return self._evaluations[microbatches]

    def actions(self, schedule: Schedule) -> list[Action]:
        """Return the compute actions of all ranks, each after the actions whose results it uses."""
        if schedule.microbatches not in self._actions:
            dependencies = compute_dependencies(self._problem(schedule), schedule)
            self._actions[schedule.microbatches] = [
                action for _, action in dependency_order(schedule.compute, dependencies)
            ]
        return self._actions[schedule.microbatches]

    def _problem(self, schedule: Schedule) -> PlacedProblem:
        return problem_of_stages(
            self._plan.stages, self._plan.links, schedule.placement, schedule.microbatches
        )
