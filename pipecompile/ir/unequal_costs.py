"""What one microbatch of a model costs where ranks have devices of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.serialization import NonNegative

__all__ = ["UnequalCosts"]


class UnequalCosts(CostGraph, frozen=True, kw_only=True):
    """One cost graph for each kind of device, and the kind of each rank.

    As a cost graph itself it has the least times of each node, on whatever kind, so that all that
    is summed over it is a lower bound. The graphs differ in times alone. It has no file.
    """

    kinds: tuple[CostGraph, ...]
    rank_kinds: tuple[NonNegative, ...]

    def __post_init__(self) -> None:
        # The least times are a cost graph as well, and are checked as one.
        super().__post_init__()
        if set(self.rank_kinds) != set(range(len(self.kinds))):
            raise ValueError(
                f"there are costs of {len(self.kinds)} kinds of devices, but ranks have the kinds "
                f"{sorted(set(self.rank_kinds))}"
            )
        for kind in self.kinds[1:]:
            if _without_times(kind) != _without_times(self.kinds[0]):
                raise ValueError("the kinds of devices hold different tensors of the same model")

    @staticmethod
    def of(kinds: Sequence[CostGraph], rank_kinds: Sequence[int]) -> UnequalCosts:
        """Return the costs of ranks, each of which has one of `kinds`, by its index."""
        nodes = tuple(_least(each) for each in zip(*(kind.nodes for kind in kinds), strict=True))
        fields = {name: getattr(kinds[0], name) for name in CostGraph.__struct_fields__}
        fields["nodes"] = nodes
        return UnequalCosts(**fields, kinds=tuple(kinds), rank_kinds=tuple(rank_kinds))

    def mapped(self, change: Callable[[CostGraph], CostGraph]) -> UnequalCosts:
        """Return the same ranks with `change` applied to the costs of each kind."""
        return UnequalCosts.of([change(kind) for kind in self.kinds], self.rank_kinds)

    def on_rank(self, rank: int) -> CostGraph:
        """Return the costs on the device of a rank."""
        return self.kinds[self.rank_kinds[rank]]


_TIMES = ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns", "per_step_ns")


def _least(nodes: Sequence[Node]) -> Node:
    """Return a node of several kinds of devices with the least of each of its times."""
    times = {name: [getattr(node, name) for node in nodes] for name in _TIMES}
    # A node of 3 forward and 8 backward on one kind, and 4 and 6 on another: 3 and 6, which no
    # device has, but below which none is. Each time by itself, since a bound may add up any of
    # them.
    least = {name: None if None in values else min(values) for name, values in times.items()}
    return msgspec.structs.replace(nodes[0], **least)


def _without_times(graph: CostGraph) -> CostGraph:
    # Halves may be measured on one kind and not on another: both become None.
    none = dict.fromkeys(_TIMES, 0) | {"backward_input_ns": None, "backward_weight_ns": None}
    nodes = tuple(msgspec.structs.replace(node, **none) for node in graph.nodes)
    return msgspec.structs.replace(graph, nodes=nodes, fused_attention=())
