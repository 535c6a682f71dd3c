"""A lower bound on the makespan, or the largest span, of all orders of a problem.

Each operation has a head, a time before which it cannot start, and a tail, a time that passes at
least between its end and the end of the step. A rank does one thing at a time, so of its operations
with their heads and tails Jackson's preemptive schedule takes the least possible time (Jackson's
rule as a bound: Carlier, The one-machine sequencing problem, 1982). No order of the rank is
shorter.

Heads come from chains of operations, from the work that the same rank must do before, and from
memory: a forward waits for the backward that makes room for it. Tails are their mirror image. For
2 ranks and 2 microbatches of F and B of one slot each:

    rank 0   F0 F1 .  B0 .  B1     F1: head 1, tail 3 (F1 and B1 on rank 1, then B1)
    rank 1   .  F0 B0 F1 B1 .      B1: head 4 (F0, B0 and F1 from time 1 on), tail 1 (B1 on rank 0)
"""

from __future__ import annotations

from fractions import Fraction
from heapq import heappop, heappush
from itertools import combinations_with_replacement, pairwise
from math import inf

from pipecompile.schedule.instance import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    WEIGHT,
    ScheduleInstance,
)
from pipecompile.schedule.rank_loads import RankLoads, TaskTimes

__all__ = ["jackson_makespan", "lower_bound"]


def lower_bound(instance: ScheduleInstance, objective: str) -> int:
    """Return a time in ns that no order's makespan, or largest span, is below."""
    if objective == "span":
        return max(_rank_span(instance, rank) for rank in set(instance.problem.placement))
    heads, tails = _heads(instance), _tails(instance)
    return max(_rank_bound(instance, rank, heads, tails) for rank in range(instance.problem.ranks))


def _rank_bound(instance: ScheduleInstance, rank: int, heads: TaskTimes, tails: TaskTimes) -> int:
    jobs = []
    for stage in instance.stages_by_rank[rank]:
        for kind in instance.kinds[stage]:
            for microbatch in range(instance.problem.microbatches):
                head, tail = heads[kind][stage][microbatch], tails[kind][stage][microbatch]
                jobs.append((head, instance.task_ns[kind][stage], tail))
    return max(jackson_makespan(jobs), _drain_bound(instance, rank, jobs, tails))


def jackson_makespan(jobs: list[tuple[int, int, int]]) -> int:
    """Return the makespan of Jackson's preemptive schedule of jobs (head, time, tail).

    Of the jobs whose head has passed the one with the largest tail runs at all times.
    """
    jobs = sorted(jobs)
    ready: list[tuple[int, int]] = []
    now = longest = index = 0
    while index < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[index][0])
        while index < len(jobs) and jobs[index][0] <= now:
            _, time, tail = jobs[index]
            heappush(ready, (-tail, time))
            index += 1
        tail, left = heappop(ready)
        # The job runs until it ends or until the next head, when a larger tail may take over.
        # Jobs (0, 2, 1) and (1, 1, 5): the first one runs from 0 to 1, the
        # second from 1 to 2 and ends by 2 + 5, the rest of the first from 2 to
        # 3. That is 7, where without interruption the second would end by 3 +
        # 5. No real order interrupts an operation, so 7 is below all of them.
        until = jobs[index][0] if index < len(jobs) else now + left
        spent = min(left, until - now)
        now += spent
        if spent < left:
            heappush(ready, (tail, left - spent))
        else:
            longest = max(longest, now - tail)
    return longest


def _drain_bound(
    instance: ScheduleInstance, rank: int, jobs: list[tuple[int, int, int]], tails: TaskTimes
) -> int:
    """Return a bound from what a cap costs in the end.

    When the rank's first stage has taken the last microbatch, the rank holds at most its cap, so
    that at most some w ns of its work are left. The rest is done by then, which takes its time.
    After that forward the step goes on for at least w, and for at least the forward's tail.
    """
    if instance.problem.caps is None:
        return 0
    stages, cap = instance.stages_by_rank[rank], instance.problem.caps[rank]
    per_byte = _most_work_per_byte(instance, stages)
    total = sum(time for _, time, _ in jobs)
    # The cap does not limit what can be left at the end.
    if per_byte == inf or cap * per_byte >= total:
        return 0
    # F and B of 1 ns, 4 microbatches of 1 byte and a cap of 2: behind F3
    # at most 2 backwards are left, so 6 of the 8 ns are done by then.
    left = int(cap * per_byte)
    now, done = 0, 0
    # The earliest time by which all work except `left` can be done on this rank.
    for head, time, _ in sorted(jobs):
        now = max(now, head)
        spent = min(time, total - left - done)
        now, done = now + spent, done + spent
        if done >= total - left:
            break
    return now + max(tails[FORWARD][stages[0]][-1], left)


