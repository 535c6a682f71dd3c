"""The partition result, and the file that says how ranks are connected."""

from __future__ import annotations

from typing import Literal

from pipecompile.ir.plan import Link
from pipecompile.ir.serde import NonNegative, Positive, Value

__all__ = ["Cut", "Links"]


class Cut(Value, frozen=True, kw_only=True):
    """Which stage runs what, and how good that is; loads are per rank, and `replicas` the ranks of each stage.

    `seconds` are those the search took: for people, never for a plan.
    """

    stages: dict[str, NonNegative]
    loads_ns: tuple[NonNegative, ...]
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


class Links(Value, frozen=True, kw_only=True):
    """Bandwidth and latency from each rank (row) to each other one (column); no bandwidth means free."""

    schema: Literal["pipecompile/links/1"] = "pipecompile/links/1"
    bandwidth_bytes_per_s: tuple[tuple[Positive | None, ...], ...]
    latency_ns: tuple[tuple[NonNegative, ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(self.bandwidth_bytes_per_s), len(self.latency_ns)}
        sizes |= {len(row) for matrix in (self.bandwidth_bytes_per_s, self.latency_ns) for row in matrix}
        if len(sizes) > 1:
            raise ValueError(f"both matrices must be square and of one size, but have sides {sorted(sizes)}")

    @property
    def matrix(self) -> tuple[tuple[Link, ...], ...]:
        """As links."""
        pairs = zip(self.bandwidth_bytes_per_s, self.latency_ns, strict=True)
        return tuple(
            tuple(Link(bandwidth_bytes_per_s=b, latency_ns=n) for b, n in zip(rates, delays, strict=True))
            for rates, delays in pairs
        )
