"""Schedules that split the backward on one stage a rank (Qi et al., Zero Bubble, arXiv 2401.10241, section 2).

Only I, the gradients of a stage's inputs, keeps the stage before it waiting. W, those of its weights, can wait itself
and fill what would be a bubble. A microbatch's activations are held from F to W.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir.schedule import Kind
from pipecompile.schedule.tasks import Layout, Task

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """ZB-H1 (section 2.1, figure 3 top): 1F1B's forwards first, and on no rank more memory than 1F1B's first one needs.

    rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return _lagging(layout[rank][0], microbatches, lead=len(layout) - rank, lag=rank)


def zb_h2(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """ZB-H2 (section 2.2, figure 3 bottom): nearly twice the forwards first, and the memory, leave no rank idle.

    rank 0   F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
    rank 1   .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
    rank 2   .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return _lagging(layout[rank][0], microbatches, lead=2 * (len(layout) - rank) - 1, lag=2 * rank)


def _lagging(stage: int, microbatches: int, *, lead: int, lag: int) -> Iterator[Task]:
    """`lead` forwards before the first I, and each W `lag` microbatches after the I of its own."""
    yield from [(stage, Kind.FORWARD)] * lead
    for microbatch in range(microbatches):
        yield stage, Kind.BACKWARD_INPUT
        if microbatch >= lag:
            yield stage, Kind.BACKWARD_WEIGHT
        yield stage, Kind.FORWARD
    yield from [(stage, Kind.BACKWARD_WEIGHT)] * lag
