"""Schedules on a V: the first rank holds the first stage and the last one, two stages on each rank.

Three of them repeat a building block (Qi et al., Pipeline Parallelism with Controllable Memory,
arXiv 2405.15362, section 3): the slots of one microbatch's F and I on all ranks. A microbatch
enters every six slots, one slot for each of F, I and W of a rank's two stages. A block of 3 ranks
whose offsets are all one slot, stages 0 to 5:

    slot     0  1  2  3  4  5  6  7  8  9  10 11
    rank 0   0F             5F 5I             0I
    rank 1      1F       4F       4I       1I
    rank 2         2F 3F             3I 2I

The longer a block, the more blocks overlap and the more memory a schedule needs. The offsets
between neighbouring ranks therefore decide how much memory that is. The drawings of the schedules
are of actions that take one slot each; a dot is a bubble.
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
    """The slots of one microbatch, as distances.

    `offsets` are the slots from a rank to the next one on the four ways through the V: F there, F
    back, I there, I back. `gaps` are the slots left free between one way and the next, so that no
    two actions of a rank fall on the same slot of a period. `limit` is how many activations a rank
    holds at most, one for each stage and microbatch. `takes_early` says whether a rank that would
    idle takes a forward before its slot; with the least memory that delays more than it gains.
    """

    offsets: tuple[int, int, int, int]
    gaps: tuple[int, int, int]
    limit: int
    takes_early: bool = True


def v_min(layout: Layout, microbatches: int) -> list[list[Task]]:
    """Return the tasks of V-Min: about a third of 1F1B's memory, with a smaller bubble.

    rank 0   0F0 0F1 .   .   .   5F0 5I0 5W0 .   .   .   5F1 5I1 0I0 5W1 0W0 .   0I1 0W1
    rank 1   .   1F0 .   .   4F0 1F1 .   4I0 4W0 .   4F1 1I0 1W0 4I1 4W1 .   1I1 1W1 .
    rank 2   .   .   2F0 3F0 .   .   2F1 .   3I0 3F1 2I0 3W0 2W0 .   3I1 2I1 3W1 2W1 .

    Every offset is one slot, which is the shortest block.
    """
    ranks = len(layout)
    # Without gaps the late stage's I is 2 × ranks slots behind the early one's F, on every rank.
    # With 3 or 6 ranks that is a multiple of the period, so the I of one microbatch and the F of
    # a later one would take the same slot: 0F at 0 and 5I at 6 on rank 0 of 3. Gaps of 2 put
    # them at 0 and 8, and all four of that rank at 0 7 8 15, which are 0 1 2 3 within a period.
    gaps = (0, 0, 0) if ranks % 3 else (2, 0, 2)
    # Counted in activations of one such stage, of which two make the layers of a rank: on 12
    # ranks the first one would hold 24 under 1F1B; here all hold 10, and 14 under V-Half.
    limit = 2 * ((ranks + 1) // 3 + 1)
    block = BuildingBlock((1, 1, 1, 1), gaps, limit, takes_early=False)
    return _repeated(layout, microbatches, block)


def v_half(layout: Layout, microbatches: int) -> list[list[Task]]:
    """Return the tasks of V-Half: about half of 1F1B's memory and of its bubble.

    rank 0   0F0 0F1 .   .   .   5F0 5I0 5F1 5I1 5W0 5W1 0I0 0W0 .   .   0I1 0W1
    rank 1   .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   1I0 4I1 1W0 4W1 1I1 1W1 .
    rank 2   .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 3I1 2I1 3W1 2W1 .

    The offsets of F and I of a stage add up to three slots.
    """
    ranks = len(layout)
    # As in `v_min`: the two are 3 × ranks − 1 slots apart before there are gaps. A gap of 1 makes
    # that 3 × ranks, a multiple of the period if ranks are even; then 3 makes it 3 × ranks + 2.
    gaps = (1, 0, 0) if ranks % 2 else (3, 0, 4)
    limit = 2 * (ranks // 2 + 1)
    return _repeated(layout, microbatches, BuildingBlock((2, 1, 2, 1), gaps, limit))


def zb_v(layout: Layout, microbatches: int) -> list[list[Task]]:
    """Return the tasks of ZB-V (Qi et al., Zero Bubble, arXiv 2401.10241, section 6).

    rank 0   0F0 0F1 0F2 .   .   5F0 5I0 5F1 5I1 5F2 5I2 0I0 5W0 0I1 5W1 0I2 5W2 0W0 0W1 0W2
    rank 1   .   1F0 1F1 1F2 4F0 .   4F1 4I0 4F2 4I1 1I0 4I2 1I1 4W0 1I2 4W1 1W0 4W2 1W1 1W2
    rank 2   .   .   2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3I1 2I1 3I2 2I2 3W0 2W0 3W1 2W1 3W2 2W2

    It needs the memory of 1F1B. With F, I and W of equal length and two microbatches for each rank,
    every rank is busy from its first action to its last.
    """
    # The two of `v_min` are 6 × (ranks − 1) + 2 slots apart, never a multiple of the period.
    block = BuildingBlock((3, 3, 3, 3), (0, 0, 0), 2 * len(layout))
    return _repeated(layout, microbatches, block)


def _repeated(layout: Layout, microbatches: int, block: BuildingBlock) -> list[list[Task]]:
    """Return the tasks of each rank, where each microbatch's block begins a period later."""
    rows = []
    # Rank 0 of 3 under V-Min: 0F at 0, 5F at 7, 5I at 8, 0I at 15, and the next microbatch 6 later:
    #
    #     slot     0   6   7   8   13  14  15  21
    #     rank 0   0F0 0F1 5F0 5I0 5F1 5I1 0I0 0I1
    #
    # Only this order is taken over, not the slots: the W come later, and bubbles are closed.
    for slots in _slots(layout, block):
        # Blocks of different microbatches never collide, so slots give one order of the tasks.
        shifted = [(slot + _PERIOD * i, task) for i in range(microbatches) for slot, task in slots]
        rows.append([task for _, task in sorted(shifted)])
    return _with_weight_backwards(rows, 2 * len(layout) - 1, block)


