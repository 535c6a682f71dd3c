"""Why a problem has no cut: which constraint, where, by how much."""

from __future__ import annotations

from dataclasses import replace

from pipecompile.ir.links import FREE
from pipecompile.partition.boundaries import Prefixes
from pipecompile.partition.chains import Chain
from pipecompile.partition.hierarchy import kept_together
from pipecompile.partition.instance import Instance
from pipecompile.partition.linear import cut_order
from pipecompile.partition.orders import orders
from pipecompile.partition.pricing import Pricing
from pipecompile.partition.problem import Memory, Problem
from pipecompile.partition.windows import Limit

__all__ = ["why_infeasible"]

NODES_PRICED = 20_000  # in stages, and pairs looked at, for each guess of how much memory is short
PRICES = 300  # at the most
PAIRS = 20_000_000
UNITS = 1000  # above, the memory that is short is looked for between blocks
LARGEST = 1 << 60  # bytes: more than any rank has


def why_infeasible(instance: Instance, *, proven: bool) -> str:
    """One line. The constraints are dropped one after the other until a cut of the graph's own order is found."""
    return _why(instance) + ("" if proven else "; that there is no other cut is not proven")


def _why(instance: Instance) -> str:
    problem = instance.problem
    if problem.memory is not None and _cut(instance, replace(problem, memory=None)) is not None:
        return _shared_memory(instance, problem.memory) or _memory(instance, problem.memory)
    plain = replace(problem, memory=None, parameters_everywhere=False)
    if problem.parameters_everywhere and _cut(instance, plain) is not None:
        bearing = int((instance.parameters > 0).sum())
        return (
            f"k={problem.k} stages must each have parameters, but no cut has that: only {bearing} of {instance.count} "
            f"units have any; choose a smaller k, or allow stages without parameters"
        )
    pins = ", ".join(f"{name}={stage}" for name, stage in problem.pin.items())
    return f"no cut into k={problem.k} non-empty stages meets the pins {pins}; drop one or choose another k"


def _cut(instance: Instance, problem: Problem) -> Chain | None:
    """A cut of one order; stages that share ranks are looked at one by one."""
    if problem.ranks != problem.k:
        problem = replace(problem, placement=None, speeds=None, links=FREE, memory=None)
    plain = Instance(problem, instance.units)
    prefixes = Prefixes(plain, next(iter(orders(plain))))
    prices = 4 * problem.k + NODES_PRICED * problem.k // len(problem.graph.nodes)
    return cut_order(
        prefixes, Limit(), Pricing(problem, min(PRICES, prices), pairs_limit=PAIRS).best
    )


def _shared_memory(instance: Instance, memory: Memory) -> str | None:
    """Where stages share ranks, what all nodes hold at the least is compared with what all ranks may."""
    problem = instance.problem
    if problem.ranks == problem.k:
        return None
    flight = min(memory.in_flight)
    needed, caps = int((instance.resident + flight * instance.saved).sum()), sum(memory.caps)
    return (
        f"the {problem.ranks} ranks may hold {caps:,} bytes together and all nodes need at least {needed:,}, "
        f"but no cut into k={problem.k} stages was found that shares them out within each rank's cap"
    )


def _memory(instance: Instance, memory: Memory) -> str:
    """By how much all ranks would need more, found by bisection, and the stage that is then largest."""
    instance = _coarser(instance)
    problem = instance.problem

    def cut(more: int) -> Chain | None:
        caps = tuple(cap + more for cap in memory.caps)
        return _cut(instance, replace(problem, memory=replace(memory, caps=caps)))

    few, many = 0, max(1, max(memory.caps) // 1000)
    while (found := cut(many)) is None:
        few, many = many, 2 * many
        if many > LARGEST:
            return f"no cut into k={problem.k} stages can be made to fit, whatever memory the ranks have"
    while many - few > max(1, many // 1000):
        middle = (few + many) // 2
        few, many, found = (
            (few, middle, better) if (better := cut(middle)) is not None else (middle, many, found)
        )
    stage, unit = _tightest(instance, memory, found)
    cap = memory.caps[problem.stage_ranks[stage]]
    name, alone = instance.units[unit][0], memory.held(instance.units[unit], stage)
    return (
        f"a rank may hold {cap:,} bytes, but the best cut into k={problem.k} stages that was found needs "
        f"{cap + many:,}, {many:,} more, in stage {stage}, where {name} is the largest node ({alone:,} alone)"
    )


def _coarser(instance: Instance) -> Instance:
    """The same between blocks, where there are too many units for a bisection."""
    problem = instance.problem
    closed = (*problem.together, *kept_together(problem.graph, "blocks"))
    coarse = replace(problem, granularity="operators", together=closed)
    if instance.count <= UNITS or _cut(instance, replace(coarse, memory=None)) is None:
        return instance
    return Instance(coarse, coarse.units)


def _tightest(instance: Instance, memory: Memory, chain: Chain) -> tuple[int, int]:
    """The stage with the least room left, and its largest unit."""

    def held(unit: int, stage: int) -> int:
        return memory.held(instance.units[unit], stage)

    room, order = [], next(iter(orders(instance)))
    for stage, (start, stop) in enumerate(zip(chain.rows, chain.rows[1:], strict=False)):
        cap = memory.caps[instance.problem.stage_ranks[stage]]
        room.append(
            (cap - sum(held(unit, stage) for unit in order[start:stop]), stage, start, stop)
        )
    _, stage, start, stop = min(room)
    return stage, max(order[start:stop], key=lambda unit: held(unit, stage))
