"""Whether an assignment of nodes to stages is a cut that the problem allows; independent of any solver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipecompile.partition.problem import Candidate, Problem

__all__ = ["faults"]


def faults(problem: Problem, assignment: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with `assignment`, in words: order, groups, pins, empty stages, parameters and memory."""
    members: list[list[str]] = [[] for _ in range(problem.k)]
    for node in problem.graph.nodes:
        members[assignment[node.name]].append(node.name)
    yield from _order(problem, assignment)
    for stage, names in enumerate(members):
        if not names:
            yield f"stage {stage} is empty"
        if problem.parameters_everywhere and not any(
            problem.graph.by_name[n].parameter_bytes for n in names
        ):
            yield f"stage {stage} has no parameters"
    yield from _memory(problem, members)


def _order(problem: Problem, assignment: Mapping[str, int]) -> Iterator[str]:
    for tensor in problem.graph.tensors:
        for name in tensor.consumers:
            if assignment[name] < assignment[tensor.producer]:
                yield f"{name} runs before {tensor.producer}, which it needs"
    for first, then in problem.precedence:
        if assignment[then] < assignment[first]:
            yield f"{then} lies in an earlier stage than {first}"
    for unit in problem.units:
        if len({assignment[name] for name in unit}) > 1:
            yield f"{unit[0]} and others that must stay together are separated"
    for unit, stage in problem.pins.items():
        if assignment[unit[0]] != stage:
            yield f"{unit[0]} is pinned to stage {stage}"


def _memory(problem: Problem, members: list[list[str]]) -> Iterator[str]:
    if problem.memory is None:
        return
    held = [0] * problem.ranks
    for stage, names in enumerate(members):
        held[problem.stage_ranks[stage]] += problem.memory.held(names, stage)
    for rank, (size, cap) in enumerate(zip(held, problem.memory.caps, strict=True)):
        if size > cap:
            yield f"rank {rank} holds {size} bytes, {size - cap} over its cap"
    for stage in range(problem.k):
        if (
            problem.memory.price is not None
            and problem.memory.price(_candidate(problem, members, stage)).ns is None
        ):
            yield f"stage {stage} cannot fit its budget"


def _candidate(problem: Problem, members: list[list[str]], stage: int) -> Candidate:
    assert problem.memory is not None
    return Candidate(
        stage=stage,
        before=tuple(name for names in members[:stage] for name in names),
        nodes=tuple(members[stage]),
        in_flight=problem.memory.in_flight[stage],
        budget=problem.memory.caps[problem.stage_ranks[stage]],
    )
