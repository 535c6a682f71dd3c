"""What a plan tells by itself of why its step takes as long as it does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pipecompile.ir.explanation import (
    Constraint,
    Explanation,
    HeaviestRank,
    ModuleTime,
    Outcome,
    TightestRank,
)
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Idle, Kind
from pipecompile.ir.stage import Stage
from pipecompile.ir.stage_ranks import stages_on
from pipecompile.report.memory import may_lack_memory

__all__ = ["outcome_of", "plan_facts"]


def plan_facts(plan: Plan) -> Explanation:
    """Return the explanation of a plan as far as it needs no costs of nodes."""
    heaviest, tightest = _heaviest(plan), _tightest(plan)
    return Explanation(
        time_unit=plan.time_unit,
        before=outcome_of(plan),
        microbatches=plan.microbatches,
        heaviest=heaviest,
        tightest=tightest,
        idle=_summed(plan.prediction.idle),
        objective=plan.search.objective,
        bound=plan.search.bound,
        gap=plan.search.gap,
        proven=plan.search.proven and plan.options.layout is None,
        constraints=tuple(_constraints(plan, heaviest, tightest)),
        target=plan.capture.target,
    )


def outcome_of(plan: Plan) -> Outcome:
    """Return the figures by which a plan is compared with others."""
    prediction = plan.prediction
    return Outcome(
        step_ns=prediction.step_ns,
        bubble=prediction.bubble,
        load_ns=max(prediction.loads_ns),
        bound=max(memory.total.bound for memory in prediction.memory),
        ranks=plan.ranks,
        value=plan.search.value,
    )


def _summed(idle: tuple[Idle, ...]) -> Idle:
    """Return the idle time of all ranks together, by cause."""
    # With what all ranks compute these make up ranks × step, so shares of that add up to the
    # bubble.
    return Idle(
        dependency_ns=sum(rank.dependency_ns for rank in idle),
        transfer_ns=sum(rank.transfer_ns for rank in idle),
        memory_ns=sum(rank.memory_ns for rank in idle),
        imbalance_ns=sum(rank.imbalance_ns for rank in idle),
    )


# The heaviest rank


def _heaviest(plan: Plan) -> HeaviestRank:
    loads = plan.prediction.loads_ns
    rank = loads.index(max(loads))
    stages = stages_on(plan.schedule.placement, rank)
    return HeaviestRank(
        rank=rank,
        stages=stages,
        load_ns=loads[rank],
        mean_ns=sum(loads) // len(loads),
        least_ns=_least_ns(plan),
        extra_ns=sum(plan.stages[stage].extra_ns for stage in stages),
        modules=tuple(_modules(plan.stages[stage] for stage in stages)),
    )


def _least_ns(plan: Plan) -> int | None:
    """Return a lower bound of the largest load of any cut of the plan's model; None if the plan
    does not say enough: some backwards are split and some are not, and a cut may suit either.
    """
    kinds = {action.kind for row in plan.schedule.compute for action in row}
    if {Kind.BACKWARD, Kind.BACKWARD_INPUT} <= kinds:
        return None
    # Rounded down as the loads of a prediction are.
    # Stages of 10 and 6 on two ranks: the most even cut of the same nodes has a rank with 8 or
    # more. One node of 9 makes that 9, since no cut parts it.
    even = sum(_compute_ns(s, kinds) - _copies_ns(s) for s in plan.stages) // plan.ranks
    if Kind.BACKWARD not in kinds:
        return even  # nor does it say what single nodes take in halves, or in a forward alone
    runs = (run for stage in plan.stages for run in stage.module_runs)
    # A rank with a part of a stage's microbatches has that part of its load.
    most = max(map(len, plan.schedule.stage_ranks))
    # A run of several nodes may be parted by another cut: only runs of one say what a node takes.
    return max([even, *(run.ns // most for run in runs if run.nodes == 1)])


def _copies_ns(stage: Stage) -> int:
    """Return what copies take in a stage, which another cut may do without."""
    if not stage.copies:
        return 0
    # Runs have the stage's own nodes only, so what is left of its time is that of its copies.
    return stage.forward_ns + stage.backward_ns - sum(run.ns for run in stage.module_runs)


def _compute_ns(stage: Stage, kinds: set[Kind]) -> int:
    """Return what a stage computes for a microbatch by actions of these kinds."""
    if Kind.BACKWARD in kinds:
        return stage.forward_ns + stage.backward_ns
    if Kind.BACKWARD_INPUT in kinds:
        return stage.forward_ns + (stage.backward_input_ns or 0) + (stage.backward_weight_ns or 0)
    return stage.forward_ns


def _modules(stages: Iterator[Stage]) -> list[ModuleTime]:
    """Return what each module takes in these stages, heaviest first."""
    runs: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for stage in stages:
        # Runs say how many nodes they have; their names follow each other in those of the stage.
        nodes = iter(stage.own_nodes)
        for run in stage.module_runs:
            names = [next(nodes) for _ in range(run.nodes)]
            runs[run.module].append((run.nodes, run.ns, names[0]))
    times = []
    for module, parts in runs.items():
        count = sum(nodes for nodes, _, _ in parts)
        total, first = sum(ns for _, ns, _ in parts), parts[0][2]
        node = first if count == 1 else ""
        times.append(ModuleTime(module=module, nodes=count, ns=total, node=node))
    return sorted(times, key=lambda time: -time.ns)


# Memory and options


def _tightest(plan: Plan) -> TightestRank:
    caps = plan.options.caps(plan.ranks)
    bounds = [memory.total.bound for memory in plan.prediction.memory]
    # Without caps all have as much room: the one that holds most is the first to run out of it.
    rank = min(range(plan.ranks), key=lambda rank: (caps[rank] if caps else 0) - bounds[rank])
    return TightestRank(
        rank=rank,
        expected=plan.prediction.memory[rank].total.expected,
        bound=bounds[rank],
        cap=caps[rank] if caps else None,
    )


def _constraints(
    plan: Plan, heaviest: HeaviestRank, tightest: TightestRank
) -> Iterator[Constraint]:
    """Yield what the options forbid a cut."""
    options = plan.options
    if options.layout is not None:
        yield Constraint(kind="layout", where=str(options.layout_format), here=True)
    for node, stage in options.pin.items():
        # Here or elsewhere: a pin on the heaviest rank may keep it heavy, one on another may only
        # keep that one light.
        here = plan.assignment.get(node) in heaviest.stages
        yield Constraint(kind="pin", where=f"{node}={stage}", here=here)
    for names in options.groups:
        here = any(_has(plan.stages[s], name) for name in names for s in heaviest.stages)
        yield Constraint(kind="group", where=",".join(names), here=here)
    if options.granularity in ("modules", "blocks"):
        yield Constraint(kind="granularity", where=options.granularity, here=True)
    if options.parameters_everywhere:
        yield Constraint(kind="parameters", where="each stage", here=True)
    if may_lack_memory(plan):
        here = tightest.rank == heaviest.rank
        yield Constraint(kind="memory", where=f"rank {tightest.rank}", here=here)


def _has(stage: Stage, name: str) -> bool:
    """Return whether a stage has the node of that name, or nodes of the module."""
    paths = (run.module for run in stage.module_runs)
    return name in stage.nodes or any(p == name or p.startswith(f"{name}.") for p in paths)
