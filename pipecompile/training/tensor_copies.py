"""The tensors that several processes hold: what several stages read, and all of a replica.

    replica 0    rank 0: embedding   rank 1: head      the embedding is tied to the head:
    replica 1    rank 2: embedding   rank 3: head      all four ranks hold one parameter

All copies begin with the same values, and their gradients are summed in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile.frontend.target import Target
from pipecompile.graph.model_state import named_state
from pipecompile.ir.plan import Plan
from pipecompile.runtime.communication_hook import CommunicationHook
from pipecompile.runtime.deadline import Deadline
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.model_state import set_to_that_of
from pipecompile.runtime.replicas import ReplicaSums
from pipecompile.runtime.sharded_stages import ShardedStages
from pipecompile.runtime.ties import Ties, tie_groups
from pipecompile.runtime.weight_updates import GradientExchange
from pipecompile.training.eager_stages import tied_parameters
from pipecompile.training.program import Program

__all__ = ["TensorCopies"]


class TensorCopies:
    """The copies of which this process holds one.

    `planned` is the program of the plan. `stage_replicas` are the processes that take the
    microbatches of its stage in turns, None if there are no others.
    """

    def __init__(
        self,
        plan: Plan,
        target: Target,
        share: LocalShare,
        planned: Program,
        stage_replicas: dist.ProcessGroup | None,
    ) -> None:
        self._plan = plan
        self._target = target
        self._share = share
        self._planned = planned
        self._stage_replicas = stage_replicas

    @cached_property
    def ties(self) -> Ties:
        """The tied parameters of this process that are trained, and who else holds each."""
        return [
            (self._tied[name], group)
            # Sorted, since ranks must start the sums of their common ties in one order.
            for name, group in sorted(self._tie_groups.items())
            if name in self._tied and self._share.holds(name) and self._tied[name].requires_grad
        ]

    def forget(self) -> None:
        """Forget the parameters, since the model has others now."""
        for name in ("_tied", "ties"):
            vars(self).pop(name, None)

    def equalise(self) -> None:
        """Set copies of tied parameters to the owner's, and replicas to the first one's values."""
        self._equalise_ties()
        self._equalise_replicas()

    def replica_sums(
        self,
        program: Program,
        sharded: ShardedStages | None,
        hook: CommunicationHook | None,
        deadline: Deadline,
    ) -> ReplicaSums | None:
        """Return what sums the gradients of a step over replicas, None without any.

        Of stages that are `sharded`, FSDP2 sums what it manages. A user's `hook` may sum the rest.
        """
        group = self._share.place.replica_group or self._stage_replicas
        if group is None and sharded is None:
            return None
        managed: Collection[Tensor] = () if sharded is None else sharded.managed
        parameters = {
            index: [p for p in program.stages[index].module.parameters() if p not in managed]
            for index in self._share.stages
        }
        # Also those that only planned stages read: ranks sum them in every mode.
        summed = dict.fromkeys(parameter for parameter, _ in self.ties)
        tied = {*tied_parameters(program, self._target.model_with_loss).values(), *summed}
        own = {
            index: [parameter for parameter in each if parameter not in tied]
            for index, each in parameters.items()
        }
        # A tied gradient is complete in two sums, in this order: over the ranks of a tie in each
        # replica (0 with 1, 2 with 3 in the drawing above), and then over replicas (0 with 2, 1
        # with 3). So it cannot begin with its stage's other gradients.
        # Each once, in the same order on every replica.
        read = [p for each in parameters.values() for p in each if p in tied]
        late = dict.fromkeys([*read, *(p for p in summed if p not in managed)])
        if self._stage_replicas is not None:
            late = {}  # replicas of a stage are among the ranks over which ties are summed
        return ReplicaSums(own, list(late), group, deadline, sharded, hook)

    def exchange(self, deadline: Callable[[], Deadline], device: torch.device) -> GradientExchange:
        """Return with whom this process sums gradients while minibatches are in flight."""
        place = self._share.place
        if not place.is_distributed:
            return GradientExchange()
        return GradientExchange(
            deadline,
            place.replica_group or self._stage_replicas,
            self.ties,
            self._stage_replicas is not None,
            place.pipeline_group,
            is_distributed=len(place.global_ranks) > 1,
            device=device,
        )

    @cached_property
    def _tied(self) -> dict[str, nn.Parameter]:
        return tied_parameters(self._planned, self._target.model_with_loss)

    @cached_property
    def _tie_groups(self) -> dict[str, dist.ProcessGroup]:
        """The process group of the ranks that hold each tensor that several stages read: a tied
        parameter, a buffer or a constant.
        """
        ties = self._planned.ties.items()
        stages = {name: tie.stages for name, tie in ties if len(tie.stages) > 1}
        return tie_groups(stages, self._plan.schedule.placement, self._share.place.pipelines)

    def _equalise_ties(self) -> None:
        """Set all copies of a tensor that several stages read to the owner's: the ranks may have
        initialised theirs differently, or drawn them without a common seed.
        """
        # Constants are no part of the model's state: only the stages have them under their names.
        stages = [self._planned.stages[index].module for index in self._share.stages]
        copies = {name: value for stage in stages for name, value in named_state(stage)}
        copies.update(named_state(self._target.model_with_loss))
        for name, group in self._tie_groups.items():
            readers = self._planned.ties[name].stages
            if not set(readers).isdisjoint(self._share.stages):
                rank = self._plan.schedule.placement[readers[0]]
                owner = self._share.place.global_ranks[rank]
                set_to_that_of(owner, copies[name], group)

    def _equalise_replicas(self) -> None:
        """Set all parameters and buffers to those of the first replica, of the pipeline or of the
        own stage.
        """
        place, group = self._share.place, self._share.place.stage_group or self._stage_replicas
        if group is not None:
            source = place.pipelines[0][place.rank]
            if self._stage_replicas is not None:
                source = dist.get_global_rank(group, 0)
            for _, value in self._share.named_state(self._target.model_with_loss):
                set_to_that_of(source, value, group)
