"""The result of `pipecompile audit`, made by api/audit.py: a layout beside the best cuts."""

from __future__ import annotations

from typing import Literal, get_args

from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = ["GRAINS", "WHERE", "Audit", "AuditedCut", "AuditedPart", "Grain", "SharedTensor"]

Grain = Literal["layers", "halves", "operators"]
"""What cuts keep whole: layers, attention and MLP as the halves of layers, or single operators."""
GRAINS: tuple[Grain, ...] = get_args(Grain)
WHERE: dict[Grain, str] = {
    "layers": "between layers",
    "halves": "inside layers",
    "operators": "between operators",
}
"""Where the cuts of a grain lie, in words."""


class AuditedPart(Value, frozen=True, kw_only=True):
    """Layers that take the same time, or the parts around them.

    `name` is a symbol of Megatron's (E t m L), or a (attention) and p (MLP) for halves of layers;
    `count` such parts take these times each, for one microbatch.
    """

    name: str
    count: Positive
    forward_ns: NonNegative
    backward_ns: NonNegative


class AuditedCut(Value, frozen=True, kw_only=True):
    """A cut, and what its heaviest rank, its step and its memory are worth.

    `loads_ns` are those of ranks for one microbatch. `heaviest_ns` is the largest of them, with
    the transfers that its rank pays for. No cut of this grain is below `bound_ns`, has a shorter
    step than `step_bound_ns` under any order of actions, or holds less than `memory_bound` bytes on
    each rank. `memory` is the bound of each rank in bytes. `parts` counts what lies on the heaviest
    rank, by name. `text` is the cut in the words of `form`, "" where these cannot say it.
    """

    grain: Grain | None  # None for the layout
    loads_ns: tuple[NonNegative, ...]
    heaviest_ns: NonNegative
    bound_ns: NonNegative
    step_ns: NonNegative
    step_bound_ns: NonNegative
    bubble: float
    memory: tuple[NonNegative, ...]
    memory_bound: NonNegative
    parts: dict[str, float]
    form: str = ""
    text: str = ""

    @property
    def heaviest_rank(self) -> int:
        """The rank of the largest load, the first of equal ones."""
        return self.loads_ns.index(max(self.loads_ns))

    @property
    def proven(self) -> bool:
        """Whether no cut of its grain has a lighter heaviest rank."""
        # Both are whole numbers of the same sums: to be equal is no matter of rounding.
        return self.heaviest_ns == self.bound_ns

    @property
    def imbalance(self) -> float:
        """The heaviest rank / the mean load, 1 where nothing takes time."""
        # Loads of 8, 6 and 6: 8 · 3 / 20 = 1.2.
        total = sum(self.loads_ns)
        return self.heaviest_ns * len(self.loads_ns) / total if total else 1.0


class SharedTensor(Value, frozen=True, kw_only=True):
    """A tensor that several layers read, and that the layout sends over boundaries of its stages.

    It lives from the end of layer `first` (−1 where it is made before the layers) to layer `last`,
    the last one that reads it, and crosses the boundaries of the stages `before`. Over each of them
    go `bytes` and `gradient_bytes` of a microbatch. It `spans_all` layers if no boundary between
    them is without it; else a boundary after layer `last`, or before it is made, does not send it.
    """

    name: str
    module: str
    first: int
    last: int
    before: tuple[Positive, ...]
    bytes: NonNegative
    gradient_bytes: NonNegative
    spans_all: bool


class Audit(Value, frozen=True, kw_only=True):
    """What a layout costs, beside the best cuts that were found and their lower bounds.

    `cuts` are those of the layout, then by grain from coarse to fine, each no heavier than the one
    before. `caps` are the bytes of each rank, None where neither a cap nor a device is known.
    """

    layout: str
    layout_format: str
    costs: str
    time_unit: TimeUnit
    schedule: str
    k: Positive
    ranks: Positive
    microbatches: Positive
    layers: str
    parts: tuple[AuditedPart, ...]
    cuts: tuple[AuditedCut, ...]
    caps: tuple[NonNegative, ...] | None
    shared: tuple[SharedTensor, ...]
    notes: tuple[str, ...] = ()

    @property
    def hand(self) -> AuditedCut:
        """The cut of the layout."""
        return self.cuts[0]

    @property
    def best(self) -> tuple[AuditedCut, ...]:
        """The best cuts by grain."""
        return self.cuts[1:]

    def fits(self, cut: AuditedCut) -> bool:
        """Whether each rank of a cut is within its cap; True without caps."""
        caps = cut.memory if self.caps is None else self.caps
        return all(size <= cap for size, cap in zip(cut.memory, caps, strict=True))

    @property
    def first_full_rank(self) -> int:
        """The rank of the layout that runs out of memory first: the fullest one of its cap."""
        # Without caps all divide by the same, so that the rank that holds most comes first.
        memory, caps = self.hand.memory, self.caps or (1,) * self.ranks
        return max(range(self.ranks), key=lambda rank: memory[rank] / max(caps[rank], 1))
