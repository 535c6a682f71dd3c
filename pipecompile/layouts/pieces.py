"""The pieces that a format keeps whole, such as layers, and the stage that each of them gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipecompile.errors import InputError

__all__ = ["Piece", "rounded_stages", "whole_stages"]


@dataclass(frozen=True)
class Piece:
    """A part of a model that a format names: its name for messages, and its time in each stage that
    it lies in. It can lie in the stages from `first` to `last` only.
    """

    name: str
    ns_by_stage: Mapping[int, int]
    first: int
    last: int

    @property
    def ns(self) -> int:
        """The time of the whole piece."""
        return sum(self.ns_by_stage.values())

    @property
    def stage(self) -> int | None:
        """The stage that it lies in; None if the cut divides it, or it cannot be named there."""
        stages = list(self.ns_by_stage)
        is_whole = len(stages) == 1 and self.first <= stages[0] <= self.last
        return stages[0] if is_whole else None


def whole_stages(pieces: Sequence[Piece], k: int, *, in_order: bool) -> list[int] | str:
    """Return the stage of each piece, or why a format cannot say the cut.

    With `in_order` a format lists pieces in the order of the forward.
    """
    stages: list[int] = []
    for piece in pieces:
        if piece.stage is None:
            return f"{piece.name} lies in {_stages(piece.ns_by_stage)}"
        stages.append(piece.stage)
    if in_order:
        for (left, right), (one, other) in zip(pairwise(stages), pairwise(pieces), strict=True):
            if left > right:
                return f"{one.name} lies in stage {left} and {other.name} before it in {right}"
    empty = sorted(set(range(k)) - set(stages))
    return f"stage {empty[0]} has no part of the model that it names" if empty else stages


def _stages(stages: Mapping[int, int]) -> str:
    numbers = [str(stage) for stage in sorted(stages)]
    return f"stage{'s' * (len(numbers) > 1)} {' and '.join(numbers)}"


def rounded_stages(pieces: Sequence[Piece], k: int) -> list[int]:
    """Return the stages of whole pieces, in their order, of least heaviest load.

    A piece that the cut divides goes to one of the stages between its first and its last one; all
    others stay. InputError if a stage would be left without a piece.
    """
    # best[i]: of the pieces before i in the stages so far, the least heaviest load, and where each
    # stage begins. A stage more takes some pieces more.
    # Pieces of 3, 3, 2 in two stages. After stage 0, best is {1: 3, 2: 6, 3: 8}. Stage 1 then
    # ends at 3 from 1 with max(3, 5), or from 2 with max(6, 2): the least is 5, and stages begin
    # at 0 and 1.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(k):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin, (heaviest, begins) in best.items():
            load = 0
            for end in range(begin, len(pieces)):
                if not pieces[end].first <= stage <= pieces[end].last:
                    break
                load += pieces[end].ns
                choice = max(heaviest, load), (*begins, begin)
                if end + 1 not in longer or choice < longer[end + 1]:
                    longer[end + 1] = choice
        best = longer
    if len(pieces) not in best:
        raise InputError(
            "a stage would be empty if the cut was rounded, as it lies within one part; plan with "
            "granularity=blocks or fewer stages, or export to json, which can say every cut"
        )
    begins = (*best[len(pieces)][1], len(pieces))
    return [stage for stage, (a, b) in enumerate(pairwise(begins)) for _ in range(a, b)]
