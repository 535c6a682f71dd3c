"""The stages of an assignment: what each runs, costs, holds and sends. Needs no PyTorch.

`planner.draft` writes them into plans, and `planner.partition_problem` simulates them while cuts
are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from msgspec.structs import replace

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Options, OwnedParameter, Route
from pipecompile.ir.stage import Boundary, ModuleRun, ReplicaExchange, Stage, TiedSum
from pipecompile.ir.stage_ranks import stage_ranks
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.policies import NO_RECOMPUTE, StageRecompute

__all__ = ["owners_of", "routes_of", "stages_of"]


def stages_of(
    graph: CostGraph,
    assignment: Mapping[str, int],
    planner: RecomputePlanner,
    *,
    with_memory: bool = True,
) -> tuple[Stage, ...]:
    """Return the stages that `assignment` (node to stage) makes of the graph.

    Without memory, they have no recompute and no footprint. InfeasibleError if a stage must
    recompute or encode saved tensors to fit its rank, and cannot.
    """
    if graph.copied:
        copying, cut = planner.with_copies(assignment)
        stages = stages_of(cut.graph, cut.assignment, copying, with_memory=with_memory)
        return tuple(_by_original_names(graph, stage, cut.originals) for stage in stages)
    k = planner.options.k
    names: list[list[str]] = [[] for _ in range(k)]
    for node in graph.nodes:
        names[assignment[node.name]].append(node.name)
    nodes_by_stage = [tuple(stage_names) for stage_names in names]
    recomputes: Sequence[StageRecompute | None] = [NO_RECOMPUTE] * k
    if with_memory:
        recomputes = planner.of_all(nodes_by_stage)
    # Boundary s is before stage s: the first one has no tensors, and neither has the last.
    boundaries = [(), *_boundaries(graph, assignment, k)]
    made: list[Stage] = []
    tied = _tied_parameters(graph, nodes_by_stage)
    tied_sums = _tied_sums(graph, tied, planner.view.placement, planner.options)
    for index, (nodes, recompute) in enumerate(zip(nodes_by_stage, recomputes, strict=True)):
        if recompute is None:
            raise InfeasibleError(_misfit(planner, index))
        inputs, outputs = boundaries[index : index + 2]
        exchanges = _exchanges(graph, nodes, planner.options)
        ranks = stage_ranks(planner.view.placement)[index]
        if len(ranks) > 1:
            exchanges = _among_stage_replicas(graph, nodes, tied, len(ranks))
        own = graph.on_rank(planner.view.placement[index])
        made.append(_stage(own, nodes, recompute, inputs, outputs, exchanges, tied_sums[index]))
    return tuple(made)


def _by_original_names(graph: CostGraph, stage: Stage, originals: Mapping[str, str]) -> Stage:
    """Return the stage with the nodes of `graph`, which copies are of, in the place of copies."""

    def named(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(originals.get(name, name) for name in names)

    own = [graph.by_name[name] for name in stage.nodes if name not in originals]
    return replace(
        stage,
        blocks=tuple(map(named, stage.blocks)),
        # A copy is no part of the model: its original lies in the runs of an earlier stage.
        module_runs=tuple(_module_runs(graph, own)),
        copies=named(name for name in stage.nodes if name in originals),
        regions=tuple(map(named, stage.regions)),
        encoded_runs=tuple(replace(run, nodes=named(run.nodes)) for run in stage.encoded_runs),
    )


def _misfit(planner: RecomputePlanner, stage: int) -> str:
    encodings = " and however it encodes saved tensors" if planner.options.encodings else ""
    rank = planner.view.placement[stage]
    return f"rank {rank} does not fit, whatever it recomputes{encodings}"


def _stage(
    graph: CostGraph,
    names: tuple[str, ...],
    recompute: StageRecompute,
    inputs: tuple[Boundary, ...],
    outputs: tuple[Boundary, ...],
    exchanges: _Exchanges,
    tied_sums: tuple[TiedSum, ...],
) -> Stage:
    """Return the stage of the nodes `names`: their sums, its boundaries and what it recomputes."""
    nodes = [graph.by_name[name] for name in names]
    return Stage(
        blocks=tuple(_blocks(nodes)),
        modules=tuple(module_ranges(node.module for node in nodes)),
        module_runs=tuple(_module_runs(graph, nodes)),
        groups=tuple(sorted({node.group for node in nodes if node.group is not None})),
        forward_ns=sum(node.forward_ns for node in nodes),
        backward_ns=sum(node.backward_ns for node in nodes),
        backward_input_ns=_sum_if_known(node.backward_input_ns for node in nodes),
        backward_weight_ns=_sum_if_known(node.backward_weight_ns for node in nodes),
        # `recompute.ns` includes encodings, which the plan lists by themselves.
        recompute_ns=recompute.ns - sum(run.ns for run in recompute.encoded_runs),
        recompute_bound_ns=recompute.least,
        per_step_ns=sum(node.per_step_ns for node in nodes),
        **exchanges._asdict(),
        tied_sums=tied_sums,
        kv_token_bytes=tuple(node.kv_token_bytes for node in nodes if node.kv_token_bytes),
        inputs=inputs,
        outputs=outputs,
        recompute=recompute.kind,
        regions=recompute.regions,
        encoded_runs=recompute.encoded_runs,
        footprint=recompute.footprint,
    )


class _Exchanges(NamedTuple):
    """What a stage exchanges with other replicas, under the names of the stage's fields."""

    replica_sum: ReplicaExchange | None = None
    backward_sum: ReplicaExchange | None = None
    action_gather: ReplicaExchange | None = None


