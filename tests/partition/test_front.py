"""Every method against the list of all cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from cuts import cuts, problems, score
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.errors import InfeasibleError
from pipecompile.partition.boundaries import Prefixes
from pipecompile.partition.chains import Chains
from pipecompile.partition.check import faults
from pipecompile.partition.cpsat import FINE, solve_integer
from pipecompile.partition.front import solve
from pipecompile.partition.instance import Instance
from pipecompile.partition.lattice import every_cut
from pipecompile.partition.objective import lower_bound
from pipecompile.partition.orders import orders
from pipecompile.partition.pricing import Pricing
from pipecompile.partition.problem import Problem
from pipecompile.partition.windows import Limit


def _possible(problem: Problem) -> bool:
    return problem.k <= len(Problem(problem.graph, 1).units)


@given(problems())
def test_the_best_of_all_cuts_is_found_and_proven(problem: Problem) -> None:
    every = list(cuts(problem)) if _possible(problem) else []
    if not every:
        with pytest.raises(InfeasibleError):
            solve(problem, seconds=1.0)
        return
    found = solve(problem, seconds=1.0)
    assert (found.search.value, score(problem, found.assignment)) == (
        min(map(_first(problem), every)),
        min(score(problem, c) for c in every),
    )
    assert found.search.proven and found.search.bound == found.search.value
    assert not list(faults(problem, found.assignment))


def _first(problem: Problem):  # type: ignore[no-untyped-def]
    return lambda assignment: score(problem, assignment)[0]


@given(problems(shared=True))
def test_stages_that_share_ranks(problem: Problem) -> None:
    every = list(cuts(problem)) if _possible(problem) else []
    if not every:
        with pytest.raises(InfeasibleError):
            solve(problem, seconds=1.0)
        return
    found = solve(problem, seconds=1.0)
    assert found.search.value == min(map(_first(problem), every))
    assert not list(faults(problem, found.assignment))


@given(problems(), st.booleans())
def test_ideals_and_the_integer_program_agree(problem: Problem, coarse: bool) -> None:
    every = list(cuts(problem)) if _possible(problem) else []
    if not every:
        return
    instance = Instance.of(problem)
    best = min(score(problem, cut) for cut in every)
    limit = Limit(squares=best[0]) if problem.objective == "variance" else Limit(most=best[0])
    pricing = Pricing(problem, 10**6)
    for within in (Limit(), limit):
        chains = every_cut(instance, within)
        assert chains is not None
        found = pricing.best(chains, within)
        assert found is not None
        assert found.most == (best[1] if problem.objective == "variance" else best[0])
    if problem.memory is None or problem.memory.price is None:
        answer = solve_integer(instance, None, Limit(), 5.0)
        assert answer.stages is not None
        assert score(problem, instance.assignment(answer.stages))[0] == best[0] == answer.bound
