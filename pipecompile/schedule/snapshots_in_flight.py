"""The snapshots of ranks at which they may hold most, also where no step empties the pipeline.

A row of an asynchronous schedule is that of one minibatch, or of a few that follow each other. A
run without an end holds less than such a row of what was sent, and more as its optimizer steps:

    row          F0 F1 F2 B0 F3 B1 …  B8 REDUCE STEP     nothing is in flight at the step
    without end  F0 F1 F2 B0 REDUCE STEP F3 B1 …         microbatches are; B1 finds no gradients

Gradients that were sent are kept as long as they may be unread (`PipelineSize.unread_gradients`).
A stage with one rank, between stages with one, posts the receive of one value ahead, and that of a
gradient when it needs it (continuous_order.py). Others post them as soon as they are sent
(replicated_order.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipecompile.ir.schedule import BACKWARDS, Kind, Schedule
from pipecompile.memory_model.peak_snapshots import peak_snapshots
from pipecompile.memory_model.snapshots import Snapshot, StageState
from pipecompile.memory_model.unread_gradients import unread_gradients
from pipecompile.schedule.asynchronous_versions import DOUBLE_BUFFERED, PipelineSize, rule_of

__all__ = ["snapshots_by_rank"]


def snapshots_by_rank(order: Schedule, microbatches: int) -> tuple[tuple[Snapshot, ...], ...]:
    """Return for each rank of `order` the snapshots at which it may hold most.

    `microbatches` are those of a minibatch, of which an order of an asynchronous schedule may have
    more than one.
    """
    rule = rule_of(order.weight_versions)
    if rule is None:
        unread = unread_gradients(order)
        return tuple(peak_snapshots(row, unread) for row in order.rows)
    size = PipelineSize.of(order.placement, microbatches)
    unread = {
        (action.stage, action.microbatch): size.unread_gradients(action.stage)
        for _, action in order
        if action.kind in BACKWARDS
    }
    rows = [peak_snapshots(row, unread) for row in order.rows]
    # Else every backward makes an update of its own, and so finds no gradients of earlier ones.
    sums = rule is DOUBLE_BUFFERED or size.least_update > 1
    return tuple(tuple(_without_end(row, size, sums=sums)) for row in rows)


def _without_end(
    snapshots: Iterable[Snapshot], size: PipelineSize, *, sums: bool
) -> Iterator[Snapshot]:
    """Yield the snapshots of a rank in a run without an end. `sums` says that gradients of several
    microbatches are summed before an update.
    """
    for snapshot in snapshots:
        # At its updates the row holds less than a run without an end does, as drawn above.
        # The snapshots that take their place are yielded behind each backward, below.
        if snapshot.kind in (Kind.REDUCE, Kind.STEP):
            continue
        # Asynchronous schedules have one stage on each rank.
        ((stage, state),) = snapshot.states.items()
        # With replicas a receive is posted when its message is sent, which is where the row has it.
        if not size.has_replicas:
            state = _as_posted(state, needs_gradient=snapshot.kind is not Kind.FORWARD)
        held = state if sums else state._replace(has_gradients=0)
        yield snapshot._replace(states={stage: held._replace(has_all_gradients=0)})
        if snapshot.kind in BACKWARDS:
            after = {stage: _after_backward(state)}
            yield from (Snapshot(kind, stage, after) for kind in (Kind.REDUCE, Kind.STEP))


def _as_posted(state: StageState, *, needs_gradient: bool) -> StageState:
    """Return the state with the receives that are posted when none is posted early."""
    begun = state.with_activations + state.with_outputs
    return state._replace(
        values_received=min(state.values_received, begun + 1),
        gradients_received=min(state.gradients_received, int(needs_gradient)),
    )


def _after_backward(state: StageState) -> StageState:
    """Return the state behind the backward that begins with `state`, and ends an update."""
    return state._replace(
        with_activations=state.with_activations - 1,
        values_received=max(0, state.values_received - 1),
        gradients_received=max(0, state.gradients_received - 1),
        has_gradients=1,
        has_all_gradients=1,
    )