def _most_work_per_byte(instance: ScheduleInstance, stages: tuple[int, ...]) -> Fraction | float:
    """Return the most ns of work left on a rank for each byte that it holds of a microbatch.

    A microbatch that has entered the rank is in one of these states, of which each has some work
    left and holds some bytes: behind the forward of each stage, behind the backward of each stage,
    or before the weight backward of a stage.
    """
    times, kept = instance.task_ns, instance.task_bytes[FORWARD]
    # F, I and W of 1 ns and 1 byte until W: 2 ns for the byte behind F, 1 ns for it behind I. So a
    # cap of 2 leaves up to 4 ns. A state without bytes can be left by any number of microbatches.
    states = [(times[WEIGHT][s], -instance.task_bytes[WEIGHT][s]) for s in stages]
    left, held = sum(times[kind][s] for s in stages for kind in range(4)), 0
    for stage in stages:
        left, held = left - times[FORWARD][stage], held + kept[stage]
        states.append((left, held))
    for stage in reversed(stages[1:]):
        left -= sum(times[kind][stage] for kind in (RECOMPUTE, BACKWARD, WEIGHT))
        held -= kept[stage]
        states.append((left, held))
    ratios = [Fraction(work, size) if size else inf for work, size in states if work]
    return max(ratios, default=Fraction(0))


def _heads(instance: ScheduleInstance) -> TaskTimes:
    """Return the heads of all operations.

    They follow from each other microbatch by microbatch, forwards from the first stage on, then
    backwards from the last.
    """
    times, inputs = instance.task_ns, instance.task_inputs
    freed_by, heads, loads = _freed_by(instance), _zero_times(instance), RankLoads(instance)
    for j in range(instance.problem.microbatches):
        for kind, stage in _dependency_order(instance):
            # Microbatches of a task follow each other.
            # Each line below is true in every order, so their largest is too; none has to be tight.
            # All that it looks at is of an earlier microbatch, or earlier in the dependency order.
            head = heads[kind][stage][j - 1] + times[kind][stage] if j else 0
            for other, source, transfer_ns in inputs[kind][stage]:
                head = max(head, heads[other][source][j] + times[other][source] + transfer_ns)
            # A microbatch goes through F, R, B and W of a stage in this order.
            before = _kind_before(instance, kind, stage)
            if before is not None:
                head = max(head, heads[before][stage][j] + times[before][stage])
            # A forward waits until a backward has made room for it.
            for freeing, count in freed_by[stage] if kind == FORWARD else ():
                if j >= count:
                    head = max(head, heads[BACKWARD][freeing][j - count] + times[BACKWARD][freeing])
            heads[kind][stage][j] = max(head, loads.before(kind, stage, j, heads))
    return heads


def _tails(instance: ScheduleInstance) -> TaskTimes:
    """Return the tails of all operations: as the heads, from the last microbatch to the first."""
    times, users, frees = instance.task_ns, _users(instance), _frees(instance)
    tails, loads = _zero_times(instance), RankLoads(instance)
    last = instance.problem.microbatches - 1
    for j in range(last, -1, -1):
        for kind, stage in reversed(_dependency_order(instance)):
            tail = tails[kind][stage][j + 1] + times[kind][stage] if j < last else 0
            for other, user, transfer_ns in users[kind][stage]:
                tail = max(tail, transfer_ns + times[other][user] + tails[other][user][j])
            for waiting, count in frees[stage] if kind == BACKWARD else ():
                if j + count <= last:
                    tail = max(tail, times[FORWARD][waiting] + tails[FORWARD][waiting][j + count])
            # The sum over the replicas follows the stage's last gradient.
            if j == last and kind == instance.kinds[stage][-1]:
                tail = max(tail, instance.problem.costs[stage].reduce_ns)
            tails[kind][stage][j] = max(tail, loads.after(kind, stage, last - j))
    return tails


