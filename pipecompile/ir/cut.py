"""The result of `pipecompile partition`, made by api/partition_file.py: the cut of a cost graph."""

from __future__ import annotations

from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = ["Cut"]


class Cut(Value, frozen=True, kw_only=True):
    """The stage of each node, and how good that is.

    `loads_with_transfers_ns` are per rank; `replicas` are the ranks of each stage.

    Times (`_ns`) are in `time_unit`. `seconds` are those that the search
    took: for people, never for a plan.
    """

    stages: dict[str, NonNegative]
    loads_with_transfers_ns: tuple[NonNegative, ...]
    max_load_ns: NonNegative
    sum_of_squares_ns2: NonNegative
    variance_ns2: NonNegative
    objective: str
    value: NonNegative
    bound: NonNegative
    gap: float
    proven: bool
    method: str
    seconds: float
    replicas: tuple[Positive, ...]
    time_unit: TimeUnit = "ns"
