"""Which rank is at fault when a step fails, from what each rank last said of itself.

A rank that waits for a dead one fails itself, and so do those that wait for it. So the rank that
fails first on the screen is rarely the culprit. The states of all ranks tell it:

    rank 0    waits in 0B0 for rank 1
    rank 1    computes in 1F1, and answers           ◀── hangs
    rank 2    waits in 2F1 for rank 1

Kinds of culprits, the surest first: an error of the rank's own; no answer, since the process is
dead; no progress in a computation; a step that was not begun. Otherwise all wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from pipecompile.ir.schedule import Action, Kind
from pipecompile.ir.serialization import Value

__all__ = ["Phase", "RankState", "action_text", "verdict"]

Phase = Literal["computing", "waiting", "failed", "lost", "done"]

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input backward",
    Kind.BACKWARD_WEIGHT: "weight backward",
    Kind.RECOMPUTE: "recompute",
    Kind.SEND_FORWARD: "send of outputs",
    Kind.RECEIVE_FORWARD: "receive of inputs",
    Kind.SEND_BACKWARD: "send of gradients",
    Kind.RECEIVE_BACKWARD: "receive of gradients",
    Kind.REDUCE: "sum of gradients over replicas",
    Kind.STEP: "optimizer step",
}


class RankState(Value, frozen=True, kw_only=True):
    """What a rank says of itself: a beat that goes up while its step runs, and what it does.

    `begun` is how many steps and evaluations it has begun, and `name` the last one's. `peer` is the
    global rank that it waits for. A rank that is `failed` has an `error` of its own; one that is
    `lost` could not reach another rank in time, and has torch's error about that.
    """

    begun: int = 0
    name: str = ""
    beat: int = 0
    phase: Phase = "done"
    action: str = ""
    peer: int | None = None
    error: str = ""


def action_text(action: Action) -> str:
    """Return an action in torch's notation and in words.

    >>> action_text(Action.parse("1F2"))
    '1F2 (forward of microbatch 2, stage 1)'
    """
    what = WORDS.get(action.kind, action.kind.value)
    microbatch = "" if action.microbatch is None else f" of microbatch {action.microbatch}"
    return f"{action} ({what}{microbatch}, stage {action.stage})"


def verdict(states: Mapping[int, RankState], silent: Collection[int]) -> str:
    """Return which rank is at fault, and what the others do; `silent` ranks do not answer."""
    culprits = _culprits(states, silent)
    waiting = [
        f"rank {rank} waited in {state.action}{_for_peer(state)}"
        for rank, state in sorted(states.items())
        if rank not in culprits and state.phase in ("waiting", "lost")
    ]
    if not culprits:
        # Then an error that looked like that of an exchange may be this rank's own.
        errors = [
            f"rank {rank}: {each.error}" for rank, each in sorted(states.items()) if each.error
        ]
        return "; ".join(["the ranks wait for each other", *waiting, *errors])
    return "; ".join([*culprits.values(), *waiting])


def _culprits(states: Mapping[int, RankState], silent: Collection[int]) -> dict[int, str]:
    """Return the sentence for each rank at fault, of the surest kind that there is."""
    # Three ranks: 0 waits for 1, 1 computes, 2 has begun one step less. That 1 hangs is the surer
    # news, so only that is said.
    # What most ranks wait in is the newest step; a rank that is behind it never came.
    last = max(states.values(), key=lambda state: state.begun)
    kinds: list[dict[int, str]] = [{}, {}, {}, {}]
    for rank, state in sorted(states.items()):
        if state.phase == "failed":
            kinds[0][rank] = f"rank {rank} failed in {state.action}: {state.error}"
        elif rank in silent:
            kinds[1][rank] = f"rank {rank} no longer answers; it was last seen in {state.action}"
        elif state.phase == "computing":
            kinds[2][rank] = f"rank {rank} hangs in {state.action}"
        elif state.begun < last.begun:
            kinds[3][rank] = f"rank {rank} has not begun {last.name}"
    # Only the surest kind: a rank that seems to hang may only wait for one that has died.
    return next((kind for kind in kinds if kind), {})


def _for_peer(state: RankState) -> str:
    return "" if state.peer is None else f" for rank {state.peer}"
