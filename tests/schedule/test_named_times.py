"""The named schedules against the bubbles and memory of their papers, and torch's own orders.

The simulator here is a second one, kept simple on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules  # noqa: TID251

from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.schedule.named_orders import NAMES, generate, required_placement
from pipecompile.schedule.placement import place

F, I, W, B, R = (Kind(letter) for letter in "FIWBR")  # noqa: E741
UNIT = {F: 1, R: 1, I: 1, W: 1, B: 2}
TABLE = json.loads((Path(__file__).parents[1] / "golden" / "zero_bubble_table5.json").read_text())[
    "rows"
]
OrderTimes = Mapping[Kind, Any]


def _times(schedule: Schedule, time: OrderTimes = UNIT, transfer: Any = 0) -> tuple[Any, Any]:
    """Return makespan and largest span; an action starts when rank and inputs are there."""
    ends: dict[tuple[int, Kind, int | None], Any] = {}
    rows = [[action for action in row if action.kind in time] for row in schedule.rows]
    free, begun = [0] * len(rows), [None] * len(rows)
    while any(rows):
        started = 0
        for rank, row in enumerate(rows):
            while row and all(need in ends for need in _needs(row[0], schedule)):
                action = row.pop(0)
                needs = _needs(action, schedule)
                hops = [transfer * (schedule.placement[stage] != rank) for stage, _, _ in needs]
                arrivals = [ends[need] + hop for need, hop in zip(needs, hops, strict=True)]
                start = max([free[rank], *arrivals])
                begun[rank] = start if begun[rank] is None else begun[rank]
                free[rank] = start + time[action.kind]
                ends[action.stage, B if action.kind is I else action.kind, action.microbatch] = (
                    free[rank]
                )
                started += 1
        assert started, f"{schedule.name} deadlocks: {[str(row[0]) for row in rows if row]}"
    return max(free), max(end - (start or 0) for end, start in zip(free, begun, strict=True))


def _needs(action: Action, schedule: Schedule) -> list[tuple[int, Kind, int | None]]:
    stage, kind, microbatch, _ = action
    if kind is F:
        return [(stage - 1, F, microbatch)] if stage else []
    if kind is W:
        return [(stage, B, microbatch)]
    own = [(stage, F, microbatch)]
    return (
        [*own, (stage + 1, B, microbatch)]
        if kind in (I, B) and stage + 1 < len(schedule.placement)
        else own
    )


def _held(schedule: Schedule) -> list[int]:
    """Return for each rank the most activations of a stage that it holds from F to W or B."""
    peaks = []
    for row in schedule.rows:
        held = peak = 0
        for action in row:
            held += (action.kind is F) - (action.kind in (W, B))
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def _placed(name: str, ranks: int, held: int = 2) -> tuple[int, ...]:
    shape, needed = required_placement(name)
    return place("loop" if shape == "any" else shape, ranks, needed or held)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_comes_to_its_end(name: str) -> None:
    chunks = (1, 2, 3, 4) if required_placement(name)[1] is None else (1,)
    for ranks, held, microbatches in product(
        range(1, 9 if len(chunks) == 1 else 7), chunks, range(1, 14)
    ):
        if microbatches >= {"dualpipe-v": 2 * ranks, "pipedream-2bw": ranks - 1}.get(name, 1):
            _times(generate(name, _placed(name, ranks, held), microbatches, recompute=True))


@pytest.mark.parametrize(("name", "chunks"), [("1F1B", 1), ("ZB-H1", 1), ("ZB-H2", 1)])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['model']}-{row['m']}")
def test_bubbles_are_those_of_table_5_to_its_last_digit(
    name: str, chunks: int, row: dict[str, Any]
) -> None:
    assert abs(_bubble_rate(name.lower(), row) - row["published"][name]) <= 0.00005


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['model']}-{row['m']}")
def test_interleaved_bubbles_are_nearly_those_of_table_5(row: dict[str, Any]) -> None:
    """The paper does not say how interleaved times split over chunks; here they divide evenly."""
    assert (
        0
        < _bubble_rate("interleaved-1f1b", row, row["chunks"]) - row["published"]["1F1B-I"]
        < 0.004
    )


def _bubble_rate(name: str, row: dict[str, Any], chunks: int = 1) -> float:
    """Return 1 − useful time / largest span; exact decimals are rounded only at the end."""
    forward, inputs, weights, transfer = (
        Fraction(str(row[key])) for key in ("TF", "TB", "TW", "Tcomm")
    )
    time = {
        F: forward / chunks,
        I: inputs / chunks,
        W: weights / chunks,
        B: (inputs + weights) / chunks,
    }
    _, span = _times(generate(name, place("loop", row["p"], chunks), row["m"]), time, transfer)
    return float(1 - row["m"] * (forward + inputs + weights) / span)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("time", [{F: 1, B: 1}, {F: 5, B: 11}])
def test_the_bubble_of_equal_stages_is_that_of_gpipe(name: str, time: OrderTimes) -> None:
    """(K − 1) / (M + K − 1): Huang et al., section 2.3; 1F1B has the same one for M ≥ K."""
    for stages, more in product(range(1, 7), (0, 1, 5)):
        microbatches = stages + more
        makespan, _ = _times(generate(name, range(stages), microbatches), time)
        useful = Fraction(microbatches * (time[F] + time[B]), makespan)
        assert 1 - useful == Fraction(stages - 1, microbatches + stages - 1)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
def test_the_bubble_of_a_loop_shrinks_with_its_chunks(name: str) -> None:
    """(p − 1) / (v m + p − 1) of the makespan, for all F, B and m ≥ p (Narayanan, section 2.2)."""
    for ranks, chunks, more, time in product(
        range(1, 6), range(1, 5), (0, 1, 2, 3, 6), ({F: 1, B: 2}, {F: 3, B: 4})
    ):
        microbatches = ranks + more
        makespan, _ = _times(generate(name, place("loop", ranks, chunks), microbatches), time)
        useful = Fraction(chunks * microbatches * (time[F] + time[B]), makespan)
        assert 1 - useful == Fraction(ranks - 1, chunks * microbatches + ranks - 1)


def test_the_bubbles_of_the_zero_bubble_schedules_are_their_formulas() -> None:
    """(p − 1)(F + I − W) in ZB-H1, (p − 1)(F + I − 2W) in ZB-H2 (section 2.3), if W fills none."""
    for ranks, time in product(range(1, 9), ({F: 1, I: 1, W: 1}, {F: 7, I: 6, W: 5})):
        microbatches = 4 * ranks
        useful = microbatches * sum(time.values())
        for name, filled in (("zb-h1", 1), ("zb-h2", 2)):
            _, span = _times(generate(name, range(ranks), microbatches), time)
            assert span - useful == (ranks - 1) * max(0, time[F] + time[I] - filled * time[W])


RANKS = [*range(2, 17)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rounds", [2, 4])
def test_v_schedules_trade_memory_for_bubbles(ranks: int, rounds: int) -> None:
    """In activations of one of a rank's stages, 1F1B holds 2p; its bubble is 6 (p − 1) slots."""
    made = {
        name: generate(name, _placed(name, ranks), rounds * ranks)
        for name in ("v-min", "v-half", "zb-v")
    }
    peaks = {name: max(_held(schedule)) for name, schedule in made.items()}
    bubbles = {name: _times(schedule)[0] - 6 * rounds * ranks for name, schedule in made.items()}
    assert peaks == {
        "v-min": 2 * ((ranks + 1) // 3 + 1),
        "v-half": 2 * (ranks // 2 + 1),
        "zb-v": 2 * ranks,
    }
    assert bubbles["zb-v"] == ranks - 1
    assert bubbles["v-half"] <= 3 * (ranks - 1)
    assert bubbles["v-min"] == 4 * ranks - 5


def test_a_rank_of_zb_v_is_never_idle_between_its_first_action_and_its_last() -> None:
    for ranks in range(1, 13):
        _, span = _times(generate("zb-v", _placed("zb-v", ranks), 2 * ranks))
        assert span == 6 * 2 * ranks


def _by_torch(kind: str, ranks: int, microbatches: int, placement: tuple[int, ...]) -> Schedule:
    """Return the order of a torch schedule, without stages and process group; pairs as F, B."""
    held = len(placement) // ranks
    rows = []
    for rank in range(ranks):
        fake = SimpleNamespace(
            pp_group_size=ranks,
            _n_microbatches=microbatches,
            num_stages=len(placement),
            _stages=[None] * held,
            n_local_stages=held,
            microbatches_per_round=microbatches // max(1, microbatches // ranks),
        )
        actions = getattr(torch_schedules, kind)._calculate_single_rank_operations(fake, rank)
        flat = [part for action in actions if action for part in action.sub_actions or (action,)]
        rows.append([Action.parse(str(action)) for action in flat])
    return Schedule.of(kind, microbatches, placement, rows)


def test_interleaved_is_torchs_where_groups_divide_the_microbatches() -> None:
    for ranks, chunks, groups, more in product(range(1, 7), range(2, 5), (1, 2, 3), (0, 1)):
        placement, microbatches = place("loop", ranks, chunks), groups * (ranks + more)
        if microbatches // ranks == groups:
            theirs = _by_torch("ScheduleInterleaved1F1B", ranks, microbatches, placement)
            assert generate("interleaved-1f1b", placement, microbatches).actions == theirs.actions


def test_looped_bfs_is_torchs_with_its_backwards_in_ascending_order() -> None:
    for ranks, chunks, microbatches in product(range(2, 6), range(1, 5), (1, 3, 8)):
        placement = place("loop", ranks, chunks)
        theirs = _by_torch("ScheduleLoopedBFS", ranks, microbatches, placement)
        turned = [
            [
                a._replace(microbatch=microbatches - 1 - a.microbatch) if a.kind is B else a
                for a in row
            ]
            for row in theirs.rows
        ]
        assert generate("looped-bfs", placement, microbatches).rows == tuple(map(tuple, turned))


def test_dualpipe_v_is_torchs() -> None:
    for ranks, more in product(range(1, 9), (0, 1, 5)):
        placement = place("v", ranks, 2)
        theirs = _by_torch("ScheduleDualPipeV", ranks, 2 * ranks + more, placement)
        assert generate("dualpipe-v", placement, 2 * ranks + more).actions == theirs.actions


def test_zb_v_is_no_slower_than_torchs_and_holds_no_more() -> None:
    for ranks, microbatches in product(range(1, 9), (1, 2, 3, 5, 8, 16, 24)):
        placement = place("v", ranks, 2)
        ours, theirs = (
            generate("zb-v", placement, microbatches),
            _by_torch("ScheduleZBVZeroBubble", ranks, microbatches, placement),
        )
        assert _times(ours)[0] <= _times(theirs)[0]
        assert max(_held(ours)) <= 2 * ranks


def test_zb_h1_is_no_slower_than_torchs() -> None:
    """With one stage on each rank torch's interleaved zero bubble is ZB-H1 but for its lead."""
    for ranks, rounds in product(range(2, 7), (1, 2, 3)):
        theirs = _by_torch(
            "ScheduleInterleavedZeroBubble", ranks, rounds * ranks, place("loop", ranks, 1)
        )
        ours = generate("zb-h1", range(ranks), rounds * ranks)
        assert _times(ours)[0] <= _times(theirs)[0]
        assert max(_held(ours)) <= max(_held(theirs))
