from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import FormatError
from pipecompile.ir.links import FREE, Link, Links, links_of_pairs, slowest
from pipecompile.ir.serialization import decode, encode

TWO = Links(bandwidth_bytes_per_s=((None, 10**9), (10**8, None)), latency_ns=((0, 5), (7, 0)))


def test_links_are_read_as_they_were_written() -> None:
    for links in (FREE, TWO, msgspec.structs.replace(TWO, sending=Link(latency_ns=3))):
        assert decode(encode(links), Links, origin="links.json") == links


def test_a_file_needs_no_more_than_one_bandwidth_and_one_latency() -> None:
    text = b'{"schema": "pipecompile/links/1", "bandwidth_bytes_per_s": 1000, "latency_ns": 3}'
    assert decode(text, Links, origin="links.json") == Links.of(
        Link(bandwidth_bytes_per_s=1000, latency_ns=3)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"bandwidth_bytes_per_s": null', "missing required field `latency_ns`"),
        ('"bandwidth_bytes_per_s": 0, "latency_ns": 0', r"`\$\.bandwidth_bytes_per_s`"),
        (
            '"bandwidth_bytes_per_s": [[null, -1], [1, null]], "latency_ns": 0',
            r"`\$\.bandwidth_bytes_per_s\[0\]\[1\]`",
        ),
        (
            '"bandwidth_bytes_per_s": null, "latency_ns": [[0, 1.5], [0, 0]]',
            r"`\$\.latency_ns\[0\]\[1\]`",
        ),
        (
            '"bandwidth_bytes_per_s": null, "latency_ns": [[0, 1]]',
            r"square and of one size, but have sides \[1, 2\]",
        ),
        (
            '"bandwidth_bytes_per_s": [[null]], "latency_ns": [[0, 1], [1, 0]]',
            r"but have sides \[1, 2\]",
        ),
        ('"bandwidth_bytes_per_s": null, "latency_ns": []', r"but have sides \[0\]"),
        ('"bandwidth_bytes_per_s": null, "latency_ns": 0, "speed": 1', "unknown field `speed`"),
    ],
)
def test_a_file_that_is_wrong_is_answered_with_the_place(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=rf"^links\.json: .*{message}"):
        decode(f"{{{text}}}".encode(), Links, origin="links.json")


def test_a_transfer_depends_on_where_it_goes() -> None:
    assert TWO.transfer_ns(0, 1, 100) == 100 + 5
    assert TWO.transfer_ns(1, 0, 100) == 1000 + 7
    assert TWO.transfer_ns(0, 0, 100) == TWO.transfer_ns(0, 1, 0) == 0
    assert TWO.hop(0, 1).transfer_ns(100, 10) == (100 + 5) + (100 + 7)


def test_links_know_for_whom_they_are() -> None:
    assert (TWO.ranks, TWO.fits(2), TWO.fits(3), TWO.one) == (2, True, False, None)
    assert (FREE.ranks, FREE.fits(7), FREE.one) == (None, True, Link())
    mixed = msgspec.structs.replace(TWO, bandwidth_bytes_per_s=9)
    assert mixed.link(1, 0) == Link(bandwidth_bytes_per_s=9, latency_ns=7)
    assert [pair[:2] for pair in TWO.pairs()] == [(0, 1), (1, 0)]
    assert Links(bandwidth_bytes_per_s=((None,),), latency_ns=0).one == Link()


def test_a_pipeline_is_as_slow_as_its_slowest_replica() -> None:
    # Nodes of three devices and of one hold two replicas of two ranks.
    near, far = Link(bandwidth_bytes_per_s=10**9, latency_ns=1), Link(latency_ns=50)
    table = [[near if one // 3 == other // 3 else far for other in range(4)] for one in range(4)]
    links = links_of_pairs(table)
    assert links.among(4) == links
    # Ranks 0 and 1 share a node; 2 and 3 of the second replica do not.
    assert links.among(2).link(0, 1) == slowest([near, far])
    assert links.among(2).ranks == 2
    assert FREE.among(2) == FREE


RATES, DELAYS = st.none() | st.integers(1, 10**12), st.integers(0, 10**6)


@given(st.integers(1, 5), RATES, DELAYS, st.integers(0, 10**9), st.data())
def test_a_matrix_of_equal_entries_is_one_link(
    ranks: int, rate: int | None, delay: int, size: int, data: st.DataObject
) -> None:
    one = Links(bandwidth_bytes_per_s=rate, latency_ns=delay)
    many = Links(
        bandwidth_bytes_per_s=((rate,) * ranks,) * ranks, latency_ns=((delay,) * ranks,) * ranks
    )
    a, b = (data.draw(st.integers(0, ranks - 1)) for _ in range(2))
    assert many.transfer_ns(a, b, size) == one.transfer_ns(a, b, size)
    assert many.one in (one.one, Link())  # with one rank there is no link
    assert many.hop(a, b) == one.hop(a, b)


@given(
    st.builds(Link, bandwidth_bytes_per_s=RATES, latency_ns=DELAYS),
    st.integers(0, 10**9),
    st.data(),
)
def test_what_the_ranks_do_themselves_is_part_of_the_transfer(
    link: Link, size: int, data: st.DataObject
) -> None:
    own = [
        data.draw(st.builds(Link, bandwidth_bytes_per_s=RATES, latency_ns=DELAYS)) for _ in range(2)
    ]
    links = msgspec.structs.replace(Links.of(link), sending=own[0], receiving=own[1])
    busy = sum(part.transfer_ns(size) for part in own)
    assert links.under_way_ns(0, 1, size) + busy == max(busy, links.transfer_ns(0, 1, size))
