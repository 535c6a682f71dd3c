"""The most that lives while an action runs, above what its rank holds.

stage.py counts it for each kind of action of a stage, with its parameters there. What comes on top:

    sharded parameters    gathered before the action, twice while that is done
    sharded gradients     summed over replicas as the backward ends
    optimizer             its step, of all stages at once or of one at a time
"""

from __future__ import annotations

from collections.abc import Mapping

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.schedule import COMPUTE, WEIGHT_GRADIENT_KINDS, Kind
from pipecompile.memory_model.allocator import Allocator
from pipecompile.memory_model.snapshots import Snapshot

__all__ = ["between_halves", "most_in_actions", "optimizer_workspace", "workspace_of_action"]


def workspace_of_action(
    stages: Mapping[int, Footprint], snapshot: Snapshot, allocator: Allocator
) -> Amount:
    """Return the most that lives in the snapshot's action, above what is held."""
    if snapshot.kind is Kind.REDUCE:
        return stages[snapshot.stage].replica_sum_peak
    if snapshot.kind not in COMPUTE:
        return optimizer_workspace(stages, allocator)
    stage, peak = stages[snapshot.stage], _peak_of_action(stages, snapshot)
    # A gather has all parameters twice, and is done before the action begins.
    peak = stage.gathered + _larger(peak, stage.gathered)
    if snapshot.kind in WEIGHT_GRADIENT_KINDS and stage.sums_in_backwards:
        # When gradients are summed, what the microbatch has kept is gone, except what was sent.
        is_whole = snapshot.kind is Kind.BACKWARD
        freed = (stage.activations if is_whole else between_halves(stage)) - stage.outputs
        return _larger(peak, stage.gathered + stage.backward_sum_peak - freed)
    return peak


def _peak_of_action(stages: Mapping[int, Footprint], snapshot: Snapshot) -> Amount:
    """Return the most that lives in a compute action with its parameters there."""
    stage = stages[snapshot.stage]
    # What an earlier backward left is no whole gradient that this one could add to.
    has_gradients = snapshot.states[snapshot.stage].has_gradients and not stage.sums_in_backwards
    match snapshot.kind:
        case Kind.FORWARD | Kind.RECOMPUTE:
            return stage.forward_peak
        case Kind.BACKWARD:
            return stage.backward_peak if has_gradients else stage.first_backward_peak
        case Kind.BACKWARD_INPUT:
            return stage.input_backward_peak
        case Kind.BACKWARD_WEIGHT if snapshot.frees_outputs:
            if has_gradients:
                return stage.weight_backward_peak_freeing_outputs
            return stage.first_weight_backward_peak_freeing_outputs
        case Kind.BACKWARD_WEIGHT:
            if has_gradients:
                return stage.weight_backward_peak
            return stage.first_weight_backward_peak
    raise AssertionError(f"{snapshot.kind} computes nothing")


def optimizer_workspace(stages: Mapping[int, Footprint], allocator: Allocator) -> Amount:
    """Return the workspace of the optimizer's step: of all stages at once, or of one at a time."""
    workspace = [stage.optimizer_workspace for stage in stages.values()]
    if allocator.steps_over_lists:
        return sum(workspace, ZERO)
    return max(workspace, key=lambda amount: amount.bound)


def most_in_actions(stages: Mapping[int, Footprint], index: int, is_recomputed: bool) -> int:
    """Return the most that lives in an action of a stage, above the activations.

    A forward's own activations count as kept from its beginning, so they are subtracted.
    """
    stage = stages[index]
    kept = stage.outputs if is_recomputed else stage.activations
    in_actions = max(
        stage.gathered.bound,  # a second time, while it is gathered
        stage.forward_peak.bound - kept.bound,
        stage.backward_peak.bound,
        stage.input_backward_peak.bound,
        stage.weight_backward_peak.bound,
        stage.backward_sum_peak.bound,
        _first_backward_above(stages, index),
    )
    return max(stage.gathered.bound + in_actions, stage.replica_sum_peak.bound)


def _first_backward_above(stages: Mapping[int, Footprint], index: int) -> int:
    """Return the most that lives while a stage makes its gradients, above these.

    Gradients that another stage of the rank shares may exist already; then there are two of them.
    """
    stage = stages[index]
    others = [other for number, other in stages.items() if number != index]
    names = {share.name for other in others for share in other.shared}
    own_gradients = stage.gradients.bound - sum(
        share.gradients.bound for share in stage.shared if share.name in names
    )
    peaks = stage.first_backward_peak.bound, stage.first_weight_backward_peak.bound
    # Where each backward sums its gradients, it makes all of them above what is left of others.
    return max(peaks) - (0 if stage.sums_in_backwards else own_gradients)


def between_halves(stage: Footprint) -> Amount:
    """Return what a microbatch keeps between its input backward and its weight backward."""
    return stage.activations - stage.freed_by_input_backward + stage.added_by_input_backward


def _larger(one: Amount, other: Amount) -> Amount:
    """Return the larger of both figures."""
    return Amount(expected=max(one.expected, other.expected), bound=max(one.bound, other.bound))
