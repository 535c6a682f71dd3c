"""What replicas exchange, against the simulated step."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pipecompile.api.report import text_of
from pipecompile.ir.plan import Plan, ShardLevel
from pipecompile.report.inference import load_text
from pipecompile.report.replicas import exchanged
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.stages import problem_of_stages

MakePlan = Callable[..., Plan]


def problem_without_ties(plan: Plan) -> PlacedProblem:
    stages = [msgspec.structs.replace(stage, tied_sums=()) for stage in plan.stages]
    return problem_of_stages(stages, plan.links, plan.schedule.placement, plan.microbatches)


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("shard", [None, "optimizer", "gradients", "parameters"])
def test_what_is_said_is_what_is_simulated(
    make_plan: MakePlan, recompute: str, shard: ShardLevel | None
) -> None:
    alone = make_plan(recompute=recompute)
    plan = make_plan(recompute=recompute, replicas=2, shard=shard)
    text = next(line for line in text_of(plan).splitlines() if line.startswith("  replicas"))
    assert ("in its actions" in text) == (shard in ("gradients", "parameters"))
    assert ("beside compute" in text) == (shard != "parameters")
    one, other = map(problem_without_ties, (alone, plan))
    for rank in range(plan.ranks):
        said = exchanged(plan, rank)
        # Each rank has one stage. Its actions take what they take alone, and the exchanges.
        row = plan.schedule.compute[rank]
        added = sum(other.duration_ns(action) - one.duration_ns(action) for action in row)
        assert said.within_ns == added
        assert said.beside_ns == other.costs[rank].reduce_ns - one.costs[rank].reduce_ns
        assert said.bytes > 0


def test_a_load_says_that_it_has_exchanges(make_plan: MakePlan) -> None:
    assert load_text(make_plan(replicas=2, shard="optimizer")) == load_text(make_plan())
    assert "sum and gather over replicas" in load_text(make_plan(replicas=2, shard="gradients"))
