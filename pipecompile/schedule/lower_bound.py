"""A lower bound on every order of a problem, whatever the links' load.

Each operation has a head, a time before which it cannot start, and a tail, a time that passes after its end at the
least. On one rank, which does one thing at a time, Jackson's preemptive schedule then takes the least time of all that
are possible (Jackson's rule as a bound: Carlier, The one-machine sequencing problem, 1982), and no rank can do better.

Heads come from chains of operations, from the work that must come before on the same rank, and from memory: a forward
waits for the backward that makes room for it. Tails are their mirror image.
"""

from __future__ import annotations

from fractions import Fraction
from heapq import heappop, heappush
from itertools import combinations_with_replacement, pairwise
from math import inf

from pipecompile.schedule.instance import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, ScheduleInstance

__all__ = ["lower_bound"]

Lanes = list[list[list[int]]]  # by kind, stage and microbatch


def lower_bound(instance: ScheduleInstance, objective: str) -> int:
    """No order has a smaller makespan, or largest span, in ns."""
    if objective == "span":
        return max(_rank_span(instance, rank) for rank in set(instance.problem.placement))
    heads, tails = _heads(instance), _tails(instance)
    return max(_rank_bound(instance, rank, heads, tails) for rank in range(instance.problem.ranks))


def _rank_bound(instance: ScheduleInstance, rank: int, heads: Lanes, tails: Lanes) -> int:
    jobs = [
        (heads[kind][stage][j], instance.task_ns[kind][stage], tails[kind][stage][j])
        for stage in instance.stages_by_rank[rank]
        for kind in instance.kinds[stage]
        for j in range(instance.problem.microbatches)
    ]
    return max(jackson(jobs), _drain(instance, rank, jobs, tails))


def _drain(
    instance: ScheduleInstance, rank: int, jobs: list[tuple[int, int, int]], tails: Lanes
) -> int:
    """What a cap costs in the end: as the last microbatch enters, few bytes are held, so little work can be left.

    If no more than w ns of work can be left on the rank then, the others are done, which takes its time; and after it
    the step goes on for w, and for the tail of that last forward.
    """
    if instance.problem.caps is None:
        return 0
    per_byte = _work_per_byte(instance, instance.stages_by_rank[rank])
    total = sum(time for _, time, _ in jobs)
    if per_byte == inf or instance.problem.caps[rank] * per_byte >= total:
        return 0
    left = int(instance.problem.caps[rank] * per_byte)
    now, done = 0, 0
    for head, time, _ in sorted(jobs):
        now = max(now, head)
        spent = min(time, total - left - done)
        now, done = now + spent, done + spent
        if done >= total - left:
            break
    return now + max(tails[FORWARD][instance.stages_by_rank[rank][0]][-1], left)


def _work_per_byte(instance: ScheduleInstance, stages: tuple[int, ...]) -> Fraction | float:
    """The most work in ns that a byte held on a rank can stand for, once a microbatch has entered there."""
    times, kept = instance.task_ns, instance.task_bytes[FORWARD]
    weights = [(times[WEIGHT][s], -instance.task_bytes[WEIGHT][s]) for s in stages]
    todo = sum(times[kind][s] for s in stages for kind in range(4))
    states, held = [], 0
    for stage in stages:
        held, todo = held + kept[stage], todo - times[FORWARD][stage]
        states.append((todo, held))
    for stage in reversed(stages[1:]):
        held, todo = (
            held - kept[stage],
            todo - sum(times[kind][stage] for kind in (RECOMPUTE, BACKWARD, WEIGHT)),
        )
        states.append((todo, held))
    pairs = [(costs, size) for costs, size in [*states, *weights] if costs]
    return max(
        (Fraction(costs, size) if size else inf for costs, size in pairs), default=Fraction(0)
    )


def jackson(jobs: list[tuple[int, int, int]]) -> int:
    """The makespan of Jackson's preemptive schedule of (head, time, tail): at all times the largest tail runs."""
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
        until = jobs[index][0] if index < len(jobs) else now + left
        spent = min(left, until - now)
        now += spent
        if spent < left:
            heappush(ready, (tail, left - spent))
        else:
            longest = max(longest, now - tail)
    return longest


