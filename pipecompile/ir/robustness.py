"""What a plan says of its step under noise: beside the fastest plan of those that were compared."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = ["NoiseShare", "NoisyStep", "Robustness", "is_close"]

NoiseShare = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""A relative standard deviation of times: 0.05 is 5 %."""
WITHIN_PERCENT = 2  # that the nominal step may be longer than the shortest one


def is_close(step_ns: int, shortest_ns: int) -> bool:
    """Return whether a step is within 2 % of the shortest one: 1,020 ns are of 1,000 ns."""
    # In integers, so that the plan does not depend on how a machine rounds.
    return step_ns * 100 <= shortest_ns * (100 + WITHIN_PERCENT)


class NoisyStep(Value, frozen=True, kw_only=True):
    """The step of one plan: without noise, and the 90th percentiles of its times and regrets.

    The regret of a draw is how much longer the step is than that of the best plan for the draw.
    """

    nominal_ns: NonNegative
    p90_ns: NonNegative
    regret_ns: NonNegative


class Robustness(Value, frozen=True, kw_only=True):
    """How the plan was chosen under `noise`: by the least regret over the same `draws` for all.

    `candidates` is the number of plans that were compared, itself included: those whose nominal
    step is within 2 % of the shortest one, which is that of `fastest`.
    """

    noise: NoiseShare
    draws: Positive
    seed: int
    candidates: Positive
    chosen: NoisyStep
    fastest: NoisyStep

    def __post_init__(self) -> None:
        if not is_close(self.chosen.nominal_ns, self.fastest.nominal_ns):
            raise ValueError(
                f"a step of {self.chosen.nominal_ns} ns is more than {WITHIN_PERCENT} % longer "
                f"than the fastest one of {self.fastest.nominal_ns} ns"
            )
