"""The named schedules: per stage, the order of its compute actions.

Backwards run in microbatch order on every rank, so that gradients accumulate in the order of the unsplit run. A
recomputing stage runs its forward once more (R) right before each backward; R needs nothing from the next stage, so
it fills the wait for the gradient. The last stage never recomputes: its backward follows its forward at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipecompile.errors import InputError
from pipecompile.ir.schedule import Action, Kind, Schedule

__all__ = ["NAMES", "forward_only", "generate", "gpipe", "in_flight", "one_f_one_b"]

Rows = tuple[tuple[Action, ...], ...]


def gpipe(stages: int, microbatches: int, recompute: bool) -> Rows:
    """All forwards, then all backwards (Huang et al., GPipe, arXiv 1811.06965, figure 2c).

    stage 0   F0 F1 F2 .  .  .  .  B0 B1 B2
    stage 1   .  F0 F1 F2 .  .  B0 B1 B2 .
    stage 2   .  .  F0 F1 F2 B0 B1 B2 .  .
    """
    return tuple(
        (
            *_forwards(stage, range(microbatches)),
            *_backwards(stage, range(microbatches), recompute and stage < stages - 1),
        )
        for stage in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int, recompute: bool) -> Rows:
    """One forward, one backward (PipeDream-Flush; Narayanan et al., arXiv 2104.04473, figure 4).

    stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """
    return tuple(_one_f_one_b_row(stage, stages, microbatches, recompute) for stage in range(stages))


def _one_f_one_b_row(stage: int, stages: int, microbatches: int, recompute: bool) -> tuple[Action, ...]:
    ahead = in_flight("1f1b", stages, microbatches, stage)
    row = _forwards(stage, range(ahead))
    for microbatch in range(microbatches):
        row += _backwards(stage, range(microbatch, microbatch + 1), recompute and stage < stages - 1)
        row += _forwards(stage, range(microbatch + ahead, min(microbatch + ahead + 1, microbatches)))
    return tuple(row)


def forward_only(stages: int, microbatches: int, recompute: bool = False) -> Rows:
    """Every microbatch once through every stage, as an evaluation needs it; there is nothing to recompute."""
    return tuple(tuple(_forwards(stage, range(microbatches))) for stage in range(stages))


def _forwards(stage: int, microbatches: Sequence[int]) -> list[Action]:
    return [Action(stage, Kind.FORWARD, microbatch) for microbatch in microbatches]


def _backwards(stage: int, microbatches: Sequence[int], recompute: bool) -> list[Action]:
    kinds = (Kind.RECOMPUTE, Kind.BACKWARD) if recompute else (Kind.BACKWARD,)
    return [Action(stage, kind, microbatch) for microbatch in microbatches for kind in kinds]


_GENERATORS = {"1f1b": one_f_one_b, "forward-only": forward_only, "gpipe": gpipe}
NAMES = tuple(_GENERATORS)


def generate(name: str, placement: Sequence[int], microbatches: int, recompute: bool) -> Schedule:
    """The compute actions of the schedule `name`; `placement[stage]` is the rank, one stage on each."""
    _refuse_unknown(name)
    rank, held = Counter(placement).most_common(1)[0]
    if held > 1:
        raise InputError(f"schedule {name!r} runs one stage on a rank, but rank {rank} would hold {held}")
    rows = _GENERATORS[name](len(placement), microbatches, recompute)
    by_rank = [rows[placement.index(rank)] for rank in range(len(placement))]
    return Schedule.of(name, microbatches, placement, by_rank)


def in_flight(name: str, stages: int, microbatches: int, stage: int) -> int:
    """How many microbatches `stage` holds between forward and backward at most."""
    _refuse_unknown(name)
    depth = {"1f1b": stages - stage, "forward-only": 1, "gpipe": microbatches}[name]
    return min(depth, microbatches)


def _refuse_unknown(name: str) -> None:
    if name not in _GENERATORS:
        raise InputError(f"schedule {name!r} is not known; choose one of {', '.join(NAMES)}")
