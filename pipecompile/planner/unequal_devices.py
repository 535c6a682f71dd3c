"""Pipelines over devices of several kinds: which kind each rank has. Needs no PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

from msgspec.structs import replace

from pipecompile.cost_models.device import devices_of
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Options

__all__ = ["UnequalDevices"]


@dataclass(frozen=True)
class UnequalDevices:
    """The kind of each device, in the order of their numbers, and the cap of each kind in bytes.

    A pipeline has the same share of each kind as the other replicas. Its ranks of one kind are
    neighbours, so that its kinds may be in any order:

        devices                        2 replicas
        0 1 2 3   4 5 6 7              0 1 4 5 │ 2 3 6 7    2xh100,2xa100
        h100      a100                 4 5 0 1 │ 6 7 2 3    2xa100,2xh100
    """

    names: tuple[str, ...]
    caps: Mapping[str, int]

    def orders(self, replicas: int) -> Iterator[str]:
        """Yield the kinds of a pipeline's ranks as costs list them; none if replicas differ."""
        counts = Counter(self.names)
        # 3 H100 and 2 A100 make no two equal replicas.
        if any(count % replicas for count in counts.values()):
            return
        for order in permutations(counts):
            yield ",".join(f"{counts[kind] // replicas}x{kind}" for kind in order)

    def options(self, options: Options, kinds: str) -> Options:
        """Return the options with the costs and the caps of ranks of these kinds."""
        caps = tuple(self.caps[kind] for kind in devices_of(kinds))
        return replace(options, costs=f"roofline:{kinds}", memory_bytes=caps)

    def links(self, links: Links, kinds: str, replicas: int) -> Links:
        """Return links among devices as those among the ranks of all replicas."""
        free = {kind: iter(self._numbers(kind)) for kind in self.caps}
        # Ranks of all replicas in a row take the next free
        # device of their kind each, as drawn above.
        return links.renumbered([next(free[kind]) for kind in devices_of(kinds) * replicas])

    def _numbers(self, kind: str) -> Iterator[int]:
        return (number for number, name in enumerate(self.names) if name == kind)
