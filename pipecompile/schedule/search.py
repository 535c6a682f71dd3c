"""The search for a schedule: the best of the named ones and of those that are searched.

The named orders that fit are candidates as they are, and seeds of the search. The result is
therefore never worse than a named order that fits, and there is a result wherever any order fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipecompile.errors import InfeasibleError
from pipecompile.ir.schedule import Schedule, Timeline
from pipecompile.ir.size import size_text
from pipecompile.schedule.hill_climbing import objective_ns
from pipecompile.schedule.instance import ScheduleInstance
from pipecompile.schedule.lower_bound import lower_bound
from pipecompile.schedule.named_orders import SPLIT, fitting_names, generate
from pipecompile.schedule.order_search import OPERATIONS_PER_SECOND, OrderSearch
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.recompute import add_recomputes, move_recomputes
from pipecompile.schedule.serial_order import serial_order, single_microbatch_peak
from pipecompile.schedule.simulator import simulate

__all__ = [
    "OBJECTIVES",
    "NamedResult",
    "SearchResult",
    "best_named",
    "order_lower_bound",
    "search",
    "simulate_named",
]

OBJECTIVES = ("makespan", "span")
LOOKS_PER_NAMED = 12  # a named order takes so many looks at each operation before it is a seed
LEAST_LOOKS = 50  # at each operation, without which a second search is not begun


@dataclass(frozen=True)
class NamedResult:
    """A named schedule on a problem: its objective, the most that each rank holds, if it fits."""

    schedule: Schedule
    value_ns: int
    peak_bytes: tuple[int, ...]
    fits: bool


@dataclass(frozen=True)
class SearchResult:
    """The best schedule found (of compute actions), and a lower bound on all others.

    `named` are the schedules that the placement allows, whether or not they fit.
    """

    schedule: Schedule
    objective: str
    value_ns: int
    bound_ns: int
    named: tuple[NamedResult, ...]


def search(
    problem: PlacedProblem, *, objective: str = "makespan", seconds: float = 5.0
) -> SearchResult:
    """Return the best order found within a budget of so many seconds.

    InfeasibleError names the rank that cannot hold one microbatch alone.
    """
    named = tuple(simulate_named(problem, objective))
    instances = _fitting_instances(problem)
    bound_ns = order_lower_bound(problem, objective)
    best = best_named(named)
    candidates = [] if best is None else [(best.value_ns, best.schedule)]
    # A named order that meets the bound cannot be improved.
    if best is None or best.value_ns > bound_ns:
        # Whole seconds, so that it is zero except for large problems.
        # Simulating the named orders and turning them into seeds comes
        # out of the budget, as the search counts its time in operations;
        # but half is left for the search, however large it is.
        spent = len(named) * instances[0].operation_count * LOOKS_PER_NAMED // OPERATIONS_PER_SECOND
        left_seconds = max(seconds / 2, seconds - spent)
        instances = _affordable(instances, left_seconds)
        seeds = [result.schedule for result in named]
        for instance in instances:
            share = left_seconds / len(instances)
            order = OrderSearch(instance, objective, bound_ns, share, seeds).run()
            # Recomputes may still fit into earlier gaps, of which the search knows nothing.
            schedule = move_recomputes(problem, order)
            # The search counts with links that are free for every message; what is
            # compared in the end is the simulator's word, which knows the network.
            candidates.append((objective_ns(simulate(problem, schedule), objective), schedule))
    value_ns, schedule = min(candidates, key=lambda candidate: candidate[0])
    return SearchResult(schedule, objective, value_ns, bound_ns, named)


def order_lower_bound(problem: PlacedProblem, objective: str) -> int:
    """Return a time in ns that the objective of no order within the caps is below."""
    return lower_bound(_cheapest_instance(problem), objective)


def simulate_named(problem: PlacedProblem, objective: str) -> Iterator[NamedResult]:
    """Yield every named schedule that trains on the placement, simulated."""
    for name in fitting_names(problem.placement, problem.microbatches):
        if name in SPLIT and not problem.can_split:
            continue
        schedule = generate(name, problem.placement, problem.microbatches)
        schedule = add_recomputes(problem, schedule)
        timeline = simulate(problem, schedule)
        yield NamedResult(
            schedule,
            objective_ns(timeline, objective),
            timeline.peak_bytes,
            _is_within_caps(problem, timeline),
        )


def best_named(named: tuple[NamedResult, ...]) -> NamedResult | None:
    """Return the shortest of those that fit; of equal ones that which holds the least."""
    fitting = (result for result in named if result.fits)
    return min(fitting, key=lambda result: (result.value_ns, max(result.peak_bytes)), default=None)


def _is_within_caps(problem: PlacedProblem, timeline: Timeline) -> bool:
    return problem.caps is None or all(
        peak <= cap for peak, cap in zip(timeline.peak_bytes, problem.caps, strict=True)
    )


def _fitting_instances(problem: PlacedProblem) -> list[ScheduleInstance]:
    """Return the instances to search in which some order fits.

    InfeasibleError if one microbatch alone exceeds a cap in each of them. On its way back a
    microbatch holds all its stages on a rank.
    """
    fitting = [each for each in _instances(problem) if serial_order(each) is not None]
    # Whole backwards may fit where input backwards, which leave more than they find, do not.
    whole = ScheduleInstance(problem, (False,) * problem.stages)
    if not fitting and serial_order(whole) is not None:
        fitting = [whole]
    if fitting:
        return fitting
    assert problem.caps is not None, "without caps every order fits"
    peaks = [single_microbatch_peak(whole, rank) for rank in range(problem.ranks)]
    rank = next(rank for rank, cap in enumerate(problem.caps) if peaks[rank] > cap)
    raise InfeasibleError(
        f"no order fits: one microbatch alone holds {size_text(peaks[rank])} on rank {rank}, "
        f"whose cap is {size_text(problem.caps[rank])}; allow more memory, "
        f"use smaller microbatches, or recompute"
    )


def _cheapest_instance(problem: PlacedProblem) -> ScheduleInstance:
    """Return an instance whose backwards take no longer than either whole or in halves.

    A lower bound for it holds for all orders, whichever backwards they split. With halves of 4 and
    5 ns and a full backward of 8 ns, the halves are taken as 4 and 4 ns. A stage that does not
    recompute all microbatches is taken as if it recomputed none, and kept the less for it.
    """
    costs = []
    for stage in map(_cheapest_recompute, problem.costs):
        whole_ns = min(stage.backward_input_ns + stage.backward_weight_ns, stage.backward_ns)
        input_ns = min(stage.backward_input_ns, stage.backward_ns)
        costs.append(
            replace(stage, backward_input_ns=input_ns, backward_weight_ns=whole_ns - input_ns)
        )
    split = tuple(stage.can_split for stage in problem.costs)
    return ScheduleInstance(replace(problem, costs=tuple(costs)), split)


def _cheapest_recompute(stage: StageCosts) -> StageCosts:
    if not (stage.recompute and stage.except_last):
        return stage
    kept = min(stage.kept_bytes, stage.recomputed_bytes)
    return replace(
        stage,
        recompute=False,
        except_last=False,
        recompute_ns=0,
        kept_bytes=kept,
        recomputed_bytes=0,
        between_bytes=min(kept, stage.between_bytes),
    )


def _instances(problem: PlacedProblem) -> Iterator[ScheduleInstance]:
    """Yield the instances to search.

    Backwards are split wherever they can be. If the halves of some take longer than the whole,
    further instances split only the others, and none.
    """
    can_split = tuple(costs.can_split for costs in problem.costs)
    gains = tuple(
        costs.backward_input_ns + costs.backward_weight_ns <= costs.backward_ns
        for costs in problem.costs
    )
    choices = [can_split]
    if not all(gains):
        cheap = tuple(may and gain for may, gain in zip(can_split, gains, strict=True))
        choices += [cheap, (False,) * problem.stages]
    for split in dict.fromkeys(choices):
        yield ScheduleInstance(problem, split)


def _affordable(instances: list[ScheduleInstance], seconds: float) -> list[ScheduleInstance]:
    """Return as many as there is time to build an order for and climb from it; at least one."""
    looks = LEAST_LOOKS * instances[0].operation_count
    return instances[: max(1, int(seconds * OPERATIONS_PER_SECOND / looks))]
