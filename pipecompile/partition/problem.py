"""The partitioner's question: which graph is cut, into what, and which constraints a cut must meet.

`api` builds a `PartitionProblem` from the options of a command; every module of this package reads
it, and `solver.solve` answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from pipecompile.errors import InfeasibleError, InputError, unknown
from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.links import FREE, Hop, Links
from pipecompile.ir.plan import GRANULARITIES
from pipecompile.ir.unequal_costs import UnequalCosts
from pipecompile.partition.coarsening import coarse_groups
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.units import INPUTS, OUTPUTS, Unit, units

__all__ = [
    "COMMUNICATIONS",
    "OBJECTIVES",
    "PartitionProblem",
]

OBJECTIVES = ("variance", "max-load", "step-time", "total-load")
COMMUNICATIONS = ("relay", "endpoint", "overlap", "none")
REPLICAS_MAX = 256
SPEED_TERM_MAX = 10**6  # of numerators and denominators of speeds
LARGEST = 2**61  # sums of times and of bytes are held in 64 bits


@dataclass(frozen=True)
class PartitionProblem:
    """A graph that is cut into `k` non-empty stages, which never decrease along a tensor.

    Ranks: `placement` gives the rank of each stage (default: one stage a rank), `speeds` how fast
    each rank is (1: as the costs say), `links` how ranks are connected. Where the costs are of
    several kinds of devices (`UnequalCosts`), a stage takes what the device of its rank takes, and
    each rank has one stage. With `replica_ranks` a stage may run on several data-parallel ranks,
    that many in all: they take microbatches by turns, so its load is divided among them, and there
    is a ring all-reduce of its gradients once per step of `microbatches`, or once in a round of
    them if a step has fewer (PipeDream, arXiv 1806.03377, section 3.2).

    Costs: every stage but the last recomputes its forward for the share `recompute` of the
    microbatches. `step_ns` simulates the step of an assignment, for the objective step-time; unless
    `whole_backwards`, its schedule may compute the gradients of weights later.

    Constraints: `memory` caps the ranks. `pin` fixes the stage of nodes, negative stages count from
    the end. The nodes of each tuple of `together` share a stage. Of each pair of `precedence` the
    first node lies in no later stage than the second. With `parameters_everywhere` each stage has a
    node with parameters. `granularity` is the level of the module tree at which the graph is cut:
    "modules" and "blocks" keep their nodes in one stage (see `coarsening`); "auto" allows the cuts
    of "operators", and its search starts from blocks (see `multilevel_solver`).

    InputError says what does not fit.
    """

    graph: CostGraph
    k: int
    objective: str = "variance"
    communication: str = "relay"
    links: Links = FREE
    placement: tuple[int, ...] | None = None
    speeds: tuple[Fraction, ...] | None = None
    recompute: Fraction | bool = False
    memory: MemoryConstraint | None = None
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
        # Loads follow from the costs alone, but a step needs a schedule.
        if self.objective == "step-time" and self.step_ns is None:
            raise InputError(
                "objective step-time needs a schedule to simulate; give one, or choose max-load"
            )
        # In this order: sums of times need speeds and links that are checked before.
        self._check_ranks()
        self._check_memory_shape()
        self._check_replicas()
        self._check_names()
        self._check_compute_sums()
        self._check_byte_sums()

    def _check_ranks(self) -> None:
        """Raise InputError if placement, speeds or links are not those of all ranks."""
        if self.placement is not None and len(self.placement) != self.k:
            raise InputError(f"the placement names {len(self.placement)} stages, but k={self.k}")
        if set(self.stage_ranks) != set(range(self.ranks)):
            raise InputError(f"the placement {self.stage_ranks} must use every rank from 0 on")
        if self.speeds is not None and (len(self.speeds) != self.ranks or min(self.speeds) <= 0):
            speeds = ", ".join(f"{float(speed):g}" for speed in self.speeds)
            raise InputError(f"speeds {speeds} must be {self.ranks} positive numbers, one a rank")
        # Links connect all ranks, replicas included.
        ranks = self.replica_ranks or self.ranks
        self._check_kinds()
        if not self.links.fits(ranks):
            raise InputError(f"the links are for {self.links.ranks} ranks, but there are {ranks}")
        # A tensor may go from any stage to any other one, without the links in between.
        if self.links.one is None and self.communication == "endpoint":
            raise InputError(
                "endpoint communication knows no path between ranks; give one link, or choose relay"
            )

    def _check_kinds(self) -> None:
        """Raise InputError unless costs of several kinds of devices are those of the stages."""
        if not isinstance(self.graph, UnequalCosts):
            return
        count = len(self.graph.rank_kinds)
        if self.ranks != count:
            raise InputError(
                f"the costs are of {count} ranks, but there are {self.ranks}; give one device for "
                "each rank, or one for all"
            )
        if self.ranks != self.k or self.speeds is not None or self.replica_ranks is not None:
            raise InputError(
                "ranks with devices of several kinds have one stage each, in the order of the "
                "stages; choose a schedule with one stage a rank, such as 1f1b"
            )

    def _check_memory_shape(self) -> None:
        if self.memory is None:
            return
        if len(self.memory.caps) != self.ranks or len(self.memory.in_flight) != self.k:
            raise InputError(f"memory must be given for {self.ranks} ranks and {self.k} stages")
        # The price of a stage depends on its cap, which other stages of its rank would share.
        if self.memory.price is not None and self.ranks != self.k:
            raise InputError(
                "stages that share a rank cannot be priced one by one; give each stage its rank"
            )

    def _check_replicas(self) -> None:
        """Raise InputError if stages may be replicated with options that the search cannot have."""
        if self.replica_ranks is None:
            return
        if self.replica_ranks < self.k:
            raise InputError(f"{self.replica_ranks} ranks are fewer than the k={self.k} stages")
        if self.replica_ranks > REPLICAS_MAX:
            raise InputError(
                f"{self.replica_ranks} ranks are more than the {REPLICAS_MAX} up to which replicas "
                f"are searched for"
            )
        if self.ranks != self.k or self.speeds is not None or self.links.one is None:
            raise InputError("replicated stages need one stage a rank, equal speeds and one link")
        if self.objective == "step-time":
            raise InputError(
                "the step of replicated stages cannot be simulated; choose variance or max-load"
            )
        if self.memory is not None and len(set(self.memory.caps)) > 1:
            raise InputError("replicated stages need the same memory on every rank")

    def _unknown_node(self, purpose: str, name: str) -> InputError:
        nodes = self.graph.by_name
        return unknown(f"node {purpose}", name, nodes, listed_in="the graph or plan")

    def _check_names(self) -> None:
        for name in (name for names in (*self.together, *self.precedence) for name in names):
            if name not in self.graph.by_name:
                raise self._unknown_node("to keep together with others", name)
        for name, stage in self.pin.items():
            if name not in self.graph.by_name:
                raise self._unknown_node("to pin", name)
            if not -self.k <= stage < self.k:
                raise InputError(
                    f"pin {name}={stage}: the stages are 0 … {self.k - 1}, or -1 … -{self.k} from "
                    f"the end"
                )

    def _check_compute_sums(self) -> None:
        """Raise InputError unless all loads of a cut fit in 64 bits, whatever the cut."""
        # Each rank may have all compute, and pay for each transfer at both ends.
        speeds = [self.speed(stage) for stage in range(self.k)]
        total = max(sum(_compute_ns(node, True) for node in graph.nodes) for graph in self.graphs)
        # Checked once here, so that no sum of NumPy's needs a check: these wrap round silently.
        if 4 * total * max(Fraction(1), 1 / min(speeds)) > LARGEST:
            raise InputError(
                f"all times at the slowest speed must sum to less than {LARGEST // 4} ns; scale "
                f"them down"
            )
        if any(max(speed.as_integer_ratio()) > SPEED_TERM_MAX for speed in speeds):
            raise InputError("speeds must be fractions of numbers up to 10⁶")
        hops = {hop for stage in range(self.k - 1) if (hop := self.hop(stage)) is not None}
        sent = sum(
            hop.transfer_ns(tensor.bytes, tensor.gradient_bytes)
            for hop in hops
            for tensor in self.graph.tensors
        )
        if 4 * self.k * sent > LARGEST:
            raise InputError(
                f"all transfers must sum to less than {LARGEST // 4 // self.k} ns; scale times and "
                f"bytes down"
            )

    def _check_byte_sums(self) -> None:
        if sum(node.parameter_bytes for node in self.graph.nodes) > LARGEST:
            raise InputError(f"the parameters of all nodes must sum to less than {LARGEST} bytes")
        if self.memory is None:
            return
        saved = max(self.memory.in_flight) * sum(self.memory.saved.values())
        if sum(self.memory.resident.values()) + saved > LARGEST:
            raise InputError(f"all nodes must hold less than {LARGEST} bytes together")

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(range(self.k)) if self.placement is None else self.placement

    @property
    def ranks(self) -> int:
        """The number of ranks, replicas not counted."""
        return len(set(self.stage_ranks))

    @property
    def graphs(self) -> tuple[CostGraph, ...]:
        """The costs on each kind of device."""
        return self.graph.kinds if isinstance(self.graph, UnequalCosts) else (self.graph,)

    def kind(self, stage: int) -> int:
        """Return the index in `graphs` of the costs of a stage."""
        if not isinstance(self.graph, UnequalCosts):
            return 0
        return self.graph.rank_kinds[self.stage_ranks[stage]]

    def speed(self, stage: int) -> Fraction:
        """Return the speed of the rank of `stage`; 1 is as fast as the costs say."""
        return Fraction(1) if self.speeds is None else self.speeds[self.stage_ranks[stage]]

    def hop(self, stage: int) -> Hop | None:
        """Return the connection from `stage` to the next one.

        It is None between stages of one rank, and where transfers are not charged.
        """
        here, there = self.stage_ranks[stage], self.stage_ranks[stage + 1]
        if self.communication == "none" or here == there:
            return None
        return self.links.hop(here, there)

    def reduction_ns(self, parameter_bytes: int, replicas: int) -> int:
        """Return the time per microbatch of a ring all-reduce of gradients among `replicas`.

        It sends 2 (r − 1) / r times the bytes, once per step, and is spread over the microbatches:
        over r at least, since each replica has one of its own before there is anything to reduce.
        """
        assert self.links.one is not None
        once = self.links.one.transfer_ns(-(-2 * (replicas - 1) * parameter_bytes // replicas))
        # 4 replicas and steps of 2 microbatches: there is one
        # exchange in a round of 4, so a fourth of it falls on each.
        return -(-once // max(self.microbatches, replicas))

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units that the graph is cut between, in topological order.

        Raise InfeasibleError if there are fewer than `k`.
        """
        # Groups of the cost graph itself are merged by `units`.
        together = (*self.together, *coarse_groups(self.graph, self.granularity))
        merged = units(self.graph, together, self.precedence)
        if self.k > len(merged):
            finer = ", or a finer granularity" if self.granularity in ("modules", "blocks") else ""
            raise InfeasibleError(
                f"k={self.k}, but the graph can be cut into at most {len(merged)} stages"
                f"{self._largest(merged)}; choose k ≤ {len(merged)}{finer}"
            )
        return merged

    def _largest(self, merged: Iterable[Unit]) -> str:
        """Return the largest units of more than one node, for a message; "" without any."""
        largest = sorted((unit for unit in merged if len(unit) > 1), key=len, reverse=True)[:3]
        names = ", ".join(
            f"{self.graph.by_name[unit[0]].group or unit[0]} with {len(unit)} nodes"
            for unit in largest
        )
        return f" (nodes that stay together: {names})" if names else ""

    @cached_property
    def pins(self) -> dict[Unit, int]:
        """The stage of each pinned unit; group "inputs" is in the first, "outputs" in the last one.

        Raise InfeasibleError if the nodes of a unit are pinned to several stages.
        """
        pinned: dict[Unit, int] = {}
        for unit in self.units:
            node_by_stage: dict[int, str] = {}
            for name in unit:
                node_by_stage |= dict.fromkeys(self._group_stage(name), name)
            # Stage −1 of 4 is stage 3: `%` of Python is never negative.
            node_by_stage |= {self.pin[name] % self.k: name for name in unit if name in self.pin}
            # One node of each stage is enough to name the contradiction.
            if len(node_by_stage) > 1:
                pins = " and ".join(
                    f"{name}={stage}" for stage, name in sorted(node_by_stage.items())
                )
                raise InfeasibleError(
                    f"pins {pins}: these nodes cannot be separated; pin them to one stage"
                )
            if node_by_stage:
                pinned[unit] = next(iter(node_by_stage))
        return pinned

    def _group_stage(self, name: str) -> tuple[int, ...]:
        """Return the stage that the node's group fixes, if it fixes one."""
        stages = {INPUTS: (0,), OUTPUTS: (self.k - 1,)}
        return stages.get(self.graph.by_name[name].group or "", ())

    def compute_ns(self, names: Iterable[str], *, last: bool) -> int:
        """Return the compute of these nodes for one microbatch at speed 1, on the fastest device.

        It is the sum of forward, recompute and backward. The `last` stage does not recompute.
        """
        return self._compute_on(self.graph, names, last)

    def kind_compute_ns(self, names: Iterable[str], kind: int, *, last: bool) -> int:
        """Return the same on one kind of device."""
        return self._compute_on(self.graphs[kind], names, last)

    def _compute_on(self, graph: CostGraph, names: Iterable[str], last: bool) -> int:
        share = 0 if last else self.recompute
        return sum(_compute_ns(graph.by_name[name], share) for name in names)


def _compute_ns(node: Node, recomputed_share: Fraction | int) -> int:
    return node.forward_ns + int(node.forward_ns * recomputed_share) + node.backward_ns


def _refuse_unknown(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise unknown(option, value, known)