def _freed_by(instance: ScheduleInstance) -> list[list[tuple[int, int]]]:
    """Return what forwards must wait for because of the caps.

    They are pairs (t, n) for each stage s, where t is on the rank of s: forward j of s comes after
    backward j − n of t. Suppose that forward j of s came before backward i of t, where t is s or a
    later stage. While that backward runs, its rank holds

        of microbatches i … j   the activations of its stages up to s: (j − i + 1) × held
        of microbatch i         also those of its stages after s up to t, and what t recomputed

    except for stages whose backward need not wait for that of t. The second line is `others`. For
    j − i = n = (cap − others) // held this exceeds the cap. For example, with 4 bytes for each
    microbatch and a cap of 10, n is 2: forward 2 comes after backward 0.
    """
    problem, reach = instance.problem, instance.gradient_reach
    kept, recomputed = instance.task_bytes[FORWARD], instance.task_bytes[RECOMPUTE]
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(problem.stages)]
    for stages, cap in zip(instance.stages_by_rank, problem.caps or (), strict=False):
        for stage, freeing in combinations_with_replacement(stages, 2):
            waiting = [s for s in stages if s <= freeing <= reach[s]]
            held = sum(kept[s] for s in waiting if s <= stage)
            others = sum(kept[s] for s in waiting if s > stage) + recomputed[freeing]
            if held and (cap - others) // held < problem.microbatches:
                pairs[stage].append((freeing, (cap - others) // held))
    return pairs


def _frees(instance: ScheduleInstance) -> list[list[tuple[int, int]]]:
    """Return the same pairs by the stage whose backward makes room."""
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(instance.problem.stages)]
    for stage, freed_by in enumerate(_freed_by(instance)):
        for freeing, count in freed_by:
            pairs[freeing].append((stage, count))
    return pairs


def _zero_times(instance: ScheduleInstance) -> TaskTimes:
    microbatches, stages = instance.problem.microbatches, range(instance.problem.stages)
    return [[[0] * microbatches for _ in stages] for _ in range(4)]


def _dependency_order(instance: ScheduleInstance) -> list[tuple[int, int]]:
    """Return kinds and stages of a microbatch, each after all that it waits for."""
    stages = range(instance.problem.stages)
    backwards = [
        (kind, stage)
        for stage in reversed(stages)
        for kind in instance.kinds[stage]
        if kind != FORWARD
    ]
    return [*((FORWARD, stage) for stage in stages), *backwards]


def _kind_before(instance: ScheduleInstance, kind: int, stage: int) -> int | None:
    """Return what a microbatch does in a stage before this; None for its forward."""
    kinds = instance.kinds[stage]
    index = kinds.index(kind)
    return kinds[index - 1] if index else None


def _users(instance: ScheduleInstance) -> list[list[list[tuple[int, int, int]]]]:
    """Return by kind and stage what waits for it: (kind, stage, time of the message in ns)."""
    users: list[list[list[tuple[int, int, int]]]] = [[[] for _ in instance.kinds] for _ in range(4)]
    for kind, by_stage in enumerate(instance.task_inputs):
        for stage, inputs in enumerate(by_stage):
            for source_kind, source, transfer_ns in inputs:
                users[source_kind][source].append((kind, stage, transfer_ns))
    for stage, kinds in enumerate(instance.kinds):
        for first, second in pairwise(kinds):
            users[first][stage].append((second, stage, 0))
    return users


def _rank_span(instance: ScheduleInstance, rank: int) -> int:
    """Return a bound on the span of a rank: from the start of its first forward to its last end."""
    times, stages = instance.task_ns, instance.stages_by_rank[rank]
    backward_heads = _round_trips(instance, stages[0])
    jobs = []
    for stage in stages:
        # The span begins with the first forward of stages[0], so heads
        # count from there. Every microbatch enters the rank after it,
        # and so none is back sooner than the first one could be.
        backward_head = backward_heads[stage]
        heads = {BACKWARD: backward_head, WEIGHT: backward_head + times[BACKWARD][stage]}
        for kind in instance.kinds[stage]:
            time = times[kind][stage]
            for microbatch in range(instance.problem.microbatches):
                jobs.append((heads.get(kind, 0) + microbatch * time, time, 0))
    return jackson_makespan(jobs)


def _round_trips(instance: ScheduleInstance, first: int) -> dict[int, int]:
    """Return by stage when its backward can start, in ns after the forward of stage `first` does.

    It is zero where no gradient comes back from the last stage.
    """
    problem, times = instance.problem, instance.task_ns
    now = sum(times[FORWARD][first:]) + sum(problem.forward_transfer_ns[first:])
    starts = {}
    for stage in range(problem.stages - 1, first - 1, -1):
        starts[stage] = now if all(problem.gradient[stage:]) else 0
        now += times[BACKWARD][stage] + (problem.backward_transfer_ns[stage - 1] if stage else 0)
    return starts
