from __future__ import annotations

from pipecompile.ir.schedule import Action, Event, Idle, Timeline
from pipecompile.report.timeline_text import timeline_text


def test_a_timeline_in_letters() -> None:
    words = [["0F0", "0F11", "0R0", "0B0"], ["1F0", "1I0", "1W0"]]
    rows = tuple(
        tuple(Event(Action.parse(word), 2 * i, 2 * i + 2) for i, word in enumerate(row))
        for row in words
    )
    idle = Idle(dependency_ns=0, transfer_ns=0)
    assert timeline_text(Timeline(rows, (idle, idle)), width=8).splitlines()[:2] == [
        "rank  0 0011rraa",
        "rank  1 00aaww··",
    ]


def test_regions_are_the_first_part_of_a_backward() -> None:
    row = (Event(Action.parse("0B1"), 0, 6), Event(Action.parse("1B0"), 6, 8))
    timeline = Timeline((row,), (Idle(dependency_ns=0, transfer_ns=0),))
    assert timeline_text(timeline, {0: 2 / 3}, width=8).splitlines()[0] == "rank  0 rrrrbbaa"
