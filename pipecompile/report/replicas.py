"""What replicas exchange in a step, for people: a line of a plan's summary."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import COMPUTE, WEIGHT_GRADIENT_KINDS
from pipecompile.ir.size import size_text
from pipecompile.ir.stage import ReplicaExchange

__all__ = ["Exchanged", "exchanged", "replicas_text"]


class Exchanged(NamedTuple):
    """What a rank sends to its next replica in a step, and the ns that this takes: once, beside
    compute, and as a part of its actions.
    """

    bytes: int
    beside_ns: int
    within_ns: int


def exchanged(plan: Plan, rank: int) -> Exchanged:
    """Return what a rank exchanges with other replicas in a step."""
    actions = [action for action in plan.schedule.rows[rank] if action.kind in COMPUTE]
    all_of = Counter(action.stage for action in actions)
    sums_of = Counter(action.stage for action in actions if action.kind in WEIGHT_GRADIENT_KINDS)
    size, times = 0, [0, 0]
    for index in all_of:
        stage, own = plan.stages[index], plan.schedule.stage_ranks[index]
        ring = plan.links.around_replicas(own if len(own) > 1 else [rank], plan.ranks)
        exchanges: list[tuple[ReplicaExchange | None, int, int]] = [
            (stage.replica_sum, 1, 0),
            (stage.backward_sum, sums_of[index], 1),
            (stage.action_gather, all_of[index], 1),
        ]
        for exchange, count, place in exchanges:
            if exchange is not None:
                # With four backwards, `backward_sum` of 2 messages is 8 a step; `replica_sum` is
                # there once.
                messages = count * exchange.messages
                size += messages * exchange.bytes
                times[place] += messages * ring.transfer_ns(exchange.bytes)
    return Exchanged(size, *times)


def replicas_text(plan: Plan) -> str:
    """Return what the rank that exchanges longest sends in a step, and how long that takes."""
    ranks = [exchanged(plan, rank) for rank in range(plan.ranks)]
    most = max(ranks, key=lambda each: each.beside_ns + each.within_ns)
    parts = ((most.beside_ns, "beside compute"), (most.within_ns, "in its actions"))
    times = [f"{time_with_unit(ns, plan.time_unit)} {where}" for ns, where in parts if ns]
    taken = " and ".join(times) or "no time"
    return f"a rank sends up to {size_text(most.bytes)} a step to the next: {taken}"
