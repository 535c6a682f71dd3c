from __future__ import annotations

import msgspec
import pytest

from pipecompile.ir.cut import Cut
from pipecompile.report.cut import cut_text

CUT = Cut(
    stages={"a": 0, "b": 0, "c": 1},
    loads_with_transfers_ns=(1_000, 3_000),
    max_load_ns=3_000,
    sum_of_squares_ns2=10_000_000,
    variance_ns2=1_000_000,
    objective="variance",
    value=10_000_000,
    bound=9_999_999,
    gap=1e-7,
    proven=False,
    method="linear-dp",
    seconds=0.25,
    replicas=(1, 2),
)


def test_a_cut_is_printed_with_its_loads_beside_the_ideal() -> None:
    lines = cut_text(CUT).splitlines()
    assert lines[:4] == [
        "2 stages of 3 nodes on 3 ranks",
        "  objective  variance: Σ load² 10.0 µs², bound 10.0 µs², "
        "gap <0.01%, not proven (linear-dp)",
        "  imbalance  1.500 (largest 3.0 µs / mean), variance 1.0 µs²",
        "  search     0.25 s",
    ]
    assert [line.translate(dict.fromkeys(map(ord, "▏▎▍▌▋▊▉█"))).split() for line in lines[5:]] == [
        ["stage", "nodes", "replicas", "load", "+", "transfers", "of", "mean"],
        ["ideal", "2.0", "µs", "100.0%"],
        ["0", "2", "1", "1.0", "µs", "50.0%"],
        ["1", "1", "2", "3.0", "µs", "150.0%"],
    ]
    assert [line.count("█") for line in lines[6:]] == [30, 15, 45]


def test_stages_that_share_ranks_are_printed_by_rank() -> None:
    shared = msgspec.structs.replace(
        CUT, stages=dict(zip("abcd", range(4), strict=True)), replicas=(1,) * 4
    )
    lines = cut_text(shared).splitlines()
    assert lines[0] == "4 stages of 4 nodes on 2 ranks"
    assert lines[5].split() == ["rank", "load", "+", "transfers", "of", "mean"]
    assert [line.split()[0] for line in lines[6:]] == ["ideal", "0", "1"]


@pytest.mark.parametrize("loads", [(0,), (0, 0), (10**17,) * 3, tuple(range(64))])
def test_a_cut_is_at_most_a_hundred_columns_wide(loads: tuple[int, ...]) -> None:
    stages = {f"a_long_name_of_node_{stage}": stage for stage in range(len(loads))}
    cut = msgspec.structs.replace(
        CUT, loads_with_transfers_ns=loads, stages=stages, replicas=(1,) * len(loads)
    )
    assert max(map(len, cut_text(cut).splitlines())) <= 100


def test_relative_times_are_said_to_be_no_seconds() -> None:
    text = cut_text(msgspec.structs.replace(CUT, time_unit="relative"))
    assert "variance: Σ load² 10.0 M units², bound 10.0 M units²" in text
    assert "  times      relative units, not seconds (1 k is 1,000 units)" in text
    assert "µs" not in text
