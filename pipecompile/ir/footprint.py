"""What one stage holds, as a value; holding.py finds it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.serialization import Value

__all__ = ["AMOUNTS", "NOTHING", "Footprint", "Parcel", "Shared", "size_of"]


class Shared(Value, frozen=True, kw_only=True):
    """What a stage counts of a parameter that nodes outside of it read too: on one rank there is one for all stages."""

    name: str
    parameters: Amount
    gradients: Amount
    optimizer: Amount


class Parcel(Value, frozen=True, kw_only=True):
    """A storage that a stage makes for the next one, or for the one before: the tensors `names` lie in it.

    `needed` tells whether the second half of the stage's own backward needs it.
    """

    names: tuple[str, ...]
    size: Amount
    needed: bool


def size_of(parcels: Iterable[Parcel]) -> Amount:
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
    kept: Amount
    dropped: Amount
    between: Amount
    forward_peak: Amount
    first_backward_peak: Amount
    backward_peak: Amount
    input_peak: Amount
    first_weight_peak: Amount
    weight_peak: Amount
    first_stripped_peak: Amount
    stripped_peak: Amount
    written: Amount = ZERO
    sent: tuple[Parcel, ...] = ()
    returned: tuple[Parcel, ...] = ()
    passed: tuple[Parcel, ...] = ()
    handed_on: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    relayed: tuple[str, ...] = ()
    retained: tuple[str, ...] = ()
    shared: tuple[Shared, ...] = ()

    @property
    def outputs(self) -> Amount:
        """All that is sent."""
        return size_of(self.sent)

    @property
    def remade(self) -> Amount:
        """What is sent and not needed by a second half: computed again, it goes with the first."""
        return size_of(parcel for parcel in self.sent if not parcel.needed)


AMOUNTS: tuple[str, ...] = tuple(
    field.name for field in msgspec.structs.fields(Footprint) if field.type is Amount
)
NOTHING = Footprint(**dict.fromkeys(AMOUNTS, ZERO))  # type: ignore[arg-type]  # all others have defaults
