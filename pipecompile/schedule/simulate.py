"""A step, simulated: when each action happens, and why ranks idle.

Each rank performs its row in order, one compute action at a time. An action starts when its rank is free and all
that it needs has ended and, if that was on another rank, arrived. Transfers overlap with compute and with each
other. These rules reproduce table 5 of the Zero Bubble paper (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipecompile.errors import ScheduleError
from pipecompile.ir.plan import Link, Plan, Stage
from pipecompile.ir.schedule import Action, Event, Idle, Kind, Schedule, Timeline
from pipecompile.schedule.dependencies import compute_needs, in_order

__all__ = ["gradient_flows", "simulate", "simulate_plan", "simulate_stages"]


def simulate(
    schedule: Schedule,
    duration_ns: Callable[[Action], int],
    transfer_ns: Callable[[int, int], int],
    gradient: Sequence[bool],
) -> Timeline:
    """The timeline of `schedule`, lowered or not; ScheduleError if it cannot come to its end.

    `transfer_ns(source, destination)` is the time between two adjacent stages on different ranks, `gradient[s]`
    whether a gradient flows from stage s + 1 back to stage s.
    """
    needs, placement = compute_needs(schedule, gradient), schedule.placement
    ends: dict[Action, int] = {}
    free = [0] * schedule.ranks
    events: list[list[Event]] = [[] for _ in free]
    waits: list[list[tuple[int, int]]] = [[] for _ in free]
    for rank, action in in_order(schedule.compute, needs):
        arrival, delay = free[rank], 0
        for need in needs(action):
            away = placement[need.stage] != rank
            hop = transfer_ns(need.stage, action.stage) if away else 0
            arrival, delay = max((arrival, delay), (ends[need] + hop, hop), key=lambda pair: (pair[0], -pair[1]))
        wait = arrival - free[rank]
        waits[rank].append((wait, min(wait, delay)))
        free[rank] = ends[action] = arrival + duration_ns(action)
        events[rank].append(Event(action, arrival, free[rank]))
    idle = [_idle(rows, max(free) - end) for rows, end in zip(waits, free, strict=True)]
    return Timeline(events=tuple(map(tuple, events)), idle=tuple(idle))


def _idle(waits: Sequence[tuple[int, int]], tail: int) -> Idle:
    """By cause: transfer is the part of each wait that a free transfer would remove; the tail is a dependency."""
    transfer = sum(part for _, part in waits)
    return Idle(dependency_ns=sum(wait for wait, _ in waits) - transfer + tail, transfer_ns=transfer)


def simulate_plan(plan: Plan) -> Timeline:
    """The timeline that a plan predicts."""
    return simulate_stages(plan.schedule, plan.stages, plan.link)


def simulate_stages(schedule: Schedule, stages: Sequence[Stage], link: Link) -> Timeline:
    """The timeline of `schedule` with the times of `stages` and with `link` between any two ranks."""
    forward = [sum(link.transfer_ns(tensor.bytes) for tensor in stage.outputs) for stage in stages]
    backward = [sum(link.transfer_ns(tensor.gradient_bytes) for tensor in stage.inputs) for stage in stages]

    def transfer_ns(source: int, destination: int) -> int:
        return forward[source] if source < destination else backward[source]

    return simulate(schedule, lambda action: _duration_ns(stages, action), transfer_ns, gradient_flows(stages))


def gradient_flows(stages: Sequence[Stage]) -> tuple[bool, ...]:
    """Per boundary between stages s and s + 1, whether a backward waits for a message: torch's runtime always does.

    Where no tensor carries a gradient the message is empty.
    """
    return (True,) * (len(stages) - 1)


def _duration_ns(stages: Sequence[Stage], action: Action) -> int:
    stage = stages[action.stage]
    time = {
        Kind.FORWARD: stage.forward_ns,
        Kind.BACKWARD: stage.backward_ns,
        Kind.BACKWARD_INPUT: stage.backward_input_ns,
        Kind.BACKWARD_WEIGHT: stage.backward_weight_ns,
        Kind.RECOMPUTE: stage.recompute_ns,
    }[action.kind]
    if time is None:
        raise ScheduleError(f"{action}: the split backward of stage {action.stage} was not measured; use B instead")
    return time