def _exchanges(graph: CostGraph, names: Iterable[str], options: Options) -> _Exchanges:
    """Return what a stage exchanges with other replicas, under ZeRO's levels of sharding.

    An all-reduce sums parts and gathers the sums. With sharded parameters these are gathered, and
    not the sums. Each of both is done once a step, or in each action that needs it (Rajbhandari et
    al. 2020, section 7, whose steps have one microbatch).
    """
    replicas = options.replicas
    if replicas == 1 or options.is_inference:
        return _Exchanges()
    trained, held = _parameter_bytes(graph, names)
    gather, each_sum = _around(replicas, held), _around(replicas, trained)
    match options.shard:
        case None:
            return _Exchanges(_around(replicas, trained, trained))
        case "optimizer":
            return _Exchanges(_around(replicas, trained, held))
        case "gradients":
            return _Exchanges(gather, each_sum)
        case "parameters":
            return _Exchanges(None, each_sum, gather)


def _among_stage_replicas(
    graph: CostGraph, names: Sequence[str], tied: Mapping[str, Sequence[int]], replicas: int
) -> _Exchanges:
    """Return what a stage exchanges with its own replicas once a step: sums of what it trains. Of
    `tied` parameters there is one sum, over all ranks that hold them.
    """
    trained, _ = _parameter_bytes(graph, names)
    read = {name for node in names for name in graph.by_name[node].parameters}
    own = trained - sum(graph.parameter_by_name[name].bytes for name in read & tied.keys())
    return _Exchanges(_around(replicas, own, own))


