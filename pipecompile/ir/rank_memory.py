"""What one rank holds at its peak, by kind."""

from __future__ import annotations

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.serialization import Value

__all__ = ["RankMemory"]


class RankMemory(Value, frozen=True, kw_only=True):
    """The peak of one rank by kind.

    `expected` is at the moment when most is expected, `bound` at that when the bound is largest. In
    a plan the bound holds for the order of its actions under any times (schedule/stages.py). Only
    plans for inference have a `kv_cache`.
    """

    parameters: Amount
    gradients: Amount
    optimizer: Amount
    activations: Amount
    buffers: Amount
    workspace: Amount
    kv_cache: Amount = ZERO

    @property
    def persistent(self) -> Amount:
        """What stays from the first step on. Gradients do not: optimizers set them to None."""
        return self.parameters + self.optimizer + self.kv_cache

    @property
    def total(self) -> Amount:
        """All kinds together."""
        # Kinds that peak at other moments cannot be added up, so all of them are of one moment.
        kinds = (
            self.parameters,
            self.gradients,
            self.optimizer,
            self.activations,
            self.buffers,
            self.workspace,
            self.kv_cache,
        )
        return sum(kinds, ZERO)
