"""The part of a plan that this process runs."""

from __future__ import annotations

from pipecompile.ir.plan import Plan
from pipecompile.runtime import world

__all__ = ["LocalShare"]


class LocalShare:
    """All stages of a plan, or under torchrun those of this rank, and the parameters that they
    hold.

    `is_distributed` says whether there are several processes, `stages` are the indices of the
    stages here, and `holders` are the stages that hold each parameter and buffer, by every name
    that it has.
    """

    def __init__(self, plan: Plan) -> None:
        self.is_distributed = world.size() > 1
        placement = plan.schedule.placement
        self.stages = [
            index
            for index, rank in enumerate(placement)
            if not self.is_distributed or rank == world.rank()
        ]
        self.holders: dict[str, tuple[int, ...]] = {
            name: parameter.stages
            for parameter in plan.parameters
            for name in (parameter.name, *parameter.aliases)
        }

    def holds(self, name: str) -> bool:
        """Whether the parameter or buffer `name` is here."""
        # The forward may not use a parameter: no stage reads it, and it stays with the first one.
        return not self.is_distributed or not set(self.holders.get(name, (0,))).isdisjoint(
            self.stages
        )