def _slots(layout: Layout, block: BuildingBlock) -> Iterator[list[tuple[int, Task]]]:
    """Yield for each rank the slots of F and I of its two stages for the first microbatch."""
    forward_there, forward_back, backward_there, backward_back = block.offsets
    distance = len(layout) - 1
    # The slots in which each way begins, on the rank where it begins.
    second = distance * forward_there + 1 + block.gaps[0]
    third = second + distance * forward_back + 1 + block.gaps[1]
    fourth = third + distance * backward_there + 1 + block.gaps[2]
    for rank, (early, late) in enumerate(layout):
        yield [
            (forward_there * rank, (early, _F)),
            (second + forward_back * (distance - rank), (late, _F)),
            (third + backward_there * rank, (late, _I)),
            (fourth + backward_back * (distance - rank), (early, _I)),
        ]


def _with_weight_backwards(
    rows: Sequence[Sequence[Task]], last: int, block: BuildingBlock
) -> list[list[Task]]:
    """Return the rows of F and I with each W in the first slot in which its rank would idle.

    `last` is the last stage. The ranks are simulated slot by slot. This ends if the rows do when
    each W directly follows its I and the block's limit holds: a rank that waits for memory has a W
    to do, and no forward that is taken early leaves too little memory.
    """
    queues = [deque(row) for row in rows]
    pending: list[deque[Task]] = [deque() for _ in rows]
    held = [0] * len(rows)
    done = dict.fromkeys(((stage, kind) for stage in range(last + 1) for kind in (_F, _I)), 0)
    complete: list[list[Task]] = [[] for _ in rows]
    while any(queues) or any(pending):
        # Results of this slot are available in the next one.
        before = dict(done)
        for rank, queue in enumerate(queues):
            room = block.limit - held[rank]
            task = _next(queue, pending[rank], before, room, last, block.takes_early)
            if task is None:
                continue
            complete[rank].append(task)
            # Activations are held from F to W; I frees none of them.
            held[rank] += {_F: 1, _I: 0, _W: -1}[task[1]]
            if task in done:
                done[task] += 1
            if task[1] is _I:
                pending[rank].append((task[0], _W))
    return complete


