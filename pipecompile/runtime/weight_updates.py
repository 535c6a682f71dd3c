"""The updates of a run whose optimizers step while microbatches are in flight.

The weights of each stage are updated by themselves, in two actions. REDUCE closes an update: the
gradients of its microbatches are complete, are summed over the replicas and over the ranks that
hold the same parameter, and divided. STEP is the optimizer's. Between them may lie other actions:

    rank 0   … B3 REDUCE(2) F7 B4 F8 B5 STEP(2) F9 …        version 2 is made when F9 needs it

So ranks may exchange what a step needs of all of them, such as the norm of all gradients, while
they go on with other microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from pipecompile.runtime.deadline import Deadline
from pipecompile.runtime.gradients import divide_gradients
from pipecompile.runtime.norm import clip_to_norm
from pipecompile.runtime.replicas import ReplicaSums
from pipecompile.runtime.ties import Ties
from pipecompile.runtime.weight_versions import WeightVersions

__all__ = ["GradientExchange", "OwnedWeights", "WeightUpdates"]

Gradients = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class GradientExchange:
    """With whom this process sums gradients, and norms.

    `replicas` are the ranks with the same stages, `ties` the tied parameters with the ranks that
    hold them, `pipeline` those of this pipeline; without them there are none. The ranks of a tie
    are those of one pipeline: if replicas are among them, `ties_have_replicas`. `is_distributed`
    says whether other ranks have other stages, and `device` is where they exchange norms.
    """

    deadline: Callable[[], Deadline] = Deadline
    replicas: dist.ProcessGroup | None = None
    ties: Ties = ()
    ties_have_replicas: bool = False
    pipeline: dist.ProcessGroup | None = None
    is_distributed: bool = False
    device: torch.device | None = None


@dataclass
class OwnedWeights:
    """The parameters that belong to one stage, in all versions, with what updates them.

    `norm_share` is how much of the square of their norm counts here in the norm of all: one r-th if
    r ranks have the same gradients, and nothing of a copy of an earlier stage's parameter, which
    counts there. `closed` are updates by the version that each will make.
    """

    versions: WeightVersions
    optimizer: torch.optim.Optimizer | None
    scheduler: LRScheduler | None = None
    norm_share: float = 1.0
    closed: dict[int, _ClosedUpdate] = field(default_factory=dict)

    def update(self) -> None:
        """Step the optimizer, and then the scheduler of its learning rate."""
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


@dataclass
class _GradientOnItsWay:
    """The gradient of a tied parameter on its way, and on how many of the `ranks` it is missing, of
    which this one may be one.
    """

    parameter: nn.Parameter
    is_missing: bool
    missing: Tensor
    ranks: int
    works: list[dist.Work]

    def wait(self, deadline: Deadline) -> None:
        """Wait until it is there; it stays None if no rank has one."""
        while self.works:
            deadline.wait(self.works.pop())
        # Read only here, since a GPU must wait for it.
        if self.is_missing and self.missing.item() == self.ranks:
            self.parameter.grad = None


@dataclass
class _ClosedUpdate:
    """The gradients of an update, and the sums over ranks that some of them still wait for."""

    tied: list[_GradientOnItsWay]
    gradients: Gradients = field(default_factory=dict)

    def wait(self, deadline: Deadline) -> None:
        """Wait for the sums; the gradients must be on their parameters."""
        while self.tied:
            self.tied.pop().wait(deadline)


@dataclass
class _Norm:
    """The norm of all gradients of an update to the second power, while ranks sum it."""

    power: Tensor | None = None
    works: list[dist.Work] = field(default_factory=list)


class WeightUpdates:
    """Sums the gradients of microbatches, and updates the weights of stages with them.

    `weights` are by the stage that owns them. The gradients of an update are divided by `divisor`;
    with `max_norm` they are then scaled so that their norm, over all stages, is at most that.
    """

    def __init__(
        self,
        weights: Mapping[int, OwnedWeights],
        divisor: float,
        exchange: GradientExchange,
        max_norm: float | None = None,
    ) -> None:
        self.weights = weights
        self._divisor = divisor
        self._exchange = exchange
        self._max_norm = max_norm
        self._groups = dict(exchange.ties)
        # By version and stage, since a parameter may be read by several stages.
        self._sums: dict[int, dict[int, Gradients]] = defaultdict(lambda: defaultdict(dict))
        self._norms: dict[int, _Norm] = defaultdict(_Norm)

    def continue_sums(
        self, stage: int, version: int, leaves: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Let the backward of a microbatch add to what is summed already, by its `leaves`."""
        # With three microbatches in an update, autograd adds to the memory of the first gradient:
        #
        #     backward of 0    leaf 0 .grad: None    → g0
        #     backward of 1    leaf 1 .grad: g0      → g0 + g1
        #     backward of 2    leaf 2 .grad: g0 + g1 → (g0 + g1) + g2
        #
        # which is the order of additions, and so the rounding, of one parameter that sees all
        # three.
        sums = self._sums[version][stage]
        for parameter, leaf in leaves.items():
            leaf.grad = sums.get(parameter)

    def keep_sums(self, stage: int, version: int, leaves: Mapping[nn.Parameter, Tensor]) -> None:
        """Keep the sums that the backward has left on `leaves`."""
        self._sums[version][stage] = {
            parameter: leaf.grad for parameter, leaf in leaves.items() if leaf.grad is not None
        }

    def close(self, owner: int, version: int) -> None:
        """Complete the gradients of the update that makes `version`."""
        weights = self.weights[owner]
        parameters = weights.versions.parameters
        self._put_on(parameters, version)
        self._sum_over_replicas(owner, parameters)
        # Before the sums over ties begin, which write to the same memory until somebody waits for
        # them.
        divide_gradients(parameters, self._divisor)
        closed = _ClosedUpdate([self._sum_tied(p) for p in parameters if p in self._groups])
        weights.closed[version] = closed
        if self._max_norm is not None and weights.norm_share:
            # The owner closes after all who have copies, so what it waits for is on its way.
            closed.wait(self._exchange.deadline())
            self._begin_norm(weights, version)
        closed.gradients = _taken(parameters)

    def step(self, owner: int, version: int, unfinished: int) -> None:
        """Make `version` of the weights; microbatches from `unfinished` on have not gone back."""
        weights = self.weights[owner]
        closed = weights.closed.pop(version)
        for parameter, gradient in closed.gradients.items():
            parameter.grad = gradient
        closed.wait(self._exchange.deadline())
        if self._max_norm is not None:
            gradients = [p.grad for p in weights.versions.parameters if p.grad is not None]
            clip_to_norm(gradients, self._norm(version), self._max_norm)
        weights.versions.step(weights.update, unfinished)
        _taken(weights.versions.parameters)

    def _put_on(self, parameters: Sequence[nn.Parameter], version: int) -> None:
        """Put on the parameters the sums of all stages here, the last stage's first."""
        by_stage = [sums for _, sums in sorted(self._sums[version].items(), reverse=True)]
        for parameter in parameters:
            parts = [sums.pop(parameter) for sums in by_stage if parameter in sums]
            # Not `sum(parts)`, which begins with the number 0: 0 + (−0.0) is 0.0 and not −0.0.
            parameter.grad = sum(parts[1:], parts[0]) if parts else None
        if not any(by_stage):
            del self._sums[version]

    def _sum_over_replicas(self, owner: int, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over the replicas of a stage; what a tie sums over them is left out."""
        exchange = self._exchange
        if exchange.replicas is None:
            return
        ties = self._groups if exchange.ties_have_replicas else ()
        summed = {owner: [parameter for parameter in parameters if parameter not in ties]}
        sums = ReplicaSums(summed, (), exchange.replicas, exchange.deadline())
        sums.start(owner)
        sums.finish()

    def _sum_tied(self, parameter: nn.Parameter) -> _GradientOnItsWay:
        """Begin to sum the gradient of a parameter over the ranks that hold it."""
        is_missing = parameter.grad is None
        missing = torch.full((), float(is_missing), dtype=torch.float32, device=parameter.device)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        deadline, group = self._exchange.deadline(), self._groups[parameter]
        works = [deadline.start_all_reduce(each, group) for each in (parameter.grad, missing)]
        ranks = dist.get_world_size(group)
        return _GradientOnItsWay(parameter, is_missing, missing, ranks, works)

    def _begin_norm(self, weights: OwnedWeights, version: int) -> None:
        """Add the gradients of a stage to the norm of all, and begin to sum it over ranks."""
        gradients = [p.grad for p in weights.versions.parameters if p.grad is not None]
        norm = self._norms[version]
        # Without gradients it is made on the CPU, where NCCL exchanges nothing.
        total = torch.nn.utils.get_total_norm(gradients).to(self._exchange.device)
        # A norm of 5 that two ranks have alike is 25 / 2 on each of them, and 25 in the sum.
        own = total.double() ** 2 * weights.norm_share
        norm.power = own if norm.power is None else norm.power + own
        if self._exchange.is_distributed:
            work = self._exchange.deadline().start_all_reduce(norm.power, self._exchange.pipeline)
            norm.works.append(work)

    def _norm(self, version: int) -> Tensor:
        """Return the norm of all gradients of an update."""
        norm = self._norms[version]
        while norm.works:
            self._exchange.deadline().wait(norm.works.pop())
        # Those of earlier versions have been used by all weights of this process.
        for done in [each for each in self._norms if each < self._oldest_unmade]:
            del self._norms[done]
        assert norm.power is not None, "all stages have closed the update"
        return norm.power.sqrt()

    @property
    def _oldest_unmade(self) -> int:
        return min(each.versions.newest for each in self.weights.values()) + 1


def _taken(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Remove the gradients of parameters and return them."""
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    for parameter in parameters:
        parameter.grad = None
    return gradients
