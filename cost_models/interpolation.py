"""Times of a microbatch whose size was not measured, between those of two sizes that were.

A node takes some time for any microbatch, and some for each sample:

    ns          measured at 1 and 4 samples: 100 and 160 ns
    160              ·      20 ns for each sample, 80 ns for any
    120        ·            so 2 samples take 120 ns
    100      ·
           1 2   4  samples

With a third size the line is broken there: a small microbatch uses a device worse.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipecompile.cost_models.protocol import CallCost
from pipecompile.ir.graph import CostGraph

__all__ = ["interpolated_costs"]


def interpolated_costs(known: Mapping[int, CostGraph], size: int) -> dict[str, CallCost]:
    """Return by name the costs of nodes for microbatches of `size` samples, by the line through
    those of two sizes.

    `known` has the cost graphs of these two sizes, with equal names. What would be negative is 0.
    """
    (low, first), (high, second) = sorted(known.items())

    def at_size(name: str) -> CallCost:
        one, other = first.by_name[name], second.by_name[name]

        def between(field: str) -> int:
            before: int = getattr(one, field)
            after: int = getattr(other, field)
            rise = (after - before) * (size - low)
            return max(0, before + round(rise / (high - low)))

        # On a CPU workspace is not measured: it follows from the sizes of tensors.
        is_measured = first.allocator == "cuda"
        return CallCost(
            forward_ns=between("forward_ns"),
            backward_ns=between("backward_ns"),
            backward_input_ns=between("backward_input_ns"),
            backward_weight_ns=between("backward_weight_ns"),
            workspace_bytes=between("workspace_bytes") if is_measured else None,
        )

    return {name: at_size(name) for name in first.by_name}
