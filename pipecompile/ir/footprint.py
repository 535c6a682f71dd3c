"""What one stage holds, as a value; holding.py finds it."""

from __future__ import annotations

from pipecompile.ir.allocator import ZERO, Amount
from pipecompile.ir.serde import Value

__all__ = ["NOTHING", "Footprint"]


class Footprint(Value, frozen=True, kw_only=True):
    """What one stage holds: always, for a microbatch, and while it computes.

    `kept` is held from a microbatch's forward to its backward, `outputs` (part of it) until the step ends once they
    are sent, as are the gradients of the inputs (`returned` by a whole backward, `passed` on by a first half, of which
    several may lie in one storage); those that only pass through (`relayed`) lie in what was received. Of a backward in
    two halves, `dropped` is what the first lets go of what was kept, `remade` besides of outputs that were computed
    again, since others were sent, and `between` what it leaves to the second. `inputs`, `received` and
    `received_gradients` are buffers of one microbatch. `written` are copies of buffers that its nodes write to: a
    microbatch of which the whole stage is computed again keeps them.
    The peaks are the most that lives in a forward, a backward and its halves, above what was held before: the first
    backward of a step makes the gradients of parameters, later ones add to them.
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
    relayed: Amount
    dropped: Amount
    remade: Amount
    between: Amount
    forward_peak: Amount
    first_backward_peak: Amount
    backward_peak: Amount
    input_peak: Amount
    first_weight_peak: Amount
    weight_peak: Amount
    written: Amount = ZERO


NOTHING = Footprint(**dict.fromkeys(Footprint.__struct_fields__, ZERO))
