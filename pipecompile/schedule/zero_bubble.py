"""Schedules that split the backward, with one stage on each rank.

(Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.)

The stage before waits for I only, the gradient of the stage's inputs. W, the gradient of its
weights, can wait, and fills what would be a bubble. The activations of a microbatch are held from
F to W. The drawings are of 3 ranks whose F, I and W take one slot each; a dot is a bubble.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir.schedule import Kind
from pipecompile.schedule.tasks import Layout, Task

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """Yield the tasks of a rank under ZB-H1 (section 2.1, figure 3 top).

    Its forwards lead as in 1F1B, and no rank needs more memory than the first one of 1F1B.

    rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return _tasks(layout[rank][0], microbatches, lead=len(layout) - rank, lag=rank)


def zb_h2(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """Yield the tasks of a rank under ZB-H2 (section 2.2, figure 3 bottom).

    Nearly twice as many forwards lead as in 1F1B. They take nearly twice the memory, and leave no
    rank idle between its first action and its last.

    rank 0   F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
    rank 1   .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
    rank 2   .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return _tasks(layout[rank][0], microbatches, lead=2 * (len(layout) - rank) - 1, lag=2 * rank)


def _tasks(stage: int, microbatches: int, *, lead: int, lag: int) -> Iterator[Task]:
    """Yield `lead` forwards, then I, W and F in turn, each W `lag` microbatches behind its I."""
    # ZB-H1 on rank 1 of 3:  F0 F1 │ I0 F2 │ I1 W0 F3 │ I2 W1 │ I3 W2 │ W3, lead 2 and lag 1.
    # The rank holds lead + lag microbatches at most, since only a W lets one go. The sum is
    # the same on all ranks: 3 here, which the first rank of 1F1B holds too, and 5 under ZB-H2.
    # So the later ranks, which need fewer forwards ahead, spend what they spare on delaying W.
    yield from [(stage, Kind.FORWARD)] * lead
    for microbatch in range(microbatches):
        yield stage, Kind.BACKWARD_INPUT
        if microbatch >= lag:
            yield stage, Kind.BACKWARD_WEIGHT
        yield stage, Kind.FORWARD
    yield from [(stage, Kind.BACKWARD_WEIGHT)] * lag
