"""What the step of a setting is likely to be: a guess that says what to plan first, and no bound.

It is the step of equal stages that send what crosses a narrow boundary, with the recompute that
such stages need to fit. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import msgspec

from pipecompile.ir.links import FREE, Links
from pipecompile.ir.plan import Options
from pipecompile.planner.setting_bounds import Work
from pipecompile.schedule.named_orders import SPLIT, fitting_names, generate
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.selection import placements
from pipecompile.schedule.simulator import simulate

__all__ = ["LikelyStep", "likely_step"]

# After as many microbatches for each rank an order repeats itself.
SIMULATED_ROUNDS = 3
# What more ranks do is much the same, and takes longer to simulate.
SIMULATED_RANKS = 16
PARTS = 100  # of what a stage takes, so that sizes of microbatches with the same shares are alike


class LikelyStep(NamedTuple):
    """A guess of a step in ns, and of the share of its memory that a rank needs; `free_ns` is the
    guess of the step if messages took no time.
    """

    step_ns: int
    filled: float
    free_ns: int


def likely_step(
    work: Work, options: Options, state_bytes: int, fixed_bytes: int = 0, links: Links = FREE
) -> LikelyStep:
    """Return a guess for plans with these options; all ranks together hold `state_bytes` whatever
    is in flight, and each takes `fixed_bytes` before it holds anything. `links` are among all ranks
    of all replicas.

    A search is no longer than a named order: it has the guess of the shortest one that may fit.
    """
    orders = _orders(work, options)
    guesses = [_of_order(work, each, state_bytes, fixed_bytes, links) for each in orders]
    least = min(guesses, key=lambda guess: (guess.filled > 1, guess.step_ns, guess.filled))
    alike = (each.free_ns for each in guesses if (each.filled > 1) == (least.filled > 1))
    return least._replace(free_ns=min(alike))


def _orders(work: Work, options: Options) -> Iterator[Options]:
    """Yield the options with each named order in place of a search, or as they are."""
    if options.schedule != "search":
        yield options
        return
    for name in fitting_names(placements(options)[0], options.microbatches):
        # Whether an order may split is known with how long the halves of backwards take.
        if name not in SPLIT or work.input_ns is not None:
            yield msgspec.structs.replace(options, schedule=name)


def _of_order(
    work: Work, options: Options, state_bytes: int, fixed_bytes: int, links: Links
) -> LikelyStep:
    """Return the guess for plans with a named order."""
    ranks, stages = _ranks(options), options.k
    work = _balanced(work, ranks)
    total = work.forward_ns + work.backward_ns
    alike = _with_fewer_ranks(options, ranks)
    fewer, m = _ranks(alike), alike.microbatches
    simulated = min(m, SIMULATED_ROUNDS * fewer)
    placement, shares = placements(alike)[0], _shares(work)
    # Of what a stage takes: as many stages as ranks have the same shares on fewer ranks.
    message = PARTS * stages * _transfer_ns(work, options, links) // max(1, total)
    free, kept, between = _equal_stages(options.schedule, placement, simulated, *shares)
    times, *_ = _equal_stages(options.schedule, placement, simulated, *shares, message)
    free_ns, step_ns = (
        parts * total // (PARTS * alike.k) + (m - simulated) * total // fewer
        for parts in (free, times)
    )
    if kept == simulated * alike.k // fewer:  # all microbatches, as gpipe does
        kept = kept * m // simulated
    held = kept * work.saved_bytes // alike.k
    # What a stage holds while one microbatch is recomputed, besides those that wait for a W.
    one = between * work.saved_bytes // alike.k + work.saved_bytes // stages
    caps = options.caps(ranks)
    if caps is None:
        return LikelyStep(step_ns, 0.0, free_ns)
    cap = max(0, sum(caps) // ranks - fixed_bytes)
    room = cap - state_bytes // ranks
    # Two gradients of a stage are unread, and half of what crosses a boundary is a gradient.
    sent = stages // ranks * work.boundary_bytes if ranks > 1 else 0
    # What is recomputed waits with what it received and what it sent.
    waiting = kept * (ranks // fewer) * work.boundary_bytes
    extra, activations = _recompute(work, options, held, room - sent, one + waiting)
    filled = (state_bytes // ranks + sent + activations) / max(1, cap)
    recompute_ns = m * extra // fewer
    return LikelyStep(step_ns + recompute_ns, filled, free_ns + recompute_ns)


def _ranks(options: Options) -> int:
    return max(placements(options)[0]) + 1


def _with_fewer_ranks(options: Options, ranks: int) -> Options:
    """Return options for at most a few ranks, with as many microbatches for each rank.

    Of the same work they have about the same step and hold about as much: 64 ranks whose 256
    microbatches take 1/64 each idle for as long as 16 ranks whose 64 microbatches take 1/16.
    """
    least, m = min(ranks, SIMULATED_RANKS), options.microbatches
    fewer = next(p for p in range(least, ranks + 1) if ranks % p == 0 and m * p % ranks == 0)
    return msgspec.structs.replace(
        options, k=options.k // ranks * fewer, microbatches=m * fewer // ranks
    )


def _shares(work: Work) -> tuple[int, int]:
    """Return how many of `PARTS` the forward takes, and making the gradients of inputs."""
    inner = work.backward_ns if work.input_ns is None else work.input_ns
    total = max(1, work.forward_ns + work.backward_ns)
    forward, inner = (round(PARTS * ns / total) for ns in (work.forward_ns, inner))
    return forward, min(inner, PARTS - forward)


def _balanced(work: Work, ranks: int) -> Work:
    """Return work of which equal ranks have the loads that unequal ones have of `work`."""
    total = work.forward_ns + work.backward_ns
    if work.busiest_ns * ranks <= total:
        return work
    forward, backward, inner = (
        None if ns is None else ns * work.busiest_ns * ranks // total
        for ns in (work.forward_ns, work.backward_ns, work.input_ns)
    )
    assert forward is not None
    assert backward is not None
    return replace(work, forward_ns=forward, backward_ns=backward, input_ns=inner)


def _transfer_ns(work: Work, options: Options, links: Links) -> int:
    """Return how long a message is likely to be under way, the mean of all boundaries of ranks."""
    placement, among = placements(options)[0], links.among(_ranks(options))
    # Half of what crosses a boundary goes forward, and half of it back.
    size = work.boundary_bytes // 2
    hops = [among.transfer_ns(*pair, size) for pair in pairwise(placement) if pair[0] != pair[1]]
    return sum(hops) // max(1, len(hops))


@lru_cache(maxsize=4096)
def _equal_stages(
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
    forward: int,
    inner: int,
    message: int = 0,
) -> tuple[int, int, int]:
    """Return the step of stages that take `PARTS` for a microbatch, and whose messages take
    `message`; of how many microbatches a rank holds what one stage saves, at most; and how many of
    them are between I and W, at most.
    """
    stages = len(placement)
    costs = StageCosts(
        forward_ns=forward,
        backward_ns=PARTS - forward,
        backward_input_ns=inner,
        backward_weight_ns=PARTS - forward - inner,
        kept_bytes=1,
        between_bytes=1,
    )
    transfers = tuple(message * (one != other) for one, other in pairwise(placement))
    gradient = (True,) * (stages - 1)
    problem = PlacedProblem(
        placement, microbatches, (costs,) * stages, transfers, transfers, gradient
    )
    schedule = generate(name, placement, microbatches)
    timeline = simulate(problem, schedule)
    # Recomputed as a whole they keep nothing for I.
    recomputed = replace(problem, costs=(replace(costs, kept_bytes=0),) * stages)
    between = max(max(recomputed.held_bytes(row), default=0) for row in schedule.compute)
    return timeline.makespan_ns, max(max(row) for row in timeline.held_bytes), between


def _recompute(work: Work, options: Options, held: int, room: int, one: int) -> tuple[int, int]:
    """Return what all stages recompute of one microbatch in ns, and what a rank then holds, at
    least `one`.

    Stages of a schedule that may split backwards recompute as a whole or not at all; others free
    the share of what they hold that is too much, by the same share of their forwards.
    """
    if options.recompute == "none" or (options.recompute == "auto" and held <= room):
        return 0, held
    if options.recompute != "auto" or options.schedule in SPLIT:
        return work.forward_ns, one
    return work.forward_ns * min(held, held - room) // max(1, held), max(one, min(held, room))