def _around(replicas: int, *sizes: int) -> ReplicaExchange:
    """Return sums or gathers of so many bytes around a ring, one after the other."""
    messages = len(sizes) * (replicas - 1)
    return ReplicaExchange(messages=messages, bytes=-(-sum(sizes) // (len(sizes) * replicas)))


def _parameter_bytes(graph: CostGraph, names: Iterable[str]) -> tuple[int, int]:
    """Return the bytes of the parameters that nodes train, and of all that they read."""
    nodes = [graph.by_name[name] for name in names]
    read = {name for node in nodes for name in node.parameters}
    parameters = [graph.parameter_by_name[name] for name in read]
    # Without names nobody can say that a parameter is frozen: it counts as trained.
    unnamed = sum(node.parameter_bytes for node in nodes if not node.parameters)
    trained = sum(parameter.bytes for parameter in parameters if parameter.trainable)
    return unnamed + trained, unnamed + sum(parameter.bytes for parameter in parameters)


def _tied_parameters(
    graph: CostGraph, nodes_by_stage: Sequence[Sequence[str]]
) -> dict[str, list[int]]:
    """Return the trained parameters that several stages read, with these."""
    stages_of: dict[str, list[int]] = {}
    for stage, names in enumerate(nodes_by_stage):
        read = {name for node in names for name in graph.by_name[node].parameters}
        for name in read:
            stages_of.setdefault(name, []).append(stage)
    return {
        name: stages
        for name, stages in sorted(stages_of.items())
        if len(stages) > 1 and graph.parameter_by_name[name].trainable
    }


def _tied_sums(
    graph: CostGraph,
    tied: Mapping[str, Sequence[int]],
    placement: Sequence[int],
    options: Options,
) -> list[tuple[TiedSum, ...]]:
    """Return for each stage the sums that its rank ends with after it: those of the `tied`
    parameters that other ranks hold too.
    """
    sums: list[list[TiedSum]] = [[] for _ in placement]
    for name, stages in tied.items():
        parameter = graph.parameter_by_name[name]
        holders = [stage_ranks(placement)[stage] for stage in stages]
        ranks = tuple(sorted(set(chain.from_iterable(holders))))
        if len(ranks) > 1:
            # Where parameters are sharded, each replica sums its part.
            held = -(-parameter.bytes // (options.replicas if options.shard else 1))
            each = TiedSum(ranks=ranks, messages=2 * (len(ranks) - 1), bytes=-(-held // len(ranks)))
            # A rank sums once, when all of its stages are done. The first one is done last, even if
            # it does not hold the parameter.
            for rank in sorted({placement[stage] for stage in stages}):
                sums[placement.index(rank)].append(each)
    return [tuple(each) for each in sums]


def _blocks(nodes: Iterable[Node]) -> Iterator[tuple[str, ...]]:
    """Yield the names of the nodes, in runs that lie in one block of the model."""
    for _, run in groupby(nodes, key=lambda node: block_of(node.module)):
        yield tuple(node.name for node in run)


def _module_runs(graph: CostGraph, nodes: Sequence[Node]) -> Iterator[ModuleRun]:
    """Yield the runs of a stage's nodes that lie in one module and follow each other in the
    graph.
    """
    # In a run, the place less the index in the stage is the same for all nodes.
    numbered = enumerate(nodes)
    for (_, module), run in groupby(
        numbered, key=lambda pair: (graph.places[pair[1].name] - pair[0], pair[1].module)
    ):
        members = [node for _, node in run]
        yield ModuleRun(
            module=module,
            place=graph.places[members[0].name],
            nodes=len(members),
            ns=sum(node.forward_ns + node.backward_ns for node in members),
        )


def _sum_if_known(values: Iterable[int | None]) -> int | None:
    """Return the sum; None if a value is not known."""
    total = 0
    for value in values:
        # A sum of only some values would be taken for the sum of all.
        if value is None:
            return None
        total += value
    return total


def _boundaries(
    graph: CostGraph, assignment: Mapping[str, int], k: int
) -> list[tuple[Boundary, ...]]:
    """Return the tensors sent from each stage to the next one, relayed ones included, in graph
    order; the last stage sends none.
    """
    crossing: list[list[Boundary]] = [[] for _ in range(k)]
    for tensor in graph.tensors:
        first = assignment[tensor.producer]
        # A tensor without consumers crosses nothing.
        last = max((assignment[name] for name in tensor.consumers), default=first)
        if first < last:
            boundary = Boundary(
                name=tensor.producer, bytes=tensor.bytes, gradient_bytes=tensor.gradient_bytes
            )
            # From stage 0 to a reader in stage 3 it crosses the boundaries behind 0, 1 and 2.
            for stage in range(first, last):
                crossing[stage].append(boundary)
    return [tuple(boundary) for boundary in crossing]


def routes_of(graph: CostGraph, assignment: Mapping[str, int]) -> Iterator[Route]:
    """Yield the routes of all relayed tensors: those with a consumer after the next stage."""
    for tensor in graph.tensors:
        first = assignment[tensor.producer]
        last = max((assignment[name] for name in tensor.consumers), default=first)
        if last - first > 1:
            # From stage 0 to a reader in stage 3: (0, 1, 2, 3), where 1 and 2 relay it.
            yield Route(name=tensor.producer, stages=tuple(range(first, last + 1)))


def owners_of(graph: CostGraph, stages: Sequence[Stage]) -> Iterator[OwnedParameter]:
    """Every parameter with the stages that hold it: its readers, or the first stage."""
    names_by_stage = [
        {name for node in stage.nodes for name in graph.by_name[node].parameters}
        for stage in stages
    ]
    for parameter in graph.parameters:
        readers = [stage for stage, names in enumerate(names_by_stage) if parameter.name in names]
        # A parameter that no node reads is in the state dict even so.
        holders = readers or [0]
        yield OwnedParameter(
            name=parameter.name,
            aliases=parameter.aliases,
            bytes=parameter.bytes,
            trainable=parameter.trainable,
            owner=holders[0],
            stages=tuple(holders),
        )


def module_ranges(paths: Iterable[str]) -> Iterator[str]:
    """Yield the blocks of module paths as ranges, each with all that lies in it.

    Paths in `h.0`, `h.1` and `h.2`, then in `ln_f`, give `h.0-2` and `ln_f`.
    """
    # Each block once, in the order of its first node.
    blocks = dict.fromkeys(block for path in paths if (block := block_of(path)))
    for parent, run in groupby(blocks, key=lambda block: re.sub(r"\.\d+$", "", block)):
        members = list(run)
        numbers = [block[len(parent) + 1 :] for block in members]
        yield f"{parent}.{numbers[0]}-{numbers[-1]}" if len(members) > 1 else members[0]
