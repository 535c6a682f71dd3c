"""The snapshots of a rank at which it may hold most: planners price thousands of cuts by these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from pipecompile.ir.schedule import Action
from pipecompile.memory_model.snapshots import ALL_UNREAD, Snapshot, all_snapshots
from pipecompile.memory_model.unread_gradients import UnreadGradients

__all__ = ["peak_snapshots"]


def peak_snapshots(
    row: Sequence[Action], unread: UnreadGradients = ALL_UNREAD
) -> tuple[Snapshot, ...]:
    """Return the snapshots of a rank's row at which it may hold most.

    So many gradients are `unread` as one is sent; if none is named, all are.

    Without RECV actions, all that neighbours on other ranks send counts as received when the row
    begins, which is never too late. Of two snapshots that need the same workspace, the one that
    holds nothing more is left out: planners price thousands of cuts by these snapshots.
    """
    alike: dict[tuple[object, ...], list[Snapshot]] = defaultdict(list)
    for snapshot in all_snapshots(row, unread):
        has_gradients = snapshot.states[snapshot.stage].has_gradients
        kind = snapshot.kind, snapshot.is_before_backwards
        # The workspace depends on the key alone, and so does whether copies are held for a
        # rollback: within one key the states can be compared.
        alike[kind, snapshot.stage, has_gradients, snapshot.frees_outputs].append(snapshot)
    return tuple(chain.from_iterable(map(_not_covered, alike.values())))


def _not_covered(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the snapshots that hold more of something than each other one; of equals the first."""
    # Here, because commands that check options read no NumPy.
    import numpy as np

    counts = np.array(_counts(snapshots), dtype=np.int64)
    kept: list[int] = []
    # What covers another one holds more in total, so it comes first. The sort is stable.
    for index in np.argsort(-counts.sum(axis=1), kind="stable"):
        if not (counts[kept] >= counts[index]).all(axis=1).any():
            kept.append(int(index))
    return [snapshots[index] for index in sorted(kept)]


def _counts(snapshots: Sequence[Snapshot]) -> list[list[int]]:
    """Return for each snapshot how many of each kind of thing the rank holds."""
    handovers = {
        (stage, handover): None
        for snapshot in snapshots
        for stage, state in snapshot.states.items()
        for handover in state.handovers
    }
    rows = []
    for snapshot in snapshots:
        states = snapshot.states
        # The last field of a state are its handovers, which not all snapshots have alike.
        held = chain.from_iterable(state[:-1] for state in states.values())
        handed_over = (states[stage].handovers.get(each, 0) for stage, each in handovers)
        rows.append([*held, *handed_over])
    return rows
