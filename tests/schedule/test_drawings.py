"""The drawings in the docstrings of the schedules are what the simulator says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipecompile.ir.stage_ranks import placement_of
from pipecompile.schedule import asynchronous_versions, flush, v_shaped_orders, zero_bubble
from pipecompile.schedule.named_orders import NAMES, generate
from pipecompile.schedule.placement import place
from pipecompile.schedule.simulator import simulate
from tests.schedule.cases import equal

# By schedule what holds the drawing, which of its drawings it is, and what it shows:
# the shape, the ranks, the stages on each rank, and the microbatches.
DRAWINGS: dict[str, tuple[Any, int, tuple[str, int, int], int]] = {
    "forward-only": (flush.forward_only, 0, ("linear", 3, 1), 3),
    "gpipe": (flush.gpipe, 0, ("linear", 3, 1), 3),
    "looped-bfs": (flush.gpipe, 1, ("loop", 3, 2), 3),
    "1f1b": (flush.one_f_one_b, 0, ("linear", 3, 1), 4),
    "interleaved-1f1b": (flush.interleaved, 0, ("loop", 3, 2), 3),
    "zb-h1": (zero_bubble.zb_h1, 0, ("linear", 3, 1), 4),
    "zb-h2": (zero_bubble.zb_h2, 0, ("linear", 3, 1), 5),
    "zb-v": (v_shaped_orders.zb_v, 0, ("v", 3, 2), 3),
    "v-half": (v_shaped_orders.v_half, 0, ("v", 3, 2), 2),
    "v-min": (v_shaped_orders.v_min, 0, ("v", 3, 2), 2),
    "dualpipe-v": (v_shaped_orders.dualpipe_v, 0, ("v", 2, 2), 4),
    "pipedream": (asynchronous_versions, 0, ("linear", 3, 1), 4),
    "pipedream-vertical-sync": (asynchronous_versions, 0, ("linear", 3, 1), 4),
    "pipedream-2bw": (asynchronous_versions, 0, ("linear", 3, 1), 4),
}


def _drawings(owner: Callable[..., object]) -> list[list[list[str]]]:
    """The drawings in a docstring: rows of cells. A row of rank 0 begins a drawing."""
    drawings: list[list[list[str]]] = []
    for line in (owner.__doc__ or "").splitlines():
        words = line.split()
        if len(words) > 2 and words[0] == "rank" and words[1].isdigit():
            if words[1] == "0":
                drawings.append([])
            drawings[-1].append(words[2:])
    return drawings


def _drawn(name: str, placement: tuple[int, ...], microbatches: int) -> list[list[str]]:
    timeline = simulate(equal(placement, microbatches), generate(name, placement, microbatches))
    rows = []
    for events in timeline.events:
        row = ["."] * timeline.makespan_ns
        for event in events:
            text = str(event.action._replace(version=None))
            several = len(placement) > len(timeline.events)
            row[event.start_ns] = text if several else text.removeprefix(str(event.action.stage))
        rows.append(row)
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_as_it_is_drawn(name: str) -> None:
    owner, number, shape, microbatches = DRAWINGS[name]
    assert _drawings(owner)[number] == _drawn(name, place(*shape), microbatches)


def test_replicas_of_a_stage_take_turns_as_it_is_drawn() -> None:
    assert _drawings(flush.one_f_one_b)[1] == _drawn("1f1b", placement_of([2, 1]), 4)


def test_every_drawing_is_compared() -> None:
    compared = {(owner.__name__, number) for owner, number, *_ in DRAWINGS.values()}
    compared.add((flush.one_f_one_b.__name__, 1))  # by the test above
    functions = {owner for owner, *_ in DRAWINGS.values()}
    assert len(compared) == sum(len(_drawings(owner)) for owner in functions)
