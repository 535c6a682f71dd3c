"""The constraints of a problem that an assignment violates; independent of any solver.

The solver asserts with it that its answer is allowed, and tests list all cuts with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipecompile.ir.size import size_text
from pipecompile.partition.memory_constraint import StageCandidate
from pipecompile.partition.problem import PartitionProblem

__all__ = ["violations"]


def violations(problem: PartitionProblem, assignment: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each constraint that `assignment` (node to stage) violates.

    Checked are order, units, pins, empty stages, parameters and memory.
    """
    # From the nodes of the graph and not of the assignment: a node must not be missing.
    members: list[list[str]] = [[] for _ in range(problem.k)]
    for node in problem.graph.nodes:
        members[assignment[node.name]].append(node.name)
    yield from _order_violations(problem, assignment)
    yield from _unit_violations(problem, assignment)
    for stage, names in enumerate(members):
        if not names:
            yield f"stage {stage} is empty"
        if problem.parameters_everywhere and not any(
            problem.graph.by_name[name].parameter_bytes for name in names
        ):
            yield f"stage {stage} has no parameters"
    yield from _memory_violations(problem, members)


def _order_violations(problem: PartitionProblem, assignment: Mapping[str, int]) -> Iterator[str]:
    for tensor in problem.graph.tensors:
        for name in tensor.consumers:
            if assignment[name] < assignment[tensor.producer]:
                yield f"{name} runs before {tensor.producer}, which it needs"
    for first, then in problem.precedence:
        if assignment[then] < assignment[first]:
            yield f"{then} lies in an earlier stage than {first}"


def _unit_violations(problem: PartitionProblem, assignment: Mapping[str, int]) -> Iterator[str]:
    for unit in problem.units:
        if len({assignment[name] for name in unit}) > 1:
            yield f"{unit[0]} and others that must stay together are separated"
    for unit, stage in problem.pins.items():
        if assignment[unit[0]] != stage:
            yield f"{unit[0]} is pinned to stage {stage}"


def _memory_violations(problem: PartitionProblem, members: list[list[str]]) -> Iterator[str]:
    """Yield each rank that is over its cap, and each stage that nothing lets fit its cap."""
    memory = problem.memory
    if memory is None:
        return
    held = [0] * problem.ranks
    for stage, names in enumerate(members):
        held[problem.stage_ranks[stage]] += memory.held_bytes(names, stage)
    for rank, (size, cap) in enumerate(zip(held, memory.caps, strict=True)):
        # With prices this sum is only a lower bound: the price of each stage decides.
        if size > cap:
            yield f"rank {rank} holds {size_text(size)}, {size_text(size - cap)} over its cap"
    if memory.price is None:
        return
    for stage in range(problem.k):
        candidate = StageCandidate(
            stage=stage,
            before=tuple(name for names in members[:stage] for name in names),
            nodes=tuple(members[stage]),
            in_flight=memory.in_flight[stage],
            cap=memory.caps[problem.stage_ranks[stage]],
        )
        if memory.price(candidate).ns is None:
            yield f"stage {stage} cannot fit its cap"
