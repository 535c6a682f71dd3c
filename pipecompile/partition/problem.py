"""What is to be cut, into what, and what a cut must respect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.links import FREE, Hop, Links
from pipecompile.ir.plan import GRANULARITIES
from pipecompile.memory_model.lower_bounds import Freeable
from pipecompile.partition.hierarchy import kept_together
from pipecompile.partition.units import FIRST, LAST, Unit, units

__all__ = ["COMMUNICATIONS", "OBJECTIVES", "Candidate", "Floor", "Memory", "Price", "Problem"]

OBJECTIVES = ("variance", "max-load", "step-time")
COMMUNICATIONS = ("relay", "endpoint", "overlap", "none")
REPLICAS_MAX = 256
LARGEST = 2**61  # sums of times and of bytes are held in 64 bits


@dataclass(frozen=True)
class Candidate:
    """A stage that a search considers: its nodes, those of all stages before it, and what it may hold."""

    stage: int
    before: tuple[str, ...]
    nodes: tuple[str, ...]
    in_flight: int
    budget: int


class Price(NamedTuple):
    """What a stage pays to fit its budget, in ns, and the least that is proven; None if nothing helps."""

    ns: int | None
    least: int | None


@dataclass(frozen=True)
class Floor:
    """What a stage holds at least besides the sums of `Memory`, so that fewer stages need to be priced.

    For each tensor that enters it (by its producer), relayed ones included, `arriving` bytes, and for each that leaves
    it `returning` bytes.
    """

    arriving: Mapping[str, int]
    returning: Mapping[str, int]


@dataclass(frozen=True)
class Memory:
    """What a stage holds, and what its rank may.

    A stage holds Σ `resident` + in-flight × Σ `saved` of its nodes, in bytes; `caps` are per rank and `in_flight` per
    stage. With `price` that sum, and `floor`, are only what it holds at the least: `price(candidate)` then says how
    many ns the stage spends more per microbatch to fit its budget (it may recompute). That is never less than what it
    takes to free of `freeable`, the cheapest first and per microbatch in flight, what the stage would hold too much
    with all of that kept.
    """

    caps: tuple[int, ...]
    in_flight: tuple[int, ...]
    resident: Mapping[str, int]
    saved: Mapping[str, int]
    price: Callable[[Candidate], Price] | None = None
    floor: Floor | None = None
    freeable: tuple[Freeable, ...] = ()

    @staticmethod
    def simple(
        graph: CostGraph, caps: tuple[int, ...], in_flight: tuple[int, ...], factor: Fraction | int
    ) -> Memory:
        """The rule of cost graphs: Σ parameter_bytes × `factor` (rounded up per node) + in-flight × Σ saved_bytes."""
        resident = {node.name: -(-node.parameter_bytes * factor // 1) for node in graph.nodes}
        return Memory(
            caps, in_flight, resident, {node.name: node.saved_bytes for node in graph.nodes}
        )

    def held(self, names: Iterable[str], stage: int) -> int:
        """The bytes of these nodes as `stage`, by the sum above."""
        flight = self.in_flight[stage]
        return sum(self.resident[name] + flight * self.saved[name] for name in names)


@dataclass(frozen=True)
class Problem:
    """A graph to be cut into `k` non-empty stages so that stages never decrease along a tensor.

    `placement` gives the rank of each stage (default: one stage a rank), `speeds` how fast each rank is (1 as the
    costs say), `links` how ranks are connected. Every stage but the last runs its forward again for the share
    `recompute` of the microbatches. `memory` caps the ranks. `pin` fixes the stage of nodes, negative ones
    from the end; the nodes of each of `together` share a stage, whichever it is; of each pair of `precedence` the
    first lies in no later stage than the second; with `parameters_everywhere` each
    stage has a node with parameters. `granularity` is the level at which the graph is cut: "modules" and "blocks" keep
    their nodes together (see `hierarchy`); "auto" allows what "operators" does, and is searched from blocks on.

    With `replica_ranks` a stage may run on several data-parallel ranks, as many in all: its load is divided among
    them, plus a ring all-reduce of its parameters' gradients once per step of `microbatches` (PipeDream, arXiv
    1806.03377, section 3.2). `step_ns` simulates an assignment, for the objective step-time; unless `whole_backwards`,
    its schedule may do the gradients of the weights later. InputError says what does not fit.
    """

    graph: CostGraph
    k: int
    objective: str = "variance"
    communication: str = "relay"
    links: Links = FREE
    placement: tuple[int, ...] | None = None
    speeds: tuple[Fraction, ...] | None = None
    recompute: Fraction | bool = False
    memory: Memory | None = None
    pin: Mapping[str, int] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    precedence: tuple[tuple[str, str], ...] = ()
    granularity: str = "operators"
    parameters_everywhere: bool = False
    replica_ranks: int | None = None
    microbatches: int = 1
    step_ns: Callable[[Mapping[str, int]], int] | None = None
    whole_backwards: bool = True

    def __post_init__(self) -> None:
        _refuse_unknown("objective", self.objective, OBJECTIVES)
        _refuse_unknown("communication", self.communication, COMMUNICATIONS)
        _refuse_unknown("granularity", self.granularity, GRANULARITIES)
        if self.k < 1:
            raise InputError(f"k={self.k}, but a pipeline has at least one stage")
        if not self.graph.nodes:
            raise InputError("the graph has no nodes, so there is nothing to cut")
        if self.microbatches < 1:
            raise InputError(f"microbatches={self.microbatches}, but a step has at least one")
        if self.objective == "step-time" and self.step_ns is None:
            raise InputError(
                "objective step-time needs a schedule to simulate; give one, or choose max-load"
            )
        self._check_ranks()
        self._check_memory()
        self._check_replicas()
        self._check_pins()
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Sums are held in 64 bits."""
        slowest = min(map(self.speed, range(self.k)))
        if (
            max(Fraction(1), 1 / slowest)
            * 4
            * sum(_compute_ns(node, True) for node in self.graph.nodes)
            > LARGEST
        ):
            raise InputError(
                f"all times at the slowest speed must sum to less than {LARGEST // 4} ns; scale them down"
            )
        if (
            max(number for s in range(self.k) for number in self.speed(s).as_integer_ratio())
            > 10**6
        ):
            raise InputError("speeds must be fractions of numbers up to 10⁶")
        if sum(node.parameter_bytes for node in self.graph.nodes) > LARGEST:
            raise InputError(f"the parameters of all nodes must sum to less than {LARGEST} bytes")
        hops = {self.hop(stage) for stage in range(self.k - 1)}
        sent = (
            hop.transfer_ns(t.bytes, t.gradient_bytes)
            for hop in hops
            if hop
            for t in self.graph.tensors
        )
        if 4 * self.k * sum(sent) > LARGEST:
            raise InputError(
                f"all transfers must sum to less than {LARGEST // 4 // self.k} ns; scale times and bytes down"
            )
        if self.memory is not None:
            flight = max(self.memory.in_flight)
            if (
                sum(self.memory.resident.values()) + flight * sum(self.memory.saved.values())
                > LARGEST
            ):
                raise InputError(f"all nodes must hold less than {LARGEST} bytes together")

    def _check_ranks(self) -> None:
        if self.placement is not None and len(self.placement) != self.k:
            raise InputError(f"the placement names {len(self.placement)} stages, but k={self.k}")
        if set(self.stage_ranks) != set(range(self.ranks)):
            raise InputError(f"the placement {self.stage_ranks} must use every rank from 0 on")
        if self.speeds is not None and (len(self.speeds) != self.ranks or min(self.speeds) <= 0):
            raise InputError(
                f"speeds {_joined(self.speeds)} must be {self.ranks} positive numbers, one a rank"
            )
        ranks = self.replica_ranks or self.ranks
        if not self.links.fits(ranks):
            raise InputError(f"the links are for {self.links.ranks} ranks, but there are {ranks}")
        if self.links.one is None and self.communication == "endpoint":
            raise InputError(
                "endpoint communication knows no path between ranks; give one link, or choose relay"
            )

    def _check_memory(self) -> None:
        if self.memory is None:
            return
        if len(self.memory.caps) != self.ranks or len(self.memory.in_flight) != self.k:
            raise InputError(f"memory must be given for {self.ranks} ranks and {self.k} stages")
        if self.memory.price is not None and self.ranks != self.k:
            raise InputError(
                "stages that share a rank cannot be priced one by one; give each stage its rank"
            )

    def _check_replicas(self) -> None:
        if self.replica_ranks is None:
            return
        if self.replica_ranks < self.k:
            raise InputError(f"{self.replica_ranks} ranks are fewer than the k={self.k} stages")
        if self.replica_ranks > REPLICAS_MAX:
            raise InputError(
                f"{self.replica_ranks} ranks are more than replicas are searched for: {REPLICAS_MAX}"
            )
        if self.ranks != self.k or self.speeds is not None or self.links.one is None:
            raise InputError("replicated stages need one stage a rank, equal speeds and one link")
        if self.objective == "step-time":
            raise InputError(
                "the step of replicated stages cannot be simulated; choose variance or max-load"
            )
        if self.memory is not None and len(set(self.memory.caps)) > 1:
            raise InputError("replicated stages need the same memory on every rank")

    def _check_pins(self) -> None:
        for name in (name for names in (*self.together, *self.precedence) for name in names):
            if name not in self.graph.by_name:
                raise InputError(f"the graph has no node {name!r} to keep together with others")
        for name, stage in self.pin.items():
            if name not in self.graph.by_name:
                raise InputError(
                    f"pin {name}={stage}: the graph has no such node; names are those of the graph or plan"
                )
            if not -self.k <= stage < self.k:
                raise InputError(
                    f"pin {name}={stage}: the stages are 0 … {self.k - 1}, or -1 … -{self.k} from the end"
                )

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(range(self.k)) if self.placement is None else self.placement

    @property
    def ranks(self) -> int:
        """How many ranks there are, replicas aside."""
        return len(set(self.stage_ranks))

    def speed(self, stage: int) -> Fraction:
        """How fast the rank of a stage is."""
        return Fraction(1) if self.speeds is None else self.speeds[self.stage_ranks[stage]]

    def hop(self, stage: int) -> Hop | None:
        """What connects `stage` and the next one; None within a rank or where transfers are not charged."""
        here, there = self.stage_ranks[stage], self.stage_ranks[stage + 1]
        if self.communication == "none" or here == there:
            return None
        return self.links.hop(here, there)

    def reduction_ns(self, parameter_bytes: int, replicas: int) -> int:
        """A ring all-reduce of one gradient per parameter byte among `replicas`, spread over the microbatches."""
        assert self.links.one is not None
        once = self.links.one.transfer_ns(-(-2 * (replicas - 1) * parameter_bytes // replicas))
        return -(-once // self.microbatches)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """See `units`; InfeasibleError if there are fewer than `k`."""
        found = units(
            self.graph,
            (*self.together, *kept_together(self.graph, self.granularity)),
            self.precedence,
        )
        if self.k > len(found):
            finer = ", or a finer granularity" if self.granularity in ("modules", "blocks") else ""
            raise InfeasibleError(
                f"k={self.k}, but the graph can be cut into at most {len(found)} stages{self._largest(found)}; "
                f"choose k ≤ {len(found)}{finer}"
            )
        return found

    def _largest(self, found: tuple[Unit, ...]) -> str:
        joined = sorted((unit for unit in found if len(unit) > 1), key=len, reverse=True)[:3]
        names = (
            f"{self.graph.by_name[unit[0]].group or unit[0]} with {len(unit)} nodes"
            for unit in joined
        )
        return f" (nodes that stay together: {', '.join(names)})" if joined else ""

    @cached_property
    def pins(self) -> dict[Unit, int]:
        """The stage of each pinned unit; the group "inputs" lies in the first stage and "outputs" in the last."""
        stages = {name: stage % self.k for name, stage in self.pin.items()}
        ends = {FIRST: 0, LAST: self.k - 1}
        pinned: dict[Unit, int] = {}
        for unit in self.units:
            wanted = {
                ends[g]: name for name in unit if (g := self.graph.by_name[name].group) in ends
            }
            wanted |= {stages[name]: name for name in unit if name in stages}
            if len(wanted) > 1:
                text = " and ".join(f"{name}={stage}" for stage, name in sorted(wanted.items()))
                raise InfeasibleError(
                    f"pins {text}: these nodes cannot be separated; pin them to one stage"
                )
            if wanted:
                pinned[unit] = next(iter(wanted))
        return pinned

    def compute_ns(self, names: Iterable[str], *, last: bool) -> int:
        """The time of these nodes for one microbatch at speed 1, in the last stage or in another one."""
        return sum(
            _compute_ns(self.graph.by_name[name], 0 if last else self.recompute) for name in names
        )


def _compute_ns(node: Node, again: Fraction | int) -> int:
    return node.forward_ns + int(node.forward_ns * again) + node.backward_ns


def _joined(numbers: Iterable[Fraction]) -> str:
    return ", ".join(f"{float(number):g}" for number in numbers)


def _refuse_unknown(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise InputError(f"{what} {given!r} is not known; choose one of {', '.join(known)}")
