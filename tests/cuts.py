"""Small problems and their best cuts, found by listing all of them."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from hypothesis import strategies as st

from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.plan import Link
from pipecompile.partition.check import faults
from pipecompile.partition.objective import measures, rank_loads, stage_loads
from pipecompile.partition.problem import COMMUNICATIONS, Candidate, Memory, Problem

Score = tuple[int, int]


def node(
    name: str, forward: int, backward: int = 0, *, group: str | None = None, held: int = 0, saved: int = 0
) -> Node:
    return Node(
        name=name, forward_ns=forward, backward_ns=backward, parameter_bytes=held, saved_bytes=saved, group=group
    )


def chain(times: list[int], size: int = 0) -> CostGraph:
    names = [f"n{index}" for index in range(len(times))]
    tensors = [
        Tensor(producer=a, consumers=(b,), bytes=size, gradient_bytes=0) for a, b in zip(names, names[1:], strict=False)
    ]
    return CostGraph(nodes=tuple(node(n, 0, t) for n, t in zip(names, times, strict=True)), tensors=tuple(tensors))


@st.composite
def graphs(draw: st.DrawFn, most: int, scale: int = 1) -> CostGraph:
    size, times = draw(st.integers(1, most)), st.integers(0, 12).map(lambda time: time * scale)
    group, held = st.sampled_from([None] * 5 + ["g"]), st.integers(0, 5)
    nodes = [
        node(f"n{i}", draw(times), draw(times), group=draw(group), held=draw(held), saved=draw(held))
        for i in range(size)
    ]
    tensors = []
    for i in range(size - 1):
        consumers = draw(st.sets(st.integers(i + 1, size - 1), max_size=3))
        if consumers:
            sizes = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
            names = tuple(f"n{consumer}" for consumer in sorted(consumers))
            tensors.append(Tensor(producer=f"n{i}", consumers=names, bytes=sizes[0], gradient_bytes=sizes[1]))
    return CostGraph(nodes=tuple(nodes), tensors=tuple(tensors))


def links(draw: st.DrawFn, scale: int) -> Link:
    bandwidth = draw(st.sampled_from([None, 3 * 10**8 // scale or 1]))
    return Link(bandwidth_bytes_per_s=bandwidth, latency_ns=draw(st.integers(0, 2)) * scale)


@st.composite
def problems(draw: st.DrawFn, most: int = 6, scale: int = 1, shared: bool = False) -> Problem:
    """One stage a rank, or with `shared` several; every kind of communication and constraint."""
    graph, k = draw(graphs(most, scale)), draw(st.integers(1, 4))
    placement = draw(st.sampled_from([(0,) * k, tuple(s % 2 if k > 1 else 0 for s in range(k)), (0, 1, 1, 0)[:k]]))
    placement = placement if shared else tuple(range(k))
    ranks = max(placement) + 1
    communication = draw(st.sampled_from(COMMUNICATIONS))
    matrix = draw(st.booleans()) and communication != "endpoint"
    speed = st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(3, 2)])
    names = [n.name for n in graph.nodes]
    return Problem(
        graph,
        k,
        objective=draw(st.sampled_from(["variance", "max-load"])),
        communication=communication,
        link=tuple(tuple(links(draw, scale) for _ in range(ranks)) for _ in range(ranks))
        if matrix
        else links(draw, scale),
        placement=placement,
        speeds=draw(st.sampled_from([None, tuple(draw(speed) for _ in range(ranks))])),
        recompute=draw(st.booleans()),
        memory=draw(st.none() | memories(graph, k, ranks)),
        pin=draw(st.dictionaries(st.sampled_from(names), st.integers(-k, k - 1), max_size=1)),
        parameters_everywhere=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def memories(draw: st.DrawFn, graph: CostGraph, k: int, ranks: int) -> Memory:
    caps = tuple(draw(st.integers(8, 40)) for _ in range(ranks))
    flights = tuple(draw(st.integers(1, 3)) for _ in range(k))
    simple = Memory.simple(graph, caps, flights, Fraction(3, 2))
    return Memory(
        caps,
        flights,
        simple.resident,
        simple.saved,
        prices(draw(st.integers(0, 9))) if draw_price(draw, k == ranks) else None,
    )


def draw_price(draw: st.DrawFn, possible: bool) -> bool:
    return possible and draw(st.booleans())


def prices(seed: int):  # type: ignore[no-untyped-def]
    """A price that follows no rule: what a search must not assume."""

    def price(candidate: Candidate) -> int | None:
        held = sum(map(ord, "".join(sorted(candidate.nodes)))) + seed * candidate.stage
        return (0, 0, 0, 3, None)[held % 5]

    return price


def cuts(problem: Problem) -> Iterator[dict[str, int]]:
    """Every assignment that the problem allows."""
    units, k = problem.units, problem.k
    place = {name: index for index, unit in enumerate(units) for name in unit}
    before = [
        {place[t.producer] for t in problem.graph.tensors if any(place[c] == u for c in t.consumers)} - {u}
        for u in range(len(units))
    ]

    def extend(stages: list[int]) -> Iterator[list[int]]:
        if len(stages) == len(units):
            yield stages
            return
        low = max((stages[u] for u in before[len(stages)]), default=0)
        for stage in range(low, k):
            yield from extend([*stages, stage])

    for stages in extend([]):
        assignment = {name: stages[place[name]] for name in place}
        if next(faults(problem, assignment), None) is None:
            yield assignment


def score(problem: Problem, assignment: dict[str, int], replicas: tuple[int, ...] | None = None) -> Score:
    """The objective's value, prices included, and then the other one's."""
    loads = stage_loads(problem, assignment, replicas)
    if problem.memory is not None and problem.memory.price is not None:
        loads = tuple(load + extra for load, extra in zip(loads, extras(problem, assignment), strict=True))
    found = measures(rank_loads(problem, loads))
    both = found["sum_of_squares_ns2"], found["max_load_ns"]
    return both if problem.objective == "variance" else both[::-1]


def extras(problem: Problem, assignment: dict[str, int]) -> list[int]:
    assert problem.memory is not None and problem.memory.price is not None
    members = [tuple(name for name in assignment if assignment[name] == s) for s in range(problem.k)]
    return [
        problem.memory.price(Candidate(s, sum(members[:s], ()), members[s], problem.memory.in_flight[s], 0)) or 0
        for s in range(problem.k)
    ]
