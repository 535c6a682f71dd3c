"""A simulated step as a trace for Perfetto and chrome://tracing.

The format is Google's Trace Event Format: one process a rank, one complete event ("X") an action, a flow ("s" to
"f") for each message and a counter ("C") of the activation memory. Times are microseconds, as the format asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import BACKWARDS, Action, Event, Kind, Timeline
from pipecompile.memory_model.rank import activation_curve

__all__ = ["trace"]

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.RECOMPUTE: "recompute",
}


def trace(plan: Plan, timeline: Timeline) -> bytes:
    """The JSON of a simulated step; the same plan and timeline give the same bytes."""
    events = [
        *_ranks(plan),
        *_actions(timeline),
        *_messages(plan, timeline),
        *_memory(plan, timeline),
    ]
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(document, sort_keys=True, ensure_ascii=False, indent=1).encode() + b"\n"


def _ranks(plan: Plan) -> Iterator[dict[str, Any]]:
    for rank in range(plan.ranks):
        stages = ", ".join(
            str(stage) for stage, place in enumerate(plan.schedule.placement) if place == rank
        )
        arguments = {"name": f"rank {rank} (stage {stages})"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": arguments}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": rank,
            "tid": 0,
            "args": {"sort_index": rank},
        }


def _actions(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(timeline.events):
        for event in row:
            action = event.action
            yield {
                "ph": "X",
                "name": str(action),
                "cat": _NAMES[action.kind],
                "pid": rank,
                "tid": 0,
                "ts": event.start_ns / 1000,
                "dur": (event.end_ns - event.start_ns) / 1000,
                "args": {
                    "stage": action.stage,
                    "microbatch": action.microbatch,
                    "kind": _NAMES[action.kind],
                },
            }


def _messages(plan: Plan, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """An arrow from the end of the action that made a message to the start of the one that uses it."""
    backward = {
        (e.action.stage, e.action.microbatch): e
        for e in _all(timeline)
        if e.action.kind in BACKWARDS
    }
    forward = {
        (e.action.stage, e.action.microbatch): e
        for e in _all(timeline)
        if e.action.kind is Kind.FORWARD
    }
    sent = [
        action
        for _, action in plan.schedule
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    ]
    for number, send in enumerate(sent):
        events, step = (forward, 1) if send.kind is Kind.SEND_FORWARD else (backward, -1)
        source, target = (
            events[send.stage, send.microbatch],
            events[send.stage + step, send.microbatch],
        )
        shared = {"name": str(send), "cat": "message", "id": number, "tid": 0}
        pid, peer = plan.schedule.placement[send.stage], plan.schedule.placement[send.stage + step]
        arguments = {"bytes": _message_bytes(plan, send)}
        yield {**shared, "ph": "s", "pid": pid, "ts": source.end_ns / 1000, "args": arguments}
        yield {**shared, "ph": "f", "bp": "e", "pid": peer, "ts": target.start_ns / 1000}


def _all(timeline: Timeline) -> Iterator[Event]:
    return (event for row in timeline.events for event in row)


def _message_bytes(plan: Plan, send: Action) -> int:
    stage = plan.stages[send.stage]
    if send.kind is Kind.SEND_FORWARD:
        return sum(tensor.bytes for tensor in stage.outputs)
    return sum(tensor.gradient_bytes for tensor in stage.inputs)


def _memory(plan: Plan, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The activations that a rank holds, from the start of each action that adds and the end of each that frees."""
    for rank, row in enumerate(timeline.events):
        before = 0
        for event, (_, amount) in zip(
            row, activation_curve(plan.footprints(rank), [e.action for e in row]), strict=True
        ):
            moment = event.start_ns if amount.expected > before else event.end_ns
            before = amount.expected
            yield {
                "ph": "C",
                "name": "activations",
                "pid": rank,
                "tid": 0,
                "ts": moment / 1000,
                "args": {"bytes": amount.expected},
            }
