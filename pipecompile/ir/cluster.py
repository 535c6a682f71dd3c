"""The devices that a step may run on: nodes, the devices in each, and the links that join them."""

from __future__ import annotations

from itertools import chain, groupby
from typing import Literal

from pipecompile.ir.links import FREE, Link, Links, links_of_pairs
from pipecompile.ir.serialization import FileValue

__all__ = ["Cluster"]


class Cluster(FileValue, frozen=True, kw_only=True):
    """Nodes (machines), each the kinds of its devices: names of devices or of device files.

    Device i is rank i: the nodes follow one another, as torchrun numbers them. Two devices of a
    node are joined by `within`, one link for all nodes or one for each; devices of two nodes are
    joined by `between`.

        8 × h100                 8 × h100
        ranks 0–7 ──between──    ranks 8–15
         └within┘                 └within┘
    """

    schema: Literal["pipecompile/cluster/1"] = "pipecompile/cluster/1"
    nodes: tuple[tuple[str, ...], ...]
    within: Link | tuple[Link, ...]
    between: Link

    def __post_init__(self) -> None:
        if not self.nodes or not all(self.nodes):
            raise ValueError("a cluster has at least one node, and a node at least one device")
        if not all(self.devices):
            raise ValueError("each device of a node is named by its kind, such as h100")
        if isinstance(self.within, tuple) and len(self.within) != len(self.nodes):
            raise ValueError(
                f"within lists {len(self.within)} links, but there are {len(self.nodes)} nodes; "
                "give one for each, or one for all"
            )

    @property
    def devices(self) -> tuple[str, ...]:
        """The kind of each device, in the order of ranks."""
        return tuple(chain.from_iterable(self.nodes))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of devices, in the order of their first one."""
        return tuple(dict.fromkeys(self.devices))

    @property
    def links(self) -> Links:
        """The links among all devices: one value where all pairs are alike, else matrices."""
        # Two nodes of one device each have no link within: then `between` alone is the answer, as
        # one value for any number of ranks.
        distinct = {self._link(one, other) for one, other in self._pairs()}
        if len(distinct) <= 1:
            return Links.of(*distinct) if distinct else FREE
        # Nodes of 2 and 1 devices: [0, 0, 1]. Row 0 of the table is within, within, between; the
        # diagonal is not used.
        node_of_rank = [index for index, node in enumerate(self.nodes) for _ in node]
        table = [[self._link(one, other) for other in node_of_rank] for one in node_of_rank]
        return links_of_pairs(table)

    def _pairs(self) -> list[tuple[int, int]]:
        """Return the nodes of two devices that are joined, each kind of pair once."""
        inside = [(index, index) for index, node in enumerate(self.nodes) if len(node) > 1]
        return [*inside, (0, 1)] if len(self.nodes) > 1 else inside

    def _link(self, one: int, other: int) -> Link:
        """Return what joins devices of two nodes, or of one."""
        if one != other:
            return self.between
        return self.within[one] if isinstance(self.within, tuple) else self.within

    @property
    def text(self) -> str:
        """The nodes for people: 2x8xh100, or 4xh100,4xa100; a node of two kinds has a +."""
        parts = []
        for node, alike in groupby(self.nodes):
            count = len(list(alike))
            runs = (f"{len(list(run))}x{kind}" for kind, run in groupby(node))
            parts.append((f"{count}x" if count > 1 else "") + "+".join(runs))
        return ",".join(parts)
