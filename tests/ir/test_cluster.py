"""Clusters: their devices in order, and the link between any two of them."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import FormatError
from pipecompile.ir.cluster import Cluster
from pipecompile.ir.links import FREE, Link, Links, slowest
from pipecompile.ir.serialization import decode, encode

FAST = Link(bandwidth_bytes_per_s=10**11, latency_ns=5)
SLOW = Link(bandwidth_bytes_per_s=10**9, latency_ns=50)
TWO = Cluster(nodes=(("h100",) * 2, ("a100",)), within=FAST, between=SLOW)

links = st.sampled_from([FAST, SLOW, Link()])
nodes = st.lists(
    st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
).map(tuple)


@given(nodes, st.data())
def test_each_pair_of_devices_is_joined_by_its_nodes(
    nodes: tuple[tuple[str, ...], ...], data: st.DataObject
) -> None:
    within = data.draw(links | st.tuples(*(links for _ in nodes)))
    between = data.draw(links)
    cluster = Cluster(nodes=nodes, within=within, between=between)
    places = [(index, kind) for index, node in enumerate(nodes) for kind in node]
    assert cluster.devices == tuple(kind for _, kind in places)
    assert set(cluster.kinds) == {kind for _, kind in places}
    assert cluster.links.fits(len(places))
    for one, other in permutations(range(len(places)), 2):
        home, away = places[one][0], places[other][0]
        inside = within[home] if isinstance(within, tuple) else within
        assert cluster.links.link(one, other) == (inside if home == away else between)
    assert decode(encode(cluster), Cluster, origin="c.json") == cluster


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_replicas_that_lie_on_several_nodes_sum_over_the_network(
    nodes: int, replicas: int, ranks: int
) -> None:
    # As many devices as ranks of all replicas, in equal nodes.
    devices = replicas * ranks
    each = -(-devices // nodes)
    sizes = [min(each, devices - start) for start in range(0, devices, each)]
    cluster = Cluster(nodes=tuple(("h100",) * size for size in sizes), within=FAST, between=SLOW)
    for rank in range(ranks):
        # Devices of one node follow one another, and so do the ranks of a replica.
        homes = {(replica * ranks + rank) // each for replica in range(replicas)}
        wanted = SLOW if len(homes) > 1 else FAST
        if replicas > 1:
            assert cluster.links.between_replicas(rank, ranks) == wanted


def test_links_that_are_alike_are_one_value() -> None:
    one_node = Cluster(nodes=(("h100",) * 64,), within=FAST, between=SLOW)
    assert one_node.links == Links.of(FAST)
    assert Cluster(nodes=(("h100",),) * 9, within=FAST, between=SLOW).links == Links.of(SLOW)
    assert Cluster(nodes=(("h100",),), within=FAST, between=SLOW).links == FREE
    assert TWO.links.ranks == 3


def test_a_cluster_reads_as_it_is_written_by_hand() -> None:
    assert TWO.text == "2xh100,1xa100"
    two = Cluster(nodes=(("h100",) * 8,) * 2, within=FAST, between=SLOW)
    assert two.text == "2x8xh100"
    mixed = Cluster(nodes=(("h100", "a100", "a100"),), within=FAST, between=SLOW)
    assert mixed.text == "1xh100+2xa100"


def test_the_slowest_link_is_slow_in_both_respects() -> None:
    far = Link(bandwidth_bytes_per_s=10**12, latency_ns=90)
    assert slowest([SLOW, far]) == Link(bandwidth_bytes_per_s=10**9, latency_ns=90)
    assert slowest([Link(latency_ns=7), Link()]) == Link(latency_ns=7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('"nodes": []', "at least one node"),
        ('"nodes": [["h100"], []]', "at least one node, and a node at least one device"),
        ('"nodes": [["h100", ""]]', "named by its kind"),
        ('"nodes": [["h100"]], "speed": 1', "unknown field `speed`"),
        ('"nodes": [["h100"], ["a100"]], "within": [{}]', "lists 1 links, but there are 2 nodes"),
    ],
)
def test_a_file_that_is_wrong_is_answered(fields: str, message: str) -> None:
    within = "" if "within" in fields else ', "within": {}'
    with pytest.raises(FormatError, match=rf"^c\.json: .*{message}"):
        decode(f'{{{fields}{within}, "between": {{}}}}'.encode(), Cluster, origin="c.json")
