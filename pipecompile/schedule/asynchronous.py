"""Schedules that never empty the pipeline: 1F1B in which the optimizer steps while microbatches are on their way.

Version 0 of a stage's weights is the initial one, and each optimizer step makes the next. `0F3@1` is a forward with
version 1, and `0STEP3@2` the step behind microbatch 3 that makes version 2. A backward, and a recompute, use the
version of their own forward. All numbers count from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pipecompile.ir.schedule import Action, Kind, WeightVersions

__all__ = ["DOUBLE_BUFFERED", "STASHED", "VERTICAL_SYNC", "VersionRule", "with_versions"]


@dataclass(frozen=True, slots=True)
class PipelineSize:
    """How many ranks, each with one stage, and how many microbatches."""

    ranks: int
    microbatches: int


@dataclass(frozen=True, slots=True)
class VersionRule:
    """Which weights a microbatch sees. `version(pipeline, stage, microbatch)`; `update(pipeline, microbatch)` is the
    number of the optimizer step that its gradient is part of.
    """

    weight_versions: WeightVersions
    version: Callable[[PipelineSize, int, int], int]
    update: Callable[[PipelineSize, int], int]


def _stashed(pipeline: PipelineSize, stage: int, microbatch: int) -> int:
    """max(0, j − (p − s) + 1): the stage's latest, as p − s forwards lead over the backwards, each with its step.

    Step j then applies a gradient of version j − (p − 1 − s): the first stage lags p − 1 steps, the last one none
    (Harlap et al., PipeDream, arXiv 1806.03377; SOSP 2019, section 3.3).
    """
    return max(0, microbatch - (pipeline.ranks - stage) + 1)


def _vertical_sync(pipeline: PipelineSize, stage: int, microbatch: int) -> int:
    """max(0, j − p + 1) on every stage: the version that the first one had as the microbatch entered (ibidem)."""
    return _stashed(pipeline, 0, microbatch)


def _each(pipeline: PipelineSize, microbatch: int) -> int:
    return microbatch


def _double_buffered(pipeline: PipelineSize, stage: int, microbatch: int) -> int:
    """max(0, u − 1) for a microbatch of update u: W(u + 1) = W(u) − ν ∇f(W(u − 1)), a delay of one everywhere.

    (Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503, section 3.1.)
    """
    return max(0, _coalesced(pipeline, microbatch) - 1)


def _coalesced(pipeline: PipelineSize, microbatch: int) -> int:
    """As many updates as can have p microbatches each, the least that the paper allows, nearly equal in length."""
    updates = max(1, pipeline.microbatches // pipeline.ranks)
    return microbatch * updates // pipeline.microbatches


STASHED = VersionRule("stashed", _stashed, _each)
VERTICAL_SYNC = VersionRule("vertical-sync", _vertical_sync, _each)
DOUBLE_BUFFERED = VersionRule("double-buffered", _double_buffered, _coalesced)


def with_versions(
    row: Iterable[Action], version_rule: VersionRule, ranks: int, microbatches: int
) -> Iterator[Action]:
    """The actions of a rank with their versions, and an optimizer step behind the last backward of each update."""
    pipeline = PipelineSize(ranks, microbatches)
    for action in row:
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None, "compute actions name their microbatch"
        yield action._replace(version=version_rule.version(pipeline, stage, microbatch))
        update = version_rule.update(pipeline, microbatch)
        ends = (
            microbatch + 1 == microbatches or version_rule.update(pipeline, microbatch + 1) > update
        )
        if action.kind is Kind.BACKWARD and ends:
            yield Action(stage, Kind.STEP, microbatch, update + 1)
