"""What one stage holds, as a value; holding.py finds it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.serialization import Value

__all__ = [
    "AMOUNT_FIELDS",
    "EMPTY_FOOTPRINT",
    "Footprint",
    "MessageStorage",
    "SharedParameter",
    "size_of",
]


class SharedParameter(Value, frozen=True, kw_only=True):
    """What a stage counts of a parameter that nodes outside of it read too: on one rank there is one for all stages."""

    name: str
    parameters: Amount
    gradients: Amount
    optimizer: Amount


class MessageStorage(Value, frozen=True, kw_only=True):
    """A storage that a stage makes for the next one, or for the one before: the tensors `names` lie in it.

    `needed` tells whether the second half of the stage's own backward needs it.
    """

    names: tuple[str, ...]
    size: Amount
    is_needed_by_weight_backward: bool


def size_of(parcels: Iterable[MessageStorage]) -> Amount:
    """All of them together."""
    return sum((parcel.size for parcel in parcels), ZERO)


class Footprint(Value, frozen=True, kw_only=True):
    """What one stage holds: always, for a microbatch, and while it computes.

    `kept` is held from a microbatch's forward to its backward, what is `sent` (part of it) until the step ends once it
    is, as are the gradients of inputs (`returned` by a whole backward, `passed` on by a first half). Of a backward in
    two halves, `dropped` is what the first lets go of what was kept, and `between` what it leaves to the second.
    `inputs`, `received` and `received_gradients` are buffers of one microbatch.

    By name, for a neighbour on the same rank: what is `handed_on` of what arrived, as it came; what a second half has
    `wanted` of that; of what leaves, the tensors whose gradients are `relayed` as they came, or `retained` from the
    first half to the second.

    `written` are copies of buffers that its nodes write to: a microbatch of which the whole stage is computed again
    keeps them. What is `shared` is part of `parameters`, `gradients` and `optimizer`. The peaks are the most that lives
    in a forward, a backward and its halves, above what was held before: the first backward of a step makes the
    gradients of parameters, later ones add to them. Of a second half they are others for a stripped microbatch: its
    outputs go as what else was kept.
    """

    parameters: Amount
    gradients: Amount
    optimizer: Amount
    optimizer_scratch: Amount
    inputs: Amount
    received: Amount
    received_gradients: Amount
    activations: Amount
    freed_by_input_backward: Amount
    added_by_input_backward: Amount
    forward_peak: Amount
    first_backward_peak: Amount
    backward_peak: Amount
    input_backward_peak: Amount
    first_weight_backward_peak: Amount
    weight_backward_peak: Amount
    first_weight_backward_peak_freeing_outputs: Amount
    weight_backward_peak_freeing_outputs: Amount
    buffer_copies: Amount = ZERO
    sent_outputs: tuple[MessageStorage, ...] = ()
    sent_by_backward: tuple[MessageStorage, ...] = ()
    sent_by_input_backward: tuple[MessageStorage, ...] = ()
    relayed_inputs: tuple[str, ...] = ()
    inputs_for_weight_backward: tuple[str, ...] = ()
    relayed_gradients: tuple[str, ...] = ()
    gradients_for_weight_backward: tuple[str, ...] = ()
    shared: tuple[SharedParameter, ...] = ()

    @property
    def outputs(self) -> Amount:
        """All that is sent."""
        return size_of(self.sent_outputs)

    @property
    def outputs_freed_by_input_backward(self) -> Amount:
        """What is sent and not needed by a second half: computed again, it goes with the first."""
        return size_of(
            parcel for parcel in self.sent_outputs if not parcel.is_needed_by_weight_backward
        )


AMOUNT_FIELDS: tuple[str, ...] = tuple(
    field.name for field in msgspec.structs.fields(Footprint) if field.type is Amount
)
EMPTY_FOOTPRINT = Footprint(**dict.fromkeys(AMOUNT_FIELDS, ZERO))  # type: ignore[arg-type]  # all others have defaults
