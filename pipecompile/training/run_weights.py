"""The weights that one process updates in a run without an end, and their versions.

Each belongs to a stage, its owner, which steps it by an optimizer of its own. A tied weight has the
first of its stages as its owner, and others that read it:

    stage 0   embedding ──┐           owners of stage 0: 0
    stage 1   layers      │           owners of stage 1: 1
    stage 2   head  ◄─────┘ tied      owners of stage 2: 0, and 2 if it has weights of its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipecompile.ir.plan import Plan
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.weight_updates import OwnedWeights
from pipecompile.runtime.weight_versions import WeightVersions
from pipecompile.schedule.asynchronous_versions import PipelineSize, rule_of
from pipecompile.schedule.continuous_order import UpdatedWeights
from pipecompile.training.stage_optimizers import StageOptimizers

__all__ = ["RunWeights"]


class RunWeights:
    """What is `owned` here, by owner, and the `rule` by which microbatches read versions of it.

    `optimizers` step it. With `max_norm` no update ends before all gradients of it are there.
    """

    def __init__(
        self,
        plan: Plan,
        share: LocalShare,
        owned: Mapping[int, Sequence[nn.Parameter]],
        optimizers: StageOptimizers,
        max_norm: float | None,
    ) -> None:
        rule = rule_of(plan.schedule.weight_versions)
        assert rule is not None, "synchronous schedules are trained by steps"
        self.rule = rule
        self.size = PipelineSize.of(plan.schedule.placement, plan.microbatches)
        self._name = plan.schedule.name
        self._share = share
        self._optimizers = optimizers
        self._max_norm = max_norm
        self.by_owner = {owner: self._weights(owner, each) for owner, each in owned.items()}

    @property
    def turns(self) -> int:
        """The number of processes that take the microbatches of the stages here in turns."""
        share = self._share
        return self.size.replicas[share.stages[0]] if share.is_distributed else 1

    @property
    def conditions(self) -> tuple[Any, ...]:
        """The schedule, the number of stages, that of microbatches, and the ranks of each stage if
        some have several, which decide the versions of weights.
        """
        replicas = self.size.replicas if self.size.has_replicas else ()
        return self._name, self.size.stages, self.size.microbatches, *replicas

    def older_versions(self, owner: int, done: int) -> range:
        """Return by how many updates the versions lie before the newest that the weights of a stage
        still need after `done` minibatches.
        """
        # With three stages, PipeDream and one microbatch in a minibatch, stage 0 after five: the
        # newest version is 5, and the next microbatch reads 3. So 4 and 3 are kept, 1 and 2
        # before the newest.
        microbatch = done * self.size.microbatches
        newest = self.rule.update(self.size, microbatch)
        oldest = self.rule.version(self.size, owner, microbatch)
        return range(1, newest - oldest + 1)

    def restore(self, done: int, older: Mapping[int, Mapping[int, tuple[Tensor, ...]]]) -> None:
        """Have the versions that there are after `done` minibatches: the parameters are the newest
        one, and `older` ones are given by owner and by how many updates they lie before it.
        """
        newest = self.rule.update(self.size, done * self.size.microbatches)
        for owner, weights in self.by_owner.items():
            before = {newest - lag: values for lag, values in older.get(owner, {}).items()}
            weights.versions.restore(before, newest)

    def forget_older(self) -> None:
        """Free all versions but the newest."""
        for weights in self.by_owner.values():
            weights.versions.forget_older()

    def owners(self, module: nn.Module) -> list[int]:
        """Return the stages that own parameters which `module` reads."""
        read = set(module.parameters())
        return [
            owner
            for owner, weights in self.by_owner.items()
            if not read.isdisjoint(weights.versions.parameters)
        ]

    def updated_by(self, stage: int) -> list[UpdatedWeights]:
        """Return the weights that a stage updates: its own, and on a rank all that are there."""
        owners = self.by_owner if self._share.is_distributed else [stage]
        # What belongs to an earlier stage is complete only when that one has closed the update too.
        return [
            UpdatedWeights(owner, deferred=owner != stage or self._max_norm is not None)
            for owner in owners
        ]

    def _weights(self, owner: int, parameters: Sequence[nn.Parameter]) -> OwnedWeights:
        version = partial(self.rule.version, self.size, owner)
        return OwnedWeights(
            WeightVersions(parameters, version),
            self._optimizers.optimizers.get(owner),
            self._optimizers.schedulers.get(owner),
            norm_share=1 / self.turns if owner in self._share.stages else 0,
        )
