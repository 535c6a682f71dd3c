"""What every plan of a setting takes at least: time, and memory. No solver is asked.

Bounds hold for all cuts. Let L be the compute of one microbatch in all stages, F its forward and B
its backward, on p ranks with M microbatches:

    any order                M × L / p, since some rank computes that much; on devices of several
                             kinds the total speed of all ranks takes the place of p
    one stage on each rank,  rank i waits for the forward of the first microbatch in the ranks
    whole backwards          before it, and they wait for its last backward: with the loads lᵢ
                             T ≥ M × lᵢ + l₀ + … + lᵢ₋₁ for each i, so T ≥ L / (1 − (1 − 1/M)ᵖ)
    and rank i begins its    T ≥ L + (M − 1) × bᵢ + (M − cᵢ) × fᵢ: the first microbatch is back
    first backward after     after L − bᵢ and what ranks before it add, and the rank has the rest
    cᵢ forwards              of its M backwards and forwards to do

The last line holds for all ranks at once: a linear program over fᵢ and bᵢ, solved in `_warm_ns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import ceil, floor

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.links import FREE
from pipecompile.ir.plan import Options
from pipecompile.ir.setting import Setting
from pipecompile.ir.unequal_costs import UnequalCosts
from pipecompile.memory_model.empty_ranks import room_of_ranks
from pipecompile.memory_model.lower_bounds import bytes_lower_bounds
from pipecompile.memory_model.optimizer import optimizer_bytes
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.planner.partition_problem import problem_of
from pipecompile.schedule.named_orders import SPLIT, peak_in_flight
from pipecompile.schedule.selection import placements

__all__ = ["Work", "extra_ns", "least_step_ns", "state_bytes"]


@dataclass(frozen=True)
class Work:
    """What one microbatch takes at least: ns for all forwards, for all backwards and for the
    longest node, and the bytes that backwards save.

    `input_ns` is the part of the backward that makes gradients of inputs, None where the costs do
    not say how long each half takes. Where ranks have devices of several kinds, times are those of
    the fastest one, and `busiest_ns` is what some rank takes at least. `boundary_bytes` is no
    bound: it is what crosses a narrow boundary, forward and back.
    """

    forward_ns: int
    backward_ns: int
    largest_ns: int
    input_ns: int | None
    saved_bytes: int
    busiest_ns: int = 0
    boundary_bytes: int = 0

    @staticmethod
    def of(graph: CostGraph) -> Work:
        """Return the work of the microbatch that `graph` is of."""
        nodes = graph.nodes
        can_split = not any(node.backward_input_ns is None for node in nodes if node.backward_ns)
        return Work(
            sum(node.forward_ns for node in nodes),
            sum(map(_least_backward_ns, nodes)),
            max(map(_load_ns, nodes)),
            sum(node.backward_input_ns or 0 for node in nodes) if can_split else None,
            sum(bytes_lower_bounds(graph, "none", gradients=False)[1].values()),
            _busiest_ns(graph) if isinstance(graph, UnequalCosts) else 0,
            _boundary_bytes(graph),
        )

    def of_part(self, parts: int) -> Work:
        """Return what a part of this microbatch takes at least, of so many equal parts.

        A sample takes no longer in a larger microbatch than in a smaller one: work grows with the
        samples, and what each kernel takes at least does not.
        """
        return Work(
            self.forward_ns // parts,
            self.backward_ns // parts,
            self.largest_ns // parts,
            None if self.input_ns is None else self.input_ns // parts,
            self.saved_bytes // parts,
            self.busiest_ns // parts,
            self.boundary_bytes // parts,
        )


def _boundary_bytes(graph: CostGraph) -> int:
    """Return what crosses a boundary in both directions, of which one in twenty is narrower.

    Boundaries are those between the nodes in their order. Copied values cross none.
    """
    place = {node.name: index for index, node in enumerate(graph.nodes)}
    changes = [0] * len(place)
    for tensor in graph.tensors:
        begin = place[tensor.producer]
        end = max((place[name] for name in tensor.consumers), default=begin)
        if not graph.nodes[begin].is_copyable:
            changes[begin] += tensor.bytes + tensor.gradient_bytes
            changes[end] -= tensor.bytes + tensor.gradient_bytes
    # A value adds its bytes behind its producer and takes them off at its
    # last reader; a running sum gives what crosses each boundary.
    crossing = sorted(accumulate(changes[:-1]))
    return crossing[len(crossing) // 20] if crossing else 0


def _busiest_ns(graph: UnequalCosts) -> int:
    """Return a load that the busiest of unequal ranks has at least, whatever is cut.

    For weights that add up to 1 it is no less than Σ wᵢ × lᵢ, and so no less than that with each
    node on the rank where its weighted time is least. Ranks are weighted by their speed, by which
    a model of one kind of operator is balanced exactly: a fast rank of 10 ns and a slow one of 40
    ns for the whole model take 8 ns.
    """
    times = [[_load_ns(node) for node in kind.nodes] for kind in graph.kinds]
    wholes = [max(1, sum(own)) for own in times]
    speed = sum((Fraction(1, wholes[kind]) for kind in graph.rank_kinds), Fraction(0))
    # Each kind's times as shares of its own whole. A node counts where its share is the least.
    scaled = [[Fraction(ns, whole) for ns in own] for own, whole in zip(times, wholes, strict=True)]
    least = sum((min(own) for own in zip(*scaled, strict=True)), Fraction(0))
    return floor(least / speed)


def _load_ns(node: Node) -> int:
    return node.forward_ns + _least_backward_ns(node)


def _least_backward_ns(node: Node) -> int:
    halves = (node.backward_input_ns or 0) + (node.backward_weight_ns or 0)
    return min(node.backward_ns, halves) if node.backward_input_ns is not None else node.backward_ns


# -- time


def least_step_ns(work: Work, setting: Setting, extra: int = 0) -> int:
    """Return a time in ns that no step under a setting is below; stages recompute for at least
    `extra` ns, all together, in each microbatch.
    """
    p, m = setting.ranks, setting.microbatches
    forward, backward = work.forward_ns, work.backward_ns
    total = forward + backward
    # Two ranks, 4 microbatches, F 10 and B 20 ns: 60 by the work, 69 by the second
    # line of the table above, and by the third one 70 under 1f1b and 75 under gpipe,
    # whose first backward waits for all forwards. Equal stages take 75 under both.
    bounds = [Fraction(m * (total + extra), p), Fraction(m * max(work.largest_ns, work.busiest_ns))]
    if setting.schedule in SPLIT or setting.schedule == "search":
        # A microbatch still passes all forwards one after the other; of its
        # backward the weights' part may be done whenever a rank is free.
        bounds.append(Fraction(forward))
    else:
        bounds.append(Fraction(total))
        if setting.stages_per_rank == 1:
            # Σ lᵢ ≤ T × (1 − (m − 1)ᵖ / mᵖ), in whole numbers.
            bounds.append(Fraction(total * m**p, m**p - (m - 1) ** p))
            bounds.append(_warm_ns(setting, forward, backward))
    return ceil(max(bounds))


def _warm_ns(setting: Setting, forward: int, backward: int) -> Fraction:
    """Return the least T with T − L ≥ α × bᵢ + βᵢ × fᵢ on each rank, where Σ fᵢ = F, Σ bᵢ = B.

    α is M − 1 and βᵢ = M − cᵢ ≤ α. By duality that is the largest
    (α × B + r × F) / Σ max(1, r / βᵢ) over r; between two βᵢ it is monotone, so only these need be
    tried. The ranks also take all forwards that the last one wants before its first backward, one
    after the other.
    """
    m, p = setting.microbatches, setting.ranks
    warm = _first_forwards(setting.schedule, p, m)
    alpha, betas = m - 1, sorted(m - each for each in warm)
    values = [Fraction((warm[-1] - 1) * forward + alpha * backward, p)]
    # With a β of 0, of a rank that does all its forwards first,
    # only r = 0 is left, which gives no more than the line above.
    for ratio in (each for each in betas if betas[0]):
        weight = sum(max(Fraction(1), Fraction(ratio, beta)) for beta in betas)
        values.append(Fraction(alpha * backward + ratio * forward) / weight)
    return forward + backward + max(values)


@lru_cache(maxsize=1024)
def _first_forwards(schedule: str, ranks: int, microbatches: int) -> tuple[int, ...]:
    """Return for each rank how many forwards it does before its first backward."""
    return peak_in_flight(schedule, tuple(range(ranks)), microbatches)


# -- memory


def state_bytes(graph: CostGraph, options: Options) -> int:
    """Return what parameters, gradients and optimizer states take at least, on all ranks of a
    replica together: each rank has its own when its last backward ends.
    """
    trained = [each for each in graph.parameters if each.trainable]
    unnamed = sum(node.parameter_bytes for node in graph.nodes if not node.parameters)
    on_rank = None if options.optimizer_on_host else options.optimizer
    states, _ = optimizer_bytes(trained, on_rank, master_weights=options.master_weights, lists=True)
    held = sum(each.bytes for each in (*graph.parameters, *trained)) + 2 * unnamed + sum(states)
    # Sharded parts are rounded up, which only adds to this.
    return held // options.replicas if options.shard else held


def extra_ns(graph: CostGraph, options: Options) -> int | None:
    """Return what stages recompute at least in each microbatch, in ns all together, to fit their
    ranks; None if no cut fits.

    Stage i holds its resident bytes and nᵢ microbatches in the room that its rank has for storages:
    roomᵢ ≥ residentᵢ + nᵢ × (savedᵢ − freedᵢ). Over all stages that is
    Σ freedᵢ ≥ Σ savedᵢ + Σ residentᵢ / nᵢ − Σ roomᵢ / nᵢ, where no nᵢ is above the largest one. The
    bytes that take the least time are freed first.
    """
    placement = placements(options)[0]
    caps = options.caps(max(placement) + 1)
    if caps is None:
        return 0
    room = room_of_ranks(caps, placement, graph.allocator)
    if min(room) < 0 or state_bytes(graph, options) > sum(room):
        return None
    # A rank of several stages does not hold the most of all of them at once, and a search may
    # find an order that holds less.
    if len(caps) < options.k or options.schedule == "search":
        return 0
    try:
        memory = problem_of(graph, options, FREE).memory
    except InfeasibleError:
        return None
    assert memory is not None
    return _least_extra_ns(memory, room)


def _least_extra_ns(memory: MemoryConstraint, room_of_stages: Sequence[int]) -> int | None:
    # Rooms of 60 and 30 with 3 and 1 microbatches in flight
    # are room for 20 + 30 bytes of one of them.
    room = sum(Fraction(*pair) for pair in zip(room_of_stages, memory.in_flight, strict=True))
    resident = Fraction(sum(memory.resident.values()), max(memory.in_flight))
    classes = [(each.rate, sum(each.bytes.values())) for each in memory.freeable]
    kept = sum(memory.saved.values()) + sum(size for _, size in classes)
    missing, spent = kept + resident - room, Fraction(0)
    for rate, size in sorted(classes):
        freed = max(Fraction(0), min(missing, Fraction(size)))
        spent += rate * freed
        missing -= freed
    return None if missing > 0 else ceil(spent)
