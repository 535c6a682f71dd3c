"""Small problems of equal stages, and orders written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipecompile.ir.schedule import Action, Schedule, WeightVersions
from pipecompile.schedule.asynchronous_versions import DOUBLE_BUFFERED, STASHED, VERTICAL_SYNC
from pipecompile.schedule.problem import PlacedProblem, StageCosts

RULES = (STASHED, VERTICAL_SYNC, DOUBLE_BUFFERED)
# Of runs without end, cut off after so many.
MINIBATCHES = 5
STALE = "does not use version"


def equal(
    placement: Sequence[int], microbatches: int, time: int = 1, hop: int = 0, **more: object
) -> PlacedProblem:
    """Return stages all of whose actions take `time`; messages between ranks take `hop`."""
    apart = [left != right for left, right in pairwise(placement)]
    fields = {
        "costs": (StageCosts(time, time, time, time, recompute_ns=time),) * len(placement),
        "forward_transfer_ns": tuple(hop * away for away in apart),
        "backward_transfer_ns": tuple(hop * away for away in apart),
        "gradient": (True,) * len(apart),
    }
    return PlacedProblem(
        placement=tuple(placement), microbatches=microbatches, **{**fields, **more}
    )  # type: ignore[arg-type]


def order(
    rows: Sequence[str],
    placement: Sequence[int],
    microbatches: int,
    rule: WeightVersions = "synchronous",
) -> Schedule:
    """Return a schedule of rows such as "0F0 0B0"."""
    actions = [[Action.parse(text) for text in row.split()] for row in rows]
    return Schedule.of("planted", microbatches, placement, actions, rule)