def _rooms(instance: ScheduleInstance) -> list[list[tuple[int, int]]]:
    """Per stage s pairs of a stage t on its rank and n: forward j of s comes after backward j − n of t.

    Let forward j of s come before backward i of t, which is s or a later stage. As that backward runs, all stages up
    to s are held of the microbatches i to j, and of i the others up to t, besides what t recomputed; all but those
    whose backwards do not wait for that of t. If that is more than the cap for j − i = n, forward j comes after
    backward j − n.
    """
    problem, kept, again = (
        instance.problem,
        instance.task_bytes[FORWARD],
        instance.task_bytes[RECOMPUTE],
    )
    rooms: list[list[tuple[int, int]]] = [[] for _ in range(problem.stages)]
    gradient_reach = instance.gradient_reach
    for stages, cap in zip(instance.stages_by_rank, problem.caps or (), strict=False):
        for stage, last in combinations_with_replacement(stages, 2):
            waiting = [s for s in stages if s <= last <= gradient_reach[s]]
            each = sum(kept[s] for s in waiting if s <= stage)
            others = sum(kept[s] for s in waiting if s > stage) + again[last]
            if each and (cap - others) // each < problem.microbatches:
                rooms[stage].append((last, (cap - others) // each))
    return rooms


def _empty(instance: ScheduleInstance) -> Lanes:
    return [
        [[0] * instance.problem.microbatches for _ in range(instance.problem.stages)]
        for _ in range(4)
    ]


def _heads(instance: ScheduleInstance) -> Lanes:
    """Microbatch after microbatch, forwards from the first stage on, backwards from the last."""
    times, sources = instance.task_ns, instance.task_inputs
    rooms, heads, loads = _rooms(instance), _empty(instance), _RankLoads(instance)
    for j in range(instance.problem.microbatches):
        for kind, stage in _walk(instance):
            head = heads[kind][stage][j - 1] + times[kind][stage] if j else 0
            for other, source, hop in sources[kind][stage]:
                head = max(head, heads[other][source][j] + times[other][source] + hop)
            before = _before(instance, kind, stage)
            if before is not None:
                head = max(head, heads[before][stage][j] + times[before][stage])
            for freeing, count in rooms[stage] if kind == FORWARD else ():
                if j >= count:
                    head = max(head, heads[BACKWARD][freeing][j - count] + times[BACKWARD][freeing])
            heads[kind][stage][j] = max(head, loads.before(kind, stage, j, heads))
    return heads


def _walk(instance: ScheduleInstance) -> list[tuple[int, int]]:
    """Kinds and stages of a microbatch, each after all that it waits for."""
    stages = range(instance.problem.stages)
    back = [
        (kind, stage)
        for stage in reversed(stages)
        for kind in instance.kinds[stage]
        if kind != FORWARD
    ]
    return [*((FORWARD, stage) for stage in stages), *back]


def _before(instance: ScheduleInstance, kind: int, stage: int) -> int | None:
    kinds = instance.kinds[stage]
    index = kinds.index(kind)
    return kinds[index - 1] if index else None


def _tails(instance: ScheduleInstance) -> Lanes:
    """The other way round: from the last microbatch to the first, each after all that waits for it."""
    times, rooms, tails, loads = (
        instance.task_ns,
        _freed_by(instance),
        _empty(instance),
        _RankLoads(instance),
    )
    users = _users(instance)
    last = instance.problem.microbatches - 1
    for j in range(last, -1, -1):
        for kind, stage in reversed(_walk(instance)):
            tail = tails[kind][stage][j + 1] + times[kind][stage] if j < last else 0
            for other, user, hop in users[kind][stage]:
                tail = max(tail, hop + times[other][user] + tails[other][user][j])
            for waiting, count in rooms[stage] if kind == BACKWARD else ():
                if j + count <= last:
                    tail = max(tail, times[FORWARD][waiting] + tails[FORWARD][waiting][j + count])
            if j == last and kind == instance.kinds[stage][-1]:
                tail = max(tail, instance.problem.costs[stage].reduce_ns)
            tails[kind][stage][j] = max(tail, loads.after(kind, stage, last - j))
    return tails


def _freed_by(instance: ScheduleInstance) -> list[list[tuple[int, int]]]:
    """As `_rooms`, by the stage whose backward makes room."""
    freed: list[list[tuple[int, int]]] = [[] for _ in range(instance.problem.stages)]
    for stage, pairs in enumerate(_rooms(instance)):
        for last, count in pairs:
            freed[last].append((stage, count))
    return freed


def _users(instance: ScheduleInstance) -> list[list[list[tuple[int, int, int]]]]:
    users: list[list[list[tuple[int, int, int]]]] = [[[] for _ in instance.kinds] for _ in range(4)]
    for kind, lanes in enumerate(instance.task_inputs):
        for stage, waits in enumerate(lanes):
            for source_kind, source, hop in waits:
                users[source_kind][source].append((kind, stage, hop))
    for stage, kinds in enumerate(instance.kinds):
        for first, second in pairwise(kinds):
            users[first][stage].append((second, stage, 0))
    return users


class _RankLoads:
    """The work that a rank must have done before an operation, and must do after it, besides what chains say.

    `least` is that of each microbatch up to the operation's own, `most` that of each from its own on. Recomputes come
    before their backward, but as early as one likes: they count after a forward, not after another backward.
    """

    def __init__(self, instance: ScheduleInstance) -> None:
        self.instance, gradient_reach = instance, instance.gradient_reach
        stages_by_rank, placement = instance.stages_by_rank, instance.problem.placement
        forward, backward, weight, again = instance.task_ns
        self.first = [stages_by_rank[rank][0] for rank in placement]
        self.least: dict[int, list[int]] = {FORWARD: [], BACKWARD: []}
        self.most: dict[int, list[int]] = {FORWARD: [], BACKWARD: []}
        for stage, rank in enumerate(placement):
            held = stages_by_rank[rank]
            upto = sum(forward[s] for s in held if s <= stage)
            onward = sum(forward[s] + again[s] for s in held if s >= stage)
            there = sum(forward[s] for s in held if s <= gradient_reach[stage])
            self.least[FORWARD].append(upto)
            self.least[BACKWARD].append(
                there
                + sum(again[s] + backward[s] for s in held if stage <= s <= gradient_reach[stage])
            )
            self.most[FORWARD].append(
                onward + sum(backward[s] + weight[s] for s in held if gradient_reach[s] >= stage)
            )
            self.most[BACKWARD].append(
                sum(backward[s] + weight[s] for s in held if s <= stage <= gradient_reach[s])
            )

    def before(self, kind: int, stage: int, microbatch: int, heads: Lanes) -> int:
        """From the first forward of the rank on, all that its microbatches up to this one need before."""
        if kind not in self.least:
            return 0
        own = self.instance.task_ns[kind][stage]
        return (
            heads[FORWARD][self.first[stage]][0] + (microbatch + 1) * self.least[kind][stage] - own
        )

    def after(self, kind: int, stage: int, later: int) -> int:
        """All that its rank must do for this microbatch and the `later` ones after it, once it has ended."""
        if kind not in self.most:
            return 0
        return (later + 1) * self.most[kind][stage] - self.instance.task_ns[kind][stage]


def _rank_span(instance: ScheduleInstance, rank: int) -> int:
    """As the bound above, from the start of the rank's first forward to its last end."""
    times, stages = instance.task_ns, instance.stages_by_rank[rank]
    first, count = stages[0], instance.problem.microbatches
    trip = _round_trip(instance, first)
    jobs = []
    for stage in stages:
        for kind in instance.kinds[stage]:
            head = (
                0
                if kind == FORWARD
                else trip[stage] + (times[BACKWARD][stage] if kind == WEIGHT else 0)
            )
            if kind == RECOMPUTE:
                head = 0
            jobs += [(head + j * times[kind][stage], times[kind][stage], 0) for j in range(count)]
    return jackson(jobs)


def _round_trip(instance: ScheduleInstance, first: int) -> dict[int, int]:
    """Per stage the time from the start of the forward in stage `first` to its backward there, for one microbatch."""
    problem, times = instance.problem, instance.task_ns
    now = sum(times[FORWARD][first:]) + sum(problem.forward_transfer_ns[first:])
    found = {}
    for stage in range(problem.stages - 1, first - 1, -1):
        found[stage] = now if _gradients(instance, stage) else 0
        now += times[BACKWARD][stage] + (problem.backward_transfer_ns[stage - 1] if stage else 0)
    return found


def _gradients(instance: ScheduleInstance, stage: int) -> bool:
    return all(instance.problem.gradient[stage:])
