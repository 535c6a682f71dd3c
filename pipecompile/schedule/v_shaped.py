"""Schedules on a V, where the first rank holds the first stage and the last one: there and back, two stages a rank.

Three of them repeat a building block (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362,
section 3): the slots of one microbatch's F and I on all ranks. A new microbatch enters every six slots, one for each
of F, I and W of two stages. How long a block lasts is how much memory its schedule needs, so the offset between
neighbouring ranks decides it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipecompile.ir.schedule import Kind
from pipecompile.schedule.tasks import Layout, Task

__all__ = ["dualpipe_v", "v_half", "v_min", "zb_v"]

_PERIOD = 6
_F, _I, _W, _B = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """A building block.

    `offsets`: the slots from a rank to the next on each of the four ways: F there, F back, I there, I back. `turns`:
    the slots lost where one way follows another, so that no two actions of a rank fall on the same slot of a period.
    `limit`: how many activations a rank holds at most, one for each stage and microbatch. `early`: whether a rank that
    would idle takes a forward ahead of its place; with the least memory that delays others more than it helps.
    """

    offsets: tuple[int, int, int, int]
    turns: tuple[int, int, int]
    limit: int
    early: bool = True


def v_min(layout: Layout, microbatches: int) -> list[list[Task]]:
    """V-Min: every offset is one slot, the shortest block; about a third of 1F1B's memory for less than its bubble."""
    ranks = len(layout)
    turns = (0, 0, 0) if ranks % 3 else (2, 0, 2)
    return _repeated(
        layout,
        microbatches,
        BuildingBlock((1, 1, 1, 1), turns, 2 * ((ranks + 1) // 3 + 1), early=False),
    )


def v_half(layout: Layout, microbatches: int) -> list[list[Task]]:
    """V-Half: F and I of a stage add up to three slots a rank; about half of 1F1B's memory and of its bubble."""
    ranks = len(layout)
    turns = (1, 0, 0) if ranks % 2 else (3, 0, 4)
    return _repeated(layout, microbatches, BuildingBlock((2, 1, 2, 1), turns, 2 * (ranks // 2 + 1)))


def zb_v(layout: Layout, microbatches: int) -> list[list[Task]]:
    """ZB-V (Qi et al., arXiv 2401.10241, section 6): six slots; 1F1B's memory, and no bubble if F, I and W are equal.

    With two microbatches a rank, every rank is busy from its first action to its last.
    """
    return _repeated(layout, microbatches, BuildingBlock((3, 3, 3, 3), (0, 0, 0), 2 * len(layout)))


def _repeated(layout: Layout, microbatches: int, block: BuildingBlock) -> list[list[Task]]:
    rows = []
    for slots in _slots(layout, block):
        shifted = [(slot + _PERIOD * i, turn) for i in range(microbatches) for slot, turn in slots]
        rows.append([turn for _, turn in sorted(shifted)])
    return _filled(rows, 2 * len(layout) - 1, block)


def _slots(layout: Layout, block: BuildingBlock) -> Iterator[list[tuple[int, Task]]]:
    """For each rank, when it performs F and I of its two stages for the first microbatch."""
    there, back, again, home = block.offsets
    way = len(layout) - 1
    second = way * there + 1 + block.turns[0]
    third = second + way * back + 1 + block.turns[1]
    fourth = third + way * again + 1 + block.turns[2]
    for rank, (down, up) in enumerate(layout):
        yield [
            (there * rank, (down, _F)),
            (second + back * (way - rank), (up, _F)),
            (third + again * rank, (up, _I)),
            (fourth + home * (way - rank), (down, _I)),
        ]


def _filled(rows: Sequence[Sequence[Task]], last: int, block: BuildingBlock) -> list[list[Task]]:
    """The rows with each W in the first slot in which its rank has nothing better to do.

    A rank that waits for memory has a W to do, and no forward goes ahead that would leave too little: so this comes to
    its end if the rows do with every W right behind its I and within the block's limit.
    """
    queues = [deque(row) for row in rows]
    waiting: list[deque[Task]] = [deque() for _ in rows]
    held = [0] * len(rows)
    done = dict.fromkeys(((stage, kind) for stage in range(last + 1) for kind in (_F, _I)), 0)
    filled: list[list[Task]] = [[] for _ in rows]
    while any(queues) or any(waiting):
        before = dict(done)
        for rank, queue in enumerate(queues):
            turn = _next(queue, waiting[rank], before, block.limit - held[rank], last, block.early)
            if turn is None:
                continue
            filled[rank].append(turn)
            held[rank] += {_F: 1, _I: 0, _W: -1}[turn[1]]
            if turn in done:
                done[turn] += 1
            if turn[1] is _I:
                waiting[rank].append((turn[0], _W))
    return filled


def _next(
    queue: deque[Task],
    waiting: deque[Task],
    done: dict[Task, int],
    room: int,
    last: int,
    early: bool,
) -> Task | None:
    """What a rank takes in a slot: its next F or I if that can begin, else a W, else a forward ahead of its place."""
    if queue and _can_begin(queue[0], done, last) and (room or queue[0][1] is _I):
        return queue.popleft()
    if waiting:
        return waiting.popleft()
    place = _early(queue, done, room) if early else None
    if place is None:
        return None
    turn = queue[place]
    del queue[place]
    return turn


def _early(queue: Iterable[Task], done: dict[Task, int], room: int) -> int | None:
    """Where a forward stands that can begin ahead of its place and leaves memory for all that it overtakes."""
    for index, turn in enumerate(queue):
        if room < 1:
            break
        if turn[1] is _F and _can_begin(turn, done, last=0):
            return index
        room += {_F: -1, _I: 1}[turn[1]]
    return None


def _can_begin(turn: Task, done: dict[Task, int], last: int) -> bool:
    """Whether all that the next microbatch of this turn needs was done."""
    stage, kind = turn
    if kind is _F:
        return stage == 0 or done[stage - 1, _F] > done[turn]
    return done[stage, _F] > done[turn] and (stage == last or done[stage + 1, _I] > done[turn])


def dualpipe_v(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """DualPipeV (Sea AI Lab and DeepSeek, github.com/deepseek-ai/DualPipe, dualpipev.py, steps 1 to 8).

    DeepSeek runs an F and the B behind it as one, so that the messages of one hide behind the compute of the other;
    here they follow each other. Backwards are split only where their W fills a bubble. Needs two microbatches a rank.
    """
    (down, up), after = layout[rank], len(layout) - 1 - rank
    yield from [(down, _F)] * (2 * after)
    yield from [(down, _F), (up, _F)] * (rank + 1)
    yield from [(up, _I), (up, _W), (up, _F)] * after
    yield from [(down, _F), (up, _B), (up, _F), (down, _B)] * (
        microbatches - 2 * len(layout) + rank + 1
    )
    yield from [(up, _B), (up, _F), (down, _B)] * after
    ends = [up, down] * (rank + 1)
    halved = [*ends[rank + 1 :], *[down] * after]
    yield from ((stage, _B) for stage in ends[: rank + 1])
    yield from ((stage, _I) for stage in halved[: rank + 1])
    for stage in halved[:after]:
        yield stage, _W
        yield down, _I
    yield from ((stage, _W) for stage in halved[after:])
