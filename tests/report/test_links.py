from __future__ import annotations

from collections.abc import Callable

import msgspec

from pipecompile.ir.links import FREE, Link, Links
from pipecompile.ir.plan import Plan
from pipecompile.report.links import links_table, links_text
from pipecompile.report.summary import summary

MakePlan = Callable[..., Plan]

RATES = ((None, 2 * 10**9, 10**8), (4 * 10**9, None, 10**8), (10**8, None, None))
DELAYS = ((0, 5000, 60_000), (6000, 0, 60_000), (60_000, 70_000, 0))
THREE = Links(bandwidth_bytes_per_s=RATES, latency_ns=DELAYS)


def test_links_in_one_line() -> None:
    assert links_text(FREE) == "free: none given"
    assert (
        links_text(Links.of(Link(bandwidth_bytes_per_s=10**10, latency_ns=5000)))
        == "10.0 GB/s + 5.0 µs"
    )
    # One MiB takes 70 µs from rank 2 to rank 1, as any size does, and longest at 0.1 GB/s.
    assert links_text(THREE) == "0.1 GB/s + 60.0 µs – any size + 70.0 µs"


def test_a_plan_says_how_its_ranks_are_connected(make_plan: MakePlan) -> None:
    own = msgspec.structs.replace(
        FREE, sending=Link(bandwidth_bytes_per_s=2 * 10**9, latency_ns=1000)
    )
    lines = summary(msgspec.structs.replace(make_plan(), links=own)).splitlines()
    at = lines.index("  links      free: none given")
    assert lines[at + 1] == "             sending keeps a rank for 2.0 GB/s + 1.0 µs"


def test_links_as_tables() -> None:
    assert links_table(
        msgspec.structs.replace(THREE, receiving=Link(latency_ns=4000))
    ).splitlines() == [
        "GB/s   to 0 to 1 to 2",
        "from 0    - 2.00 0.10",
        "from 1 4.00    - 0.10",
        "from 2 0.10  any    -",
        "",
        "µs     to 0 to 1 to 2",
        "from 0    -  5.0 60.0",
        "from 1  6.0    - 60.0",
        "from 2 60.0 70.0    -",
        "",
        "receiving keeps a rank for any size + 4.0 µs",
    ]