def _next(
    queue: deque[Task],
    pending: deque[Task],
    done: dict[Task, int],
    room: int,
    last: int,
    takes_early: bool,
) -> Task | None:
    """Remove and return the task of a rank in a slot; None if it idles.

    It is the rank's next F or I if that can begin, else a W, else a forward before its slot.
    """
    if queue and _can_begin(queue[0], done, last) and (room or queue[0][1] is _I):
        return queue.popleft()
    if pending:
        return pending.popleft()
    index = _early_forward(queue, done, room) if takes_early else None
    if index is None:
        return None
    task = queue[index]
    del queue[index]
    return task


def _early_forward(queue: Iterable[Task], done: dict[Task, int], room: int) -> int | None:
    """Return the index of a forward that can begin and leaves memory for all that it overtakes."""
    for index, task in enumerate(queue):
        if room < 1:
            break
        # A forward does not look at `last`.
        if task[1] is _F and _can_begin(task, done, last=0):
            return index
        # A forward that is overtaken needs room later, and an I lets a W free some.
        room += {_F: -1, _I: 1}[task[1]]
    return None


def _can_begin(task: Task, done: dict[Task, int], last: int) -> bool:
    """Return whether all inputs of the task's next microbatch are there."""
    stage, kind = task
    if kind is _F:
        return stage == 0 or done[stage - 1, _F] > done[task]
    return done[stage, _F] > done[task] and (stage == last or done[stage + 1, _I] > done[task])


def dualpipe_v(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """Yield the tasks of a rank under DualPipeV.

    (Sea AI Lab and DeepSeek, github.com/deepseek-ai/DualPipe, dualpipev.py, steps 1 to 8.)

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    rank 1   .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

    It needs two microbatches for each rank. DeepSeek runs an F and the B behind it together,
    so that the messages of one overlap with the compute of the other; here they follow
    each other. Backwards are split only where their W fills a bubble.
    """
    (early, late), after = layout[rank], len(layout) - 1 - rank
    # By the eight steps of dualpipev.py, rank 0 of 2 with 4 microbatches:
    #
    #     1 0F0 0F1 │ 2 0F2 3F0 │ 3 3I0 3W0 3F1 │ 4 0F3 3B1 3F2 0B0 │
    #     5 3B2 3F3 0B1 │ 6 3B3 0I2 │ 7 0W2 0I3 │ 8 0W3
    #
    # Forwards of each stage add up to the number of microbatches, rank + 1 + 2 × after +
    # steady, unless steady is below zero: two microbatches for each rank are enough for that.
    yield from [(early, _F)] * (2 * after)
    yield from [(early, _F), (late, _F)] * (rank + 1)
    yield from [(late, _I), (late, _W), (late, _F)] * after
    steady = microbatches - 2 * len(layout) + rank + 1
    yield from [(early, _F), (late, _B), (late, _F), (early, _B)] * steady
    yield from [(late, _B), (late, _F), (early, _B)] * after
    # The remaining backwards: the first half of them whole, then split ones.
    remaining = [late, early] * (rank + 1)
    split = [*remaining[rank + 1 :], *[early] * after]
    yield from ((stage, _B) for stage in remaining[: rank + 1])
    yield from ((stage, _I) for stage in split[: rank + 1])
    for stage in split[:after]:
        yield stage, _W
        yield early, _I
    yield from ((stage, _W) for stage in split[after:])
