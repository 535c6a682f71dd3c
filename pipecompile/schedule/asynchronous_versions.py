"""The weight versions of schedules that never empty the pipeline.

In these the optimizer steps while microbatches are on their way. Their order is that of 1F1B:

    rank 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Version 0 of a stage's weights is the initial one, and each optimizer step produces the next one.
`0F3@1` is a forward with version 1, and `0STEP3@2` the step after microbatch 3 that produces
version 2. A backward, and a recompute, use the version of their own forward. All numbers start
at 0. The versions of the forwards above, with p = 3 ranks (stages s) and 4 microbatches j:

                     F0 F1 F2 F3
    stashed   s = 0   0  0  0  1     the latest version of each stage
              s = 1   0  0  1  2
              s = 2   0  1  2  3
    vertical-sync     0  0  0  1     on all stages the version that stage 0 had
    double-buffered   0  0  0  0     all four belong to update 0, which uses version 0

The rules hold for a run without end too, in which minibatches follow each other and microbatches
are numbered through. A stage then holds as many copies of its weights as versions are still read:

                      after each step            copies
    stashed           j + 1 − (p − 1 − s) … j + 1   p − s
    vertical-sync     j + 1 − (p − 1) … j + 1       p
    double-buffered   u, u + 1                      2

Where stages have replicas, an update is that of a minibatch under every rule, since its gradients
are summed over the ranks of a stage. These go on in rounds, of one microbatch each: what round t of
a stage reads is settled by the rounds that have gone back on all of its ranks. Two ranks of stage 0
keep two rounds in flight before one rank of stage 1 (`PipelineSize.depth`). With 2 microbatches in
a minibatch the versions of the forwards are

                     F0 F1 F2 F3 F4 F5
    stashed   s = 0   0  0  0  0  1  1     round 2 begins when round 0 has gone back
              s = 1   0  0  1  1  2  2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipecompile.ir.schedule import Action, Kind, WeightVersions
from pipecompile.ir.stage_ranks import stage_ranks

__all__ = [
    "DOUBLE_BUFFERED",
    "STASHED",
    "VERTICAL_SYNC",
    "PipelineSize",
    "VersionRule",
    "rule_of",
    "with_versions",
]


@dataclass(frozen=True, slots=True)
class PipelineSize:
    """How many ranks each stage has, its `replicas`, and how many microbatches a minibatch.

    A round is one microbatch for each replica of a stage.
    """

    replicas: tuple[int, ...]
    microbatches: int

    @classmethod
    def of(cls, placement: Sequence[int], microbatches: int) -> PipelineSize:
        """Return the size of a pipeline whose stages, or their first replicas, lie there."""
        return cls(tuple(map(len, stage_ranks(placement))), microbatches)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.replicas)

    @property
    def has_replicas(self) -> bool:
        """Whether a stage has several ranks."""
        return max(self.replicas) > 1

    @property
    def least_update(self) -> int:
        """The fewest microbatches that an update has: one, or with replicas a minibatch."""
        return self.microbatches if self.has_replicas else 1

    @property
    def read_ahead(self) -> int:
        """The number of minibatches that the first stage begins before the one ahead is back."""
        # Later stages are no further ahead: (depth − 1) × replicas < ranks from the stage on.
        return -(-self.ahead(0) // self.microbatches)

    def depth(self, stage: int) -> int:
        """Return how many microbatches a rank of a stage keeps in flight: those that come to one
        replica if each rank from this stage on has one (PipeDream's NOAM, arXiv 1806.03377,
        section 3.2).
        """
        # Replicas 2 1: 3 ranks come to 2 replicas, so 2 each, rounded up; stage
        # 1 has 1. Replicas 1 2: the only rank of stage 0 keeps 3 in flight.
        return -(-sum(self.replicas[stage:]) // self.replicas[stage])

    def ahead(self, stage: int) -> int:
        """Return how many microbatches a stage begins before the round ahead of them is back."""
        return (self.depth(stage) - 1) * self.replicas[stage]

    def unread_gradients(self, stage: int) -> int:
        """Return how many gradients a rank of a stage has sent, at most, of which it cannot know
        that they were read; at least 1.

        The gradient of a microbatch was, once its rank of the stage before has sent the microbatch
        that is `depth` of its rounds further. That one is read here by a forward, and another
        `depth` − 1 rounds of this stage later comes its backward.
        """
        if not stage:
            return 1
        # Replicas 2 1, stage 1: that microbatch is 2 × 2 = 4 further. Here it is 4 forwards
        # later, and the backward of the same one directly follows: up to 4 gradients are unread.
        further = self.depth(stage - 1) * self.replicas[stage - 1]
        return max(1, -(-further // self.replicas[stage]) - self.depth(stage) + 1)

    def gone_back(self, stage: int, microbatch: int) -> int:
        """Return how many microbatches have gone back on all ranks of a stage when it begins one:
        those of whole rounds.
        """
        # Replicas 2 1 at stage 0, whose `ahead` is 2:
        # microbatches 0 to 7 begin behind 0 0 0 0 2 2 4 4.
        return max(0, microbatch - microbatch % self.replicas[stage] - self.ahead(stage))


@dataclass(frozen=True, slots=True)
class VersionRule:
    """Which weights a microbatch sees.

    `version(size, stage, microbatch)` is the version that its actions in a stage use, and
    `update(size, microbatch)` the number of the optimizer step that its gradient is part of.
    `copies(size, stage)` is how many versions a stage holds at most, the newest included.
    """

    weight_versions: WeightVersions
    version: Callable[[PipelineSize, int, int], int]
    update: Callable[[PipelineSize, int], int]
    copies: Callable[[PipelineSize, int], int]


def _stashed(size: PipelineSize, stage: int, microbatch: int) -> int:
    """Return the latest version of the stage: without replicas max(0, j − (p − s) + 1).

    p − s forwards precede the first backward of stage s, and a step follows each backward. Step j
    applies a gradient of version j − (p − 1 − s): the first stage lags p − 1 steps behind, the
    last one none (Harlap et al., PipeDream, arXiv 1806.03377; SOSP 2019, section 3.3).
    """
    return size.gone_back(stage, microbatch) // size.least_update


def _vertical_sync(size: PipelineSize, stage: int, microbatch: int) -> int:
    """Return the version that the first stage had as the microbatch entered: max(0, j − p + 1).

    (Harlap et al., PipeDream, as above.)
    """
    return _stashed(size, 0, microbatch)


def _least_update(size: PipelineSize, microbatch: int) -> int:
    return microbatch // size.least_update


def _stashed_copies(size: PipelineSize, stage: int) -> int:
    """Return the newest version, and those that what is ahead of an update still reads."""
    # Rounded up: with 3 ahead and minibatches of 2 the oldest version in use is two behind.
    return 1 - (-size.ahead(stage) // size.least_update)


def _double_buffered(size: PipelineSize, stage: int, microbatch: int) -> int:
    """Return max(0, u − 1) for a microbatch of update u: every gradient is delayed by one update.

    W(u + 1) = W(u) − ν ∇f(W(u − 1)) (Narayanan et al., Memory-Efficient Pipeline-Parallel DNN
    Training, arXiv 2006.09503, section 3.1). That version is there in time if a minibatch has p − 1
    microbatches or more, or as many as the first stage begins ahead.
    """
    return max(0, _update_of_each_minibatch(size, microbatch) - 1)


def _update_of_each_minibatch(size: PipelineSize, microbatch: int) -> int:
    return microbatch // size.microbatches


STASHED = VersionRule("stashed", _stashed, _least_update, _stashed_copies)
VERTICAL_SYNC = VersionRule(
    "vertical-sync", _vertical_sync, _least_update, lambda size, stage: _stashed_copies(size, 0)
)
DOUBLE_BUFFERED = VersionRule(
    "double-buffered", _double_buffered, _update_of_each_minibatch, lambda size, stage: 2
)
_RULES = {rule.weight_versions: rule for rule in (STASHED, VERTICAL_SYNC, DOUBLE_BUFFERED)}


def rule_of(weight_versions: WeightVersions) -> VersionRule | None:
    """Return the rule of that name; None for synchronous weights."""
    return _RULES.get(weight_versions)


def with_versions(row: Iterable[Action], rule: VersionRule, size: PipelineSize) -> Iterator[Action]:
    """Yield the actions of a rank with their versions, and the optimizer steps.

    A step follows the last backward of each update on the rank.
    """
    for action in row:
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None, "compute actions name their microbatch"
        # Recomputes and backwards too: all actions of a microbatch in a stage share its version.
        yield action._replace(version=rule.version(size, stage, microbatch))
        update = rule.update(size, microbatch)
        is_last = rule.update(size, microbatch + size.replicas[stage]) > update
        if action.kind is Kind.BACKWARD and is_last:
            yield Action(stage, Kind.STEP, microbatch, update + 1)
