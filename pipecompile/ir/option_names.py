"""The names that a plan's options take, and what one implies for another. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pipecompile.errors import InputError, unknown

__all__ = [
    "INFERENCE_OBJECTIVES",
    "Objective",
    "OptimizerName",
    "PlacementShape",
    "ScheduleName",
    "implied_objective",
    "implied_schedule",
    "known_name",
]

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
    "pipedream",
    "pipedream-vertical-sync",
    "pipedream-2bw",
    "forward-only",
    "search",
]
Objective = Literal["variance", "max-load", "step-time", "throughput", "latency"]
INFERENCE_OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency")
"""The objectives of plans for inference, whose schedule is forward-only."""
PlacementShape = Literal["linear", "loop", "v"]
OptimizerName = Literal["sgd", "momentum", "rmsprop", "adam", "adamw", "adafactor", "sm3"]


def implied_schedule(objective: str | None) -> str:
    """Return the schedule of a plan for which none is chosen, with an objective or without one."""
    # This and the next function go both ways: either of the two options says whether a plan is
    # for inference, so that one is enough.
    return "forward-only" if objective in INFERENCE_OBJECTIVES else "1f1b"


def implied_objective(schedule: str) -> str:
    """Return the objective of a plan for which none is chosen."""
    return "throughput" if schedule == "forward-only" else "variance"


def known_name(what: str, name: object, known: Iterable[str]) -> str:
    """Return the one of the `known` names that `name` is, in whatever case; InputError suggests the
    nearest one.

    >>> known_name("schedule", "1F1B", ["gpipe", "1f1b"])
    '1f1b'
    """
    names = tuple(known)
    if not isinstance(name, str):
        raise InputError(f"{what}={name!r} is not a name; choose one of {', '.join(names)}")
    if name.lower() not in names:
        raise unknown(what, name, names)
    return name.lower()
