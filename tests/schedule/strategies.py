"""Hypothesis strategies: any schedule problem, and any order in which it can be done."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from hypothesis import strategies as st

from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.schedule.placement import place
from pipecompile.schedule.problem import Network, PlacedProblem, Skip, StageCosts

TIMES = st.integers(0, 9)
BYTES = st.integers(0, 20)


@st.composite
def placements(draw: st.DrawFn, max_ranks: int = 4, max_stages: int = 6) -> tuple[int, ...]:
    """Placements: linear, loop, V, or any in which each rank has a stage."""
    ranks = draw(st.integers(1, max_ranks))
    shape = draw(st.sampled_from(["linear", "loop", "v", "any"]))
    if shape != "any":
        return place(shape, ranks, draw(st.integers(1, max(1, max_stages // ranks))))
    more = draw(st.lists(st.integers(0, ranks - 1), max_size=max_stages - ranks))
    return tuple(draw(st.permutations([*range(ranks), *more])))


@st.composite
def works(draw: st.DrawFn, can_split: bool) -> StageCosts:
    """Costs of a stage; the time of a full backward does not depend on that of its halves."""
    kept, recompute = draw(BYTES), draw(st.booleans())
    recomputed = draw(BYTES) if recompute else 0
    return StageCosts(
        forward_ns=draw(TIMES),
        backward_ns=draw(TIMES),
        backward_input_ns=draw(TIMES),
        backward_weight_ns=draw(TIMES),
        recompute_ns=draw(TIMES) if recompute else 0,
        reduce_ns=draw(st.sampled_from([0, 0, 4, 30])),
        kept_bytes=kept,
        recomputed_bytes=recomputed,
        between_bytes=draw(st.integers(0, kept + recomputed)),
        can_split=can_split,
        recompute=recompute,
    )


NETWORKS = st.builds(Network, blocking=st.booleans(), shared=st.booleans())


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    placement: st.SearchStrategy[tuple[int, ...]] | None = None,
    max_microbatches: int = 4,
    skips: bool = True,
    networks: st.SearchStrategy[Network] = NETWORKS,
) -> PlacedProblem:
    """Schedule problems of a few stages; caps, if any, allow one microbatch alone."""
    on = draw(placement or placements())
    stages, apart = len(on), [left != right for left, right in pairwise(on)]
    can_split = draw(st.booleans())
    problem = PlacedProblem(
        placement=on,
        microbatches=draw(st.integers(1, max_microbatches)),
        costs=tuple(draw(works(can_split)) for _ in on),
        forward_transfer_ns=tuple(draw(TIMES) * away for away in apart),
        backward_transfer_ns=tuple(draw(TIMES) * away for away in apart),
        gradient=tuple(draw(st.sampled_from([True, True, True, False])) for _ in apart),
        skips=tuple(_skips(draw, on)) if skips and stages > 2 else (),
        network=draw(networks),
    )
    return _capped(problem, draw(st.none() | st.integers(0, 60)))


def _skips(draw: st.DrawFn, on: tuple[int, ...]) -> Iterator[Skip]:
    pairs = [(a, b) for a, b in combinations(range(len(on)), 2) if b - a > 1]
    for source, destination in draw(st.lists(st.sampled_from(pairs), max_size=2, unique=True)):
        away = on[source] != on[destination]
        yield Skip(source, destination, draw(BYTES), draw(TIMES) * away, draw(TIMES) * away)


def _capped(problem: PlacedProblem, more: int | None) -> PlacedProblem:
    if more is None:
        return problem
    alone = [0] * problem.ranks
    for stage, rank in enumerate(problem.placement):
        own = (Action(stage, Kind.FORWARD, 0), Action(stage, Kind.RECOMPUTE, 0))
        alone[rank] += sum(map(problem.change_bytes, own))
    return replace(problem, caps=tuple(size + more for size in alone))


@st.composite
def orders(draw: st.DrawFn, problem: PlacedProblem, *, tidy: bool = False) -> Schedule:
    """Orders in which the actions of `problem` can happen, with backwards split where possible.

    With `tidy` the forwards, the backwards and the weight backwards of each stage are in microbatch
    order, as in a sound schedule.
    """
    rng = draw(st.randoms(use_true_random=False))
    halved = {
        (s, m)
        for s in range(problem.stages)
        for m in range(problem.microbatches)
        if rng.random() < 0.5
    }
    return random_order(problem, rng, halved if problem.can_split else set(), tidy=tidy)


def random_order(
    problem: PlacedProblem, rng: random.Random, halved: set[tuple[int, int]], *, tidy: bool
) -> Schedule:
    """Return one order of many: a random one of the possible actions happens next."""
    rows: list[list[Action]] = [[] for _ in range(problem.ranks)]
    left = [
        action for stage in range(problem.stages) for action in _of_stage(problem, stage, halved)
    ]
    done: set[tuple[int, str, int]] = set()
    while left:
        possible = [action for action in left if _can_happen(problem, action, done)]
        if tidy:
            possible = [
                a
                for a in possible
                if not any(_same_lane(a, b) and b.microbatch < a.microbatch for b in left)
            ]
        action = rng.choice(possible)
        left.remove(action)
        rows[problem.placement[action.stage]].append(action)
        done.add((action.stage, _lane(action), action.microbatch))
    return Schedule.of("random", problem.microbatches, problem.placement, rows)


def _of_stage(problem: PlacedProblem, stage: int, halved: set[tuple[int, int]]) -> Iterator[Action]:
    for microbatch in range(problem.microbatches):
        half = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        recompute = (Kind.RECOMPUTE,) if problem.costs[stage].recompute else ()
        for kind in (
            Kind.FORWARD,
            *recompute,
            *(half if (stage, microbatch) in halved else (Kind.BACKWARD,)),
        ):
            yield Action(stage, kind, microbatch)


def _lane(action: Action) -> str:
    return "B" if action.kind is Kind.BACKWARD_INPUT else action.kind.value


def _same_lane(one: Action, other: Action) -> bool:
    # Full backwards and gradients of weights both add to a stage's gradients.
    sums = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    both = one.kind in sums and other.kind in sums
    return one.stage == other.stage and (both or _lane(one) == _lane(other))


def _can_happen(problem: PlacedProblem, action: Action, done: set[tuple[int, str, int]]) -> bool:
    stage, _, microbatch, _ = action
    lane = _lane(action)
    needs: list[tuple[int, str]] = []
    if lane == "F":
        needs += [(stage - 1, "F")] * (stage > 0)
        needs += [(skip.source, "F") for skip in problem.skips if skip.destination == stage]
    elif lane == "W":
        needs.append((stage, "B"))
    elif lane == "R":
        needs.append((stage, "F"))
    else:
        needs += [(stage, "F"), *[(stage, "R")] * problem.costs[stage].recompute]
        needs += [(stage + 1, "B")] * (stage + 1 < problem.stages and problem.gradient[stage])
        needs += [(skip.destination, "B") for skip in problem.skips if skip.source == stage]
    return all((stage, lane, microbatch) in done for stage, lane in needs)
