"""What each rank of a plan holds at its peak. The summary and the page of a plan use these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipecompile.ir.plan import Plan
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import WEIGHT_GRADIENT_KINDS, Action, Kind
from pipecompile.ir.size import size_text
from pipecompile.memory_model.rank import fixed_bytes, memory_by_stage

__all__ = [
    "ALLOCATOR_NAMES",
    "FIXED_NOTE",
    "MemoryBound",
    "cap_text",
    "kinds_of",
    "may_lack_memory",
    "memory_bounds",
    "stage_memory",
]

ALLOCATOR_NAMES = {"cpu": "a CPU", "cuda": "a GPU, bound not proven"}
FIXED_NOTE = (
    "fixed: of the bound, what the allocator and the communication library take for any model"
)


class MemoryBound(NamedTuple):
    """What a rank holds at its peak, in bytes.

    `fixed` is the part of the bound that the model has no influence on; `cap` is None without one.
    """

    expected: int
    fixed: int
    bound: int
    cap: int | None

    @property
    def left(self) -> int | None:
        """How far the bound is below the cap; negative if it is above."""
        return None if self.cap is None else self.cap - self.bound


def memory_bounds(plan: Plan) -> list[MemoryBound]:
    """Return the peak of each rank."""
    # Ranks with more neighbours have more of the communication library's buffers, so that `fixed`
    # differs from rank to rank.
    caps = plan.options.caps(plan.ranks) or (None,) * plan.ranks
    return [
        MemoryBound(memory.total.expected, fixed_bytes(plan, rank), memory.total.bound, caps[rank])
        for rank, memory in enumerate(plan.prediction.memory)
    ]


def may_lack_memory(plan: Plan) -> bool:
    """Return whether the caps may keep a plan from a better cut: a single stage cannot hold all
    that the ranks do under the least of them.
    """
    caps = plan.options.caps(plan.ranks)
    if caps is None:
        return False
    in_flight = [_most_in_flight(row) for row in plan.schedule.compute]
    most = max(map(max, in_flight))
    # A stage holds as many microbatches as are in flight there. Two ranks of 4 and 3 GiB with two
    # of them and one: in the stage of the first one all would take 4 + 2 × 3 GiB at most.
    held = (
        -(-memory.total.bound * most // min(own))
        for memory, own in zip(plan.prediction.memory, in_flight, strict=True)
    )
    return sum(held) > min(caps)


def _most_in_flight(row: Sequence[Action]) -> list[int]:
    """Return of how many microbatches each stage of a rank holds something at most."""
    now, most = Counter[int](), Counter[int]()
    for action in row:
        if action.kind is Kind.FORWARD:
            now[action.stage] += 1
            most[action.stage] = max(most[action.stage], now[action.stage])
        elif action.kind in WEIGHT_GRADIENT_KINDS:
            now[action.stage] -= 1
    return list(most.values())


def kinds_of(plan: Plan) -> list[str]:
    """Return the kinds of memory of which any rank holds something at its peak."""
    return [
        kind
        # In the order of the fields, so that tables and pages have the kinds in one order.
        for kind in RankMemory.__struct_fields__
        if any(getattr(memory, kind).expected for memory in plan.prediction.memory)
    ]


def stage_memory(plan: Plan, rank: int) -> Iterator[tuple[int, RankMemory]]:
    """Yield each stage of a rank that has several, with what it holds at the rank's peak."""
    shares = memory_by_stage(plan, rank)
    # With one stage it would be the line of the rank once more.
    if len(shares) > 1:
        yield from shares.items()


def cap_text(plan: Plan) -> str:
    """Return the cap of a rank, if all ranks have the same."""
    caps = set(plan.options.caps(plan.ranks) or ())
    if len(caps) > 1:
        return "a cap for each rank"
    return f"cap {size_text(caps.pop())} a rank" if caps else "no cap"
