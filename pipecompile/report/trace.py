"""A simulated step as a trace for Perfetto and chrome://tracing.

The format is Google's Trace Event Format: a process for each rank, a complete event ("X") for each
action, a flow ("s" to "f") for each message and a counter ("C") of the activations. Times are
microseconds, as the format demands; relative units count as nanoseconds, and the ranks say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Timeline
from pipecompile.ir.stage_ranks import stages_on
from pipecompile.memory_model.rank import activation_curve

__all__ = ["trace"]

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.RECOMPUTE: "recompute",
}
_RECEIVER = {Kind.SEND_FORWARD: 1, Kind.SEND_BACKWARD: -1}  # the neighbour that a message goes to


def trace(plan: Plan, timeline: Timeline) -> bytes:
    """Return the JSON of a simulated step; the same plan and timeline give the same bytes."""
    events = [
        *_ranks(plan),
        *_actions(timeline),
        *_messages(plan, timeline),
        *_memory(plan, timeline),
    ]
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    # Sorted and indented, so that goldens show in a diff what changed.
    return json.dumps(document, sort_keys=True, ensure_ascii=False, indent=1).encode() + b"\n"


def _ranks(plan: Plan) -> Iterator[dict[str, Any]]:
    for rank in range(plan.ranks):
        stages = ", ".join(map(str, stages_on(plan.schedule.placement, rank)))
        unit = ", times are relative units" if plan.time_unit == "relative" else ""
        arguments = {"name": f"rank {rank} (stage {stages}{unit})"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": arguments}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": rank,
            "tid": 0,
            "args": {"sort_index": rank},
        }


def _actions(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the complete events ("X") of all actions, in microseconds: a rank is a process."""
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
    """Arrows from the end of the action that makes a message to the start of its reader."""
    # Transfers are no events: a message leaves when the action that made it ends.
    forwards, backwards = {}, {}
    for event in chain.from_iterable(timeline.events):
        if event.action.kind is Kind.FORWARD:
            forwards[event.action.stage, event.action.microbatch] = event
        elif event.action.kind in BACKWARDS:
            backwards[event.action.stage, event.action.microbatch] = event
    for number, send in enumerate(_sends(plan, len({microbatch for _, microbatch in forwards}))):
        events = forwards if send.kind is Kind.SEND_FORWARD else backwards
        receiver = send.stage + _RECEIVER[send.kind]
        source, target = events[send.stage, send.microbatch], events[receiver, send.microbatch]
        # Both ends of an arrow have the same number, by which Perfetto joins them.
        shared = {"name": str(send), "cat": "message", "id": number, "tid": 0}
        rank, peer = map(plan.schedule.rank_of, (send, send._replace(stage=receiver)))
        arguments = {"bytes": _message_bytes(plan, send)}
        # "bp": "e" makes the arrow end at the event that encloses its end, the reader's action.
        # Without it the arrow would end at the event after that.
        yield {**shared, "ph": "s", "pid": rank, "ts": source.end_ns / 1000, "args": arguments}
        yield {**shared, "ph": "f", "bp": "e", "pid": peer, "ts": target.start_ns / 1000}


def _sends(plan: Plan, microbatches: int) -> Iterator[Action]:
    """Yield the sends of a step, or of several minibatches that follow each other."""
    # A plan has the sends of one minibatch: the second one of four microbatches sends 4 to 7.
    for first in range(0, microbatches, plan.microbatches):
        for _, action in plan.schedule:
            if action.kind in _RECEIVER and action.microbatch is not None:
                yield action._replace(microbatch=action.microbatch + first)


def _message_bytes(plan: Plan, send: Action) -> int:
    stage = plan.stages[send.stage]
    if send.kind is Kind.SEND_FORWARD:
        return sum(tensor.bytes for tensor in stage.outputs)
    return sum(tensor.gradient_bytes for tensor in stage.inputs)


def _memory(plan: Plan, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the expected activations of each rank.

    They grow at the start of an action that adds to them, and shrink at the end of one that frees.
    """
    for rank, row in enumerate(timeline.events):
        before = 0
        curve = activation_curve(plan.footprints(rank), [event.action for event in row])
        for event, (_, amount) in zip(row, curve, strict=True):
            # A counter has one value until the next: memory that is freed is there until the
            # action ends.
            time_ns = event.start_ns if amount.expected > before else event.end_ns
            before = amount.expected
            yield {
                "ph": "C",
                "name": "activations",
                "pid": rank,
                "tid": 0,
                "ts": time_ns / 1000,
                "args": {"bytes": amount.expected},
            }
