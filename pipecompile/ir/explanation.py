"""The result of `pipecompile explain`: why a step is as long as it is, and what would change it.

`report/plan_facts.py` makes it of a plan alone, and `api/explain.py` adds what was solved again.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import asdict

from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.schedule import Idle
from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = [
    "TIME_LIMIT",
    "Constraint",
    "ConstraintKind",
    "EdgeMove",
    "ExplainedPlan",
    "Explanation",
    "HeaviestRank",
    "HeldBy",
    "ModuleTime",
    "Outcome",
    "TightestRank",
    "Undivided",
    "WhatIf",
    "WhatIfKind",
]

TIME_LIMIT = 60.0  # seconds, unless others are asked for, after which no change is begun

ConstraintKind = Literal["layout", "pin", "group", "granularity", "parameters", "memory"]
"""What the options of a plan forbid a cut: `parameters` is that each stage has some."""
HeldBy = Literal["node", "group", "model", "granularity", "order"]
WhatIfKind = Literal[
    "memory",
    "stages",
    "microbatches",
    "schedule",
    "objective",
    "next cut",
    "pin",
    "group",
    "layout",
    "granularity",
    "parameters",
]
"""What is changed, in the order in which changes are tried."""


class ModuleTime(Value, frozen=True, kw_only=True):
    """What a module takes in the heaviest rank: forward and backward of a microbatch, in all of its
    nodes there. `node` is the name of the node where there is only one.
    """

    module: str
    nodes: Positive
    ns: NonNegative
    node: str = ""


# Loads of 10 and 6, where one node takes 9: the mean is 8, and no cut has a heaviest rank below
# 9.
class HeaviestRank(Value, frozen=True, kw_only=True):
    """The rank with the largest load, its stages, and what their modules take, heaviest first.

    `extra_ns` is the part of the load that recompute and encodings add. No cut has a heaviest rank
    with less load than `least_ns`: all compute shared out evenly, or a node that takes longer,
    which no cut splits. It is None where the plan does not say enough for that.
    """

    rank: NonNegative
    stages: tuple[NonNegative, ...]
    load_ns: NonNegative
    mean_ns: NonNegative
    least_ns: NonNegative | None
    extra_ns: NonNegative
    modules: tuple[ModuleTime, ...]


class TightestRank(Value, frozen=True, kw_only=True):
    """The rank with the least memory left under its cap; without caps the one that holds most."""

    rank: NonNegative
    expected: NonNegative
    bound: NonNegative
    cap: NonNegative | None


class Constraint(Value, frozen=True, kw_only=True):
    """What the options of a plan forbid a cut, and to whom: a node, modules or a rank.

    `here` says whether that concerns the heaviest rank.
    """

    kind: ConstraintKind
    where: str
    here: bool


# A product of 6 ms in one group with a norm of 2 ms: node_ns = 6 ms, nodes = 2, ns = 8 ms, by =
# "group".
class Undivided(Value, frozen=True, kw_only=True):
    """The nodes of the heaviest rank that no cut parts and that take most together.

    `node` is the longest of them, and takes `node_ns`. Others are with it `by` a group that was
    asked for, by the model (nodes that write to one tensor, for instance), by the granularity, or
    by the order of gradient sums.
    """

    node: str
    module: str
    node_ns: NonNegative
    nodes: Positive
    ns: NonNegative
    by: HeldBy


# Loads of 10 and 6; the last node of stage 0 that takes any time takes 1. If it lay in stage 1:
# ns = 1, before = 0, after = 1, receiver_ns = 7, heaviest_ns = (10, 9).
class EdgeMove(Value, frozen=True, kw_only=True):
    """What would happen if the first or the last nodes of a stage, as few as take any time, lay in
    the stage beyond.

    `node` is the longest of them. `receiver_ns` is what the rank of that stage would take, and
    `heaviest_ns` the largest load, now and then: compute and transfers, without what recompute and
    encodings add. `obstacle` is the constraint that forbids the move, if one does.
    """

    node: str
    nodes: Positive
    ns: NonNegative
    before: NonNegative
    after: NonNegative
    receiver_ns: NonNegative
    heaviest_ns: tuple[NonNegative, NonNegative]
    obstacle: str = ""


# All are of the plan as it would be run, not of the cut alone: a change that makes the heaviest
# rank lighter may make the step longer.
class Outcome(Value, frozen=True, kw_only=True):
    """The figures by which plans are compared: `load_ns` and `bound` are of the ranks with most,
    `value` is that of the objective.
    """

    step_ns: NonNegative
    bubble: float
    load_ns: NonNegative
    bound: NonNegative
    ranks: Positive
    value: NonNegative


class WhatIf(Value, frozen=True, kw_only=True):
    """One change of the options, and what the plan that was made with it comes to.

    `command` makes that plan. Without an `after` there is none, for the `reason`.
    """

    kind: WhatIfKind
    change: str
    command: str
    after: Outcome | None = None
    reason: str = ""


# Two ranks and a step of 21, for which they compute 12 and 18: `idle` is 9 + 3 = 12 of 42 in all,
# and the bubble 12 / 42.
class Explanation(Value, frozen=True, kw_only=True):
    """Why a step takes as long as it does, and what would change it.

    `idle` is summed over all ranks; with their compute it makes ranks × step. `undivided`, `moves`
    and `what_ifs` need the costs of nodes, and are empty without. Of the changes that shorten the
    step, `first` is the command for the one to try first; "" if there is none. `target` is the
    model that commands name.
    """

    time_unit: TimeUnit
    before: Outcome
    microbatches: Positive
    heaviest: HeaviestRank
    tightest: TightestRank
    idle: Idle
    objective: str
    bound: NonNegative
    gap: float
    proven: bool
    constraints: tuple[Constraint, ...]
    undivided: Undivided | None = None
    moves: tuple[EdgeMove, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    first: str = ""
    target: str = ""
    notes: tuple[str, ...] = ()


class ExplainedPlan(Explanation, frozen=True, kw_only=True):
    """The result of `pipecompile explain`: the path of a plan, and its explanation."""

    plan: str

    @classmethod
    def of(cls, plan: str, explanation: Explanation) -> ExplainedPlan:
        """Return the result for the plan in the file at `plan`."""
        return cls(plan=plan, **asdict(explanation))
