"""Small problems, and all of their cuts, so that tests know the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from hypothesis import assume
from hypothesis import strategies as st

from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.links import FREE, Links
from pipecompile.partition.memory_constraint import MemoryConstraint, Price, StageCandidate
from pipecompile.partition.objective import measures, rank_loads, stage_loads
from pipecompile.partition.problem import COMMUNICATIONS, PartitionProblem
from pipecompile.partition.violations import violations

Score = tuple[int, int]


def node(
    name: str,
    forward: int,
    backward: int = 0,
    *,
    group: str | None = None,
    held: int = 0,
    saved: int = 0,
) -> Node:
    return Node(
        name=name,
        forward_ns=forward,
        backward_ns=backward,
        parameter_bytes=held,
        saved_bytes=saved,
        group=group,
    )


def chain(times: Sequence[int], size: int = 0, held: Sequence[int] | None = None) -> CostGraph:
    """Return nodes n0, n1, … in a row; each of them sends `size` bytes to the next one."""
    names = [f"n{index}" for index in range(len(times))]
    bytes_of = held or [0] * len(times)
    return CostGraph(
        nodes=tuple(node(n, 0, t, held=h) for n, t, h in zip(names, times, bytes_of, strict=True)),
        tensors=tuple(
            Tensor(producer=a, consumers=(b,), bytes=size, gradient_bytes=0)
            for a, b in pairwise(names)
        ),
    )


def letter_graph(names: str, edges: str, groups: dict[str, str] | None = None) -> CostGraph:
    """Return a graph of a node for each letter; "ab ac" are edges from a to b and from a to c."""
    consumers = {
        name: tuple(edge[1] for edge in edges.split() if edge[0] == name) for name in names
    }
    return CostGraph(
        nodes=tuple(
            Node(
                name=name,
                forward_ns=1,
                backward_ns=2,
                parameter_bytes=0,
                saved_bytes=0,
                group=(groups or {}).get(name),
            )
            for name in names
        ),
        tensors=tuple(
            Tensor(producer=name, consumers=to, bytes=1, gradient_bytes=1)
            for name, to in consumers.items()
            if to
        ),
    )


@st.composite
def graphs(draw: st.DrawFn, most: int, scale: int = 1, narrow: bool = False) -> CostGraph:
    """Up to `most` nodes with tensors of several consumers, and perhaps a group.

    Nodes need not be connected. In a `narrow` graph most feed the next one: few cuts are possible.
    """
    size, times = draw(st.integers(1, most)), st.integers(0, 12).map(lambda time: time * scale)
    group, held = st.sampled_from([None] * 5 + ["g"]), st.integers(0, 5)
    nodes = [
        node(
            f"n{i}", draw(times), draw(times), group=draw(group), held=draw(held), saved=draw(held)
        )
        for i in range(size)
    ]
    tensors = []
    for i in range(size - 1):
        consumers = draw(st.sets(st.integers(i + 1, size - 1), max_size=3))
        if narrow and draw(st.integers(0, 4)):
            consumers.add(i + 1)
        if consumers:
            sizes = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
            names = tuple(f"n{consumer}" for consumer in sorted(consumers))
            tensors.append(
                Tensor(producer=f"n{i}", consumers=names, bytes=sizes[0], gradient_bytes=sizes[1])
            )
    return CostGraph(nodes=tuple(nodes), tensors=tuple(tensors))


@st.composite
def links(draw: st.DrawFn, scale: int, ranks: int | None = None) -> Links:
    """One link for all, or a matrix for so many ranks."""
    rate = st.sampled_from([None, max(1, 3 * 10**8 // scale)])
    delay = st.integers(0, 2).map(lambda latency: latency * scale)
    if ranks is None:
        return Links(bandwidth_bytes_per_s=draw(rate), latency_ns=draw(delay))
    rates, delays = (st.tuples(*[st.tuples(*[value] * ranks)] * ranks) for value in (rate, delay))
    return Links(bandwidth_bytes_per_s=draw(rates), latency_ns=draw(delays))


@st.composite
def problems(
    draw: st.DrawFn, most: int = 6, scale: int = 1, shared: bool = False, narrow: bool = False
) -> PartitionProblem:
    """One stage a rank, or with `shared` several; every kind of communication and constraint."""
    graph, k = draw(graphs(most, scale, narrow)), draw(st.integers(1, 4))
    around, back = tuple(s % 2 for s in range(k)), (0, 1, 1, 0)[:k]
    placement = draw(st.sampled_from([(0,) * k, around, back])) if shared else tuple(range(k))
    ranks, communication = max(placement) + 1, draw(st.sampled_from(COMMUNICATIONS))
    speed = st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(3, 2)])
    names = st.sampled_from([n.name for n in graph.nodes])
    return PartitionProblem(
        graph,
        k,
        objective=draw(st.sampled_from(["variance", "max-load", "total-load"])),
        communication=communication,
        links=draw(
            links(scale) if communication == "endpoint" else links(scale) | links(scale, ranks)
        ),
        placement=placement,
        speeds=draw(st.none() | st.tuples(*[speed] * ranks)),
        recompute=draw(st.booleans()),
        memory=draw(st.none() | memories(graph, k, ranks)),
        pin=draw(st.dictionaries(names, st.integers(-k, k - 1), max_size=1)),
        together=draw(st.just(()) | st.tuples(st.tuples(names, names))),
        precedence=draw(st.just(()) | st.tuples(st.tuples(names, names))),
        parameters_everywhere=draw(st.sampled_from([False, False, True])),
    )


def with_part_of_memory(problem: PartitionProblem, part: int) -> PartitionProblem:
    """Return a problem whose ranks may hold one in `part` bytes; without memory it is not drawn."""
    assume(problem.memory is not None)
    assert problem.memory is not None
    caps = tuple(cap // part for cap in problem.memory.caps)
    return replace(problem, memory=replace(problem.memory, caps=caps))


@st.composite
def memories(draw: st.DrawFn, graph: CostGraph, k: int, ranks: int) -> MemoryConstraint:
    caps, in_flight = (
        draw(st.tuples(*[st.integers(8, 40)] * ranks)),
        draw(st.tuples(*[st.integers(1, 3)] * k)),
    )
    simple = MemoryConstraint.simple(graph, caps, in_flight, Fraction(3, 2))
    priced = ranks == k and draw(st.booleans())
    return MemoryConstraint(
        caps,
        in_flight,
        simple.resident,
        simple.saved,
        prices(draw(st.integers(0, 9))) if priced else None,
    )


def prices(seed: int) -> Callable[[StageCandidate], Price]:
    """Return a price that follows no rule, so that no search can assume one."""

    def price(candidate: StageCandidate) -> Price:
        number = sum(map(ord, "".join(sorted(candidate.nodes)))) + seed * candidate.stage
        ns = (0, 0, 0, 3, None)[number % 5]
        return Price(ns, ns)

    return price


def cuts(problem: PartitionProblem) -> Iterator[dict[str, int]]:
    """Yield every assignment that the problem allows; none if there are too few units."""
    if problem.k > len(
        replace(problem, k=1, placement=(0,), speeds=None, links=FREE, memory=None, pin={}).units
    ):
        return
    place = {name: index for index, unit in enumerate(problem.units) for name in unit}
    before: list[set[int]] = [set() for _ in problem.units]
    for tensor in problem.graph.tensors:
        for name in tensor.consumers:
            before[place[name]] |= {place[tensor.producer]} - {place[name]}
    for first, then in problem.precedence:
        before[place[then]] |= {place[first]} - {place[then]}

    def extended(stages: list[int]) -> Iterator[list[int]]:
        if len(stages) == len(before):
            yield stages
            return
        for stage in range(
            max((stages[unit] for unit in before[len(stages)]), default=0), problem.k
        ):
            yield from extended([*stages, stage])

    for stages in extended([]):
        assignment = {name: stages[place[name]] for name in place}
        if next(violations(problem, assignment), None) is None:
            yield assignment


def score(
    problem: PartitionProblem, assignment: dict[str, int], replicas: tuple[int, ...] | None = None
) -> Score:
    """Return the value of the objective, prices included, and then that of another objective."""
    loads = stage_loads(problem, assignment, replicas)
    if problem.memory is not None and problem.memory.price is not None:
        loads = tuple(
            load + extra for load, extra in zip(loads, _extras(problem, assignment), strict=True)
        )
    values = measures(rank_loads(problem, loads))
    if problem.objective == "total-load":
        return sum(loads), values["max_load_ns"]
    both = values["sum_of_squares_ns2"], values["max_load_ns"]
    return both if problem.objective == "variance" else both[::-1]


def _extras(problem: PartitionProblem, assignment: dict[str, int]) -> list[int]:
    memory = problem.memory
    assert memory is not None and memory.price is not None
    members = [
        tuple(name for name in assignment if assignment[name] == s) for s in range(problem.k)
    ]
    return [
        memory.price(
            StageCandidate(
                stage=s, before=(), nodes=members[s], in_flight=memory.in_flight[s], cap=0
            )
        ).ns
        or 0
        for s in range(problem.k)
    ]
