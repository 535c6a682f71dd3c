"""What stages may hold while a graph is cut: caps on ranks, and the price of fitting them.

resident + in-flight × saved ≤ cap        the sum of a stage's nodes, where there is no price
price(stage) → ns, least ns               what it takes to fit the cap, for example by recompute
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from pipecompile.ir.graph import CostGraph
from pipecompile.memory_model.lower_bounds import FreeableBytes

__all__ = ["BoundaryBuffers", "MemoryConstraint", "Price", "StageCandidate"]


@dataclass(frozen=True)
class StageCandidate:
    """A stage that a search considers.

    `before` are the nodes of all earlier stages, `in_flight` the microbatches that the stage holds
    at most, and `cap` the bytes that its rank may hold.
    """

    stage: int
    before: tuple[str, ...]
    nodes: tuple[str, ...]
    in_flight: int
    cap: int


class Price(NamedTuple):
    """The time that a stage spends per microbatch to fit its cap.

    `ns` is None if it cannot fit; `least` is a proven lower bound of `ns`, None if it is proven
    that the stage cannot fit. `missing` are the bytes by which it then is over its cap, where they
    are known.
    """

    ns: int | None
    least: int | None
    missing: int | None = None


@dataclass(frozen=True)
class BoundaryBuffers:
    """The bytes of buffers that a stage holds for tensors at its ends, by the tensor's producer.

    A tensor that enters the stage costs `arriving` bytes for each microbatch, one that leaves it
    `returning` bytes (for its gradient); relayed tensors enter and leave. `counts` says by stage of
    how many microbatches it holds both, when it holds the most activations.
    """

    arriving: Mapping[str, int]
    returning: Mapping[str, int]
    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MemoryConstraint:
    """What stages hold, and what their ranks may hold, in bytes.

    A stage holds Σ `resident` + in-flight × Σ `saved` of its nodes; `caps` are per rank and
    `in_flight` per stage.

    With `price` that sum, and `boundary_buffers` on top of it, is only a lower bound of what a
    stage holds: `price(candidate)` then says how many ns the stage spends per microbatch to fit its
    cap, for example by recompute. That price has a lower bound of its own: the bytes that the
    stage would hold over its cap, if it kept everything, must be freed from the classes of
    `freeable`, the cheapest first and for each microbatch in flight.

    `optimizer` is the state of the optimizer, by node. Prices have it, and it says how much memory
    is missing where nothing fits; the search does without.
    """

    caps: tuple[int, ...]
    in_flight: tuple[int, ...]
    resident: Mapping[str, int]
    saved: Mapping[str, int]
    price: Callable[[StageCandidate], Price] | None = None
    boundary_buffers: BoundaryBuffers | None = None
    freeable: tuple[FreeableBytes, ...] = ()
    optimizer: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def simple(
        graph: CostGraph, caps: tuple[int, ...], in_flight: tuple[int, ...], factor: Fraction | int
    ) -> MemoryConstraint:
        """Return the memory rule of the cost-graph format.

        A stage holds Σ parameter_bytes × `factor`, rounded up per node, and in-flight × Σ
        saved_bytes.
        """
        # -(-x // 1) rounds a fraction up.
        # With a factor of 7/2 and nodes of 3 and 5 bytes: 11 and 18, 29
        # in all, where the sum rounded up once would be 28. Per node it
        # does not depend on the cut, so the searches may add numbers up.
        resident = {node.name: -(-node.parameter_bytes * factor // 1) for node in graph.nodes}
        saved = {node.name: node.saved_bytes for node in graph.nodes}
        return MemoryConstraint(caps, in_flight, resident, saved)

    @property
    def unpriced(self) -> MemoryConstraint:
        """The constraint by lower bounds alone, the state of the optimizer among them."""
        # The optimizer's state, which a price knows of, would else
        # be missing from the bounds that stand in for prices.
        resident = {
            name: size + self.optimizer.get(name, 0) for name, size in self.resident.items()
        }
        return MemoryConstraint(self.caps, self.in_flight, resident, self.saved)

    def held_bytes(self, names: Iterable[str], stage: int) -> int:
        """Return the bytes that these nodes hold in `stage`: Σ resident + in-flight × Σ saved."""
        in_flight = self.in_flight[stage]
        return sum(self.resident[name] + in_flight * self.saved[name] for name in names)
