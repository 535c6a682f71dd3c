"""What one stage holds, as a value; holding.py finds it."""

from __future__ import annotations

from pipecompile.ir.allocator import ZERO, Amount
from pipecompile.ir.serde import Value

__all__ = ["AMOUNTS", "NOTHING", "Footprint", "Shared"]


class Shared(Value, frozen=True, kw_only=True):
    """What a stage counts of a parameter that nodes outside of it read too: on one rank there is one for all stages."""

    name: str
    parameters: Amount
    gradients: Amount
    optimizer: Amount


class Footprint(Value, frozen=True, kw_only=True):
    """What one stage holds: always, for a microbatch, and while it computes.

    `kept` is held from a microbatch's forward to its backward, `outputs` (part of it) until the step ends once they are
    sent, as are the gradients of the inputs (`returned` by a whole backward, `passed` on by a first half); others of
    them lie in what was received (`relayed` by a whole backward, `forwarded` by a first half). Of a backward in two
    halves, `dropped` is what the first lets go of what was kept, `remade` besides of outputs that were computed again,
    since others were sent, `between` what it leaves to the second, `lent` what it leaves of what it passes on, and
    `retained` of what was received. `inputs`, `received` and `received_gradients` are buffers of one microbatch;
    what of these is `handed_on` is sent once more.
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
    outputs: Amount
    returned: Amount
    passed: Amount
    handed_on: Amount
    relayed: Amount
    forwarded: Amount
    dropped: Amount
    remade: Amount
    between: Amount
    lent: Amount
    retained: Amount
    forward_peak: Amount
    first_backward_peak: Amount
    backward_peak: Amount
    input_peak: Amount
    first_weight_peak: Amount
    weight_peak: Amount
    first_stripped_peak: Amount
    stripped_peak: Amount
    written: Amount = ZERO
    shared: tuple[Shared, ...] = ()


AMOUNTS: tuple[str, ...] = tuple(name for name in Footprint.__struct_fields__ if name != "shared")
NOTHING = Footprint(**dict.fromkeys(AMOUNTS, ZERO))  # type: ignore[arg-type]  # `shared` has a default
