"""The model of a plan at the granularity of blocks: which of them make up each stage, and what
they take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Plan
from pipecompile.ir.stage import Stage

__all__ = ["StageBlock", "StageRow", "stage_rows"]

# Hues of neighbouring stages are a golden angle apart, so that each one differs from many others.
_GOLDEN_ANGLE = 137.508


@dataclass(frozen=True)
class StageBlock:
    """The part of a block that lies in one stage: forward and backward of a microbatch in `ns`.

    `is_cut` says that other stages have parts of it too.
    """

    path: str
    ns: int
    is_cut: bool

    @property
    def name(self) -> str:
        """What stands on it: h.0 for transformer.h.0, and wte for transformer.wte."""
        parts = self.path.split(".")
        return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:]) or "model"


@dataclass(frozen=True)
class StageRow:
    """A stage, its rank, its blocks in the order of the forward, and the extra time of recompute
    and encodings.
    """

    stage: int
    rank: int
    blocks: Sequence[StageBlock]
    extra_ns: int

    @property
    def ns(self) -> int:
        """What a microbatch takes in all of it."""
        return sum(block.ns for block in self.blocks) + self.extra_ns

    @property
    def hue(self) -> int:
        """The angle of its colour, in degrees."""
        # Stages 0, 1 and 2 have 210 (blue), 348 (red) and 125 (green).
        return round(210 + self.stage * _GOLDEN_ANGLE) % 360


def stage_rows(plan: Plan) -> list[StageRow]:
    """Return the stages of a plan with their blocks; none if its file does not have the blocks.

    Plans of older versions do not say which of a stage's nodes lie in which module.
    """
    if not all(stage.module_runs for stage in plan.stages):
        return []
    times = [_block_times(stage) for stage in plan.stages]
    stages_of_block = Counter(path for blocks in times for path in blocks)
    return [
        StageRow(
            index,
            plan.schedule.placement[index],
            [StageBlock(path, ns, stages_of_block[path] > 1) for path, ns in blocks.items()],
            stage.extra_ns,
        )
        for index, (stage, blocks) in enumerate(zip(plan.stages, times, strict=True))
    ]


def _block_times(stage: Stage) -> dict[str, int]:
    times: dict[str, int] = {}
    for run in stage.module_runs:
        # transformer.h.3.attn and transformer.h.3.mlp are both of transformer.h.3.
        path = block_of(run.module)
        times[path] = times.get(path, 0) + run.ns
    return times
