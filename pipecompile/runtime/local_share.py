"""The part of a plan that this process runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipecompile.ir.plan import Plan
from pipecompile.ir.stage_ranks import stages_on
from pipecompile.runtime.place import RankPlace, device_of_this_rank

__all__ = ["LocalShare"]


class LocalShare:
    """All stages of a plan, or with several processes those of this rank, and what they hold.

    `place` says where this process is, `stages` are the indices of the stages here, and `holders`
    are the stages that hold each parameter and buffer, by every name that it has; `first_names` has
    the first name for every other one.
    """

    def __init__(self, plan: Plan, place: RankPlace) -> None:
        self.place = place
        self.is_distributed = place.is_distributed
        self._placement = plan.schedule.placement
        self.stages = list(range(plan.k))
        if self.is_distributed:
            self.stages = list(stages_on(self._placement, place.rank))
        self._first_holder_of: frozenset[str] | None = None
        self.holders: dict[str, tuple[int, ...]] = {
            name: parameter.stages
            for parameter in plan.parameters
            for name in (parameter.name, *parameter.aliases)
        }
        self.first_names: dict[str, str] = {
            alias: parameter.name for parameter in plan.parameters for alias in parameter.aliases
        }

    @property
    def device_for_meta(self) -> torch.device:
        """Where a model that was built on the meta device runs here."""
        own = device_of_this_rank() if self.is_distributed else None
        return own or torch.device("cpu")

    def holds(self, name: str) -> bool:
        """Return whether the parameter or buffer `name` is here."""
        # The forward may not use a parameter: no stage reads it, and it stays with the first one.
        stages = self.holders.get(name, (0,))
        return not self.is_distributed or not set(stages).isdisjoint(self.stages)

    def named_state(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers of `model` that are here, by their first name."""
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if self.holds(name):
                yield name, value

    def divide(self, first_holder_of: frozenset[str]) -> None:
        """Note that processes hold parts of what their stages hold; of these names this process is
        the first with its part.
        """
        self._first_holder_of = first_holder_of

    def counts(self, name: str) -> bool:
        """Return whether this process is the one that saves its part of `name`, and that counts it
        in sums over all processes: of what several hold alike, such as tied parameters, one does.
        """
        if self._first_holder_of is not None:
            return name in self._first_holder_of
        # Of the replicas of a stage the first one.
        # A tied parameter of the stages (0, 3) is on two ranks, and counts on that of stage 0
        # only: in a norm its gradient, which is the same on both, would count twice.
        owner = self._placement[self.holders.get(name, (0,))[0]]
        return not self.is_distributed or (owner == self.place.rank and self.place.is_first)

    def saved_from(self, name: str) -> int:
        """Return the process whose value of a parameter or buffer is the one to save: the owner in
        the first replica.
        """
        if not self.is_distributed:
            return 0
        return self.place.pipelines[0][self._placement[self.holders.get(name, (0,))[0]]]
