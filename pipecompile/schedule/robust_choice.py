"""The plan whose step suffers least from noise, of those that are about the fastest.

The regret of a plan in a draw of costs is what its step is longer than the best one's for that
draw (Savage, "The theory of statistical decision", 1951). A mean would hide the bad days, and the
worst draw is a matter of chance; so plans are compared by the 90th percentile of their regrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipecompile.ir.plan import Plan
from pipecompile.ir.robustness import NoisyStep, Robustness, is_close
from pipecompile.schedule.noisy_steps import Noise, Times, steps_under_noise

__all__ = ["DRAWS", "RobustChoice", "robust_choice"]

DRAWS = 200
PERCENTILE = 90


class RobustChoice(NamedTuple):
    """The place of the chosen plan among those given, and its worth beside the fastest one."""

    place: int
    robustness: Robustness


def robust_choice(
    plans: Sequence[Plan],
    node_ns: Sequence[Mapping[str, int]],
    noise: float,
    *,
    shortest_ns: int | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> RobustChoice:
    """Return which of some plans for one minibatch has the least regret under `noise`.

    Only plans count whose predicted step is within 2 % of the shortest one, or of `shortest_ns` if
    a shorter one is known. `node_ns` has of each plan the times of nodes for one microbatch, and
    `noise` is the relative standard deviation of the factors of devices and nodes
    (`schedule.noisy_steps`). Equal regrets are decided by the 90th percentile of the steps, by the
    predicted step, and by the order of `plans`. The same input gives the same
    answer. There must be a plan within 2 %.
    """
    if shortest_ns is None:
        shortest_ns = min(plan.prediction.step_ns for plan in plans)
    close = [
        index for index, plan in enumerate(plans) if is_close(plan.prediction.step_ns, shortest_ns)
    ]
    drawn = Noise(noise, draws, seed)
    steps = np.stack([steps_under_noise(plans[index], node_ns[index], drawn) for index in close])
    # Steps 10 12 30 of one plan and 11 11 33 of another have regrets 0 1 0 and 1 0 3.
    # The third draw is slow for both, which says nothing about the choice between them.
    regrets = steps - steps.min(axis=0)
    rows = [
        NoisyStep(
            nominal_ns=plans[index].prediction.step_ns,
            p90_ns=_percentile(of_plan),
            regret_ns=_percentile(regret),
        )
        for index, of_plan, regret in zip(close, steps, regrets, strict=True)
    ]
    best = min(range(len(close)), key=lambda row: _preference(rows[row]))
    return RobustChoice(
        close[best],
        Robustness(
            noise=noise,
            draws=draws,
            seed=seed,
            candidates=len(close),
            chosen=rows[best],
            fastest=min(rows, key=lambda row: row.nominal_ns),
        ),
    )


def _preference(row: NoisyStep) -> tuple[int, int, int]:
    return row.regret_ns, row.p90_ns, row.nominal_ns


def _percentile(times: Times) -> int:
    """Return the 90th percentile as one of the times: the ninth of ten in order."""
    # Rounded up: of 25 times the 23rd.
    rank = -(-len(times) * PERCENTILE // 100)
    return int(np.sort(times)[rank - 1])
