"""Clusters from texts, files and mappings."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pipecompile.api.cluster import caps_of, cluster_of
from pipecompile.cost_models.device import Device, load_device, named_devices
from pipecompile.errors import FormatError, InputError
from pipecompile.ir.links import Link, Links, slowest
from pipecompile.ir.serialization import encode, write

H100, A100 = load_device("h100"), load_device("a100")


def between(device: Device) -> Link:
    assert device.between_nodes is not None
    return device.between_nodes


def test_one_node() -> None:
    cluster = cluster_of("8xh100")
    assert cluster.devices == ("h100",) * 8
    assert H100.within_node is not None
    assert cluster.links == Links.of(H100.within_node)
    assert caps_of(cluster) == (80_000_000_000,) * 8


def test_several_nodes_of_one_kind() -> None:
    cluster = cluster_of("2x4xH100")
    assert cluster.nodes == (("h100",) * 4,) * 2
    assert cluster.links.link(0, 3) == cluster.links.link(4, 7) == H100.within_node
    assert cluster.links.link(3, 4) == H100.between_nodes
    assert cluster_of(cluster.text) == cluster


def test_nodes_of_two_kinds_are_joined_by_the_slower_network() -> None:
    cluster = cluster_of("2xh100, 2xa100")
    assert cluster.kinds == ("h100", "a100")
    assert cluster.links.link(0, 1) == H100.within_node
    assert cluster.links.link(2, 3) == A100.within_node
    assert cluster.links.link(1, 2) == slowest([between(H100), between(A100)])
    assert caps_of(cluster_of("1xh100,1xl4")) == (80_000_000_000, 24_000_000_000)


def test_the_name_of_a_device_may_hold_an_x() -> None:
    assert cluster_of("2x2xrtx4090").nodes == (("rtx4090",) * 2,) * 2


@pytest.mark.parametrize("kind", named_devices())
def test_each_named_device_can_be_several(kind: str) -> None:
    cluster = cluster_of(f"2x2x{kind}")
    assert cluster_of(cluster.text) == cluster
    rates = [cluster.links.link(0, 1), cluster.links.link(1, 2)]
    inside, outside = (link.bandwidth_bytes_per_s for link in rates)
    assert inside is not None
    assert outside is not None
    assert inside >= outside


def test_a_cluster_has_a_file(tmp_path: Path) -> None:
    path, cluster = tmp_path / "cluster.json", cluster_of("4xh100,4xa100")
    cluster.save(path)
    assert cluster_of(path) == cluster_of(str(path)) == cluster
    nodes = {"nodes": [["h100"], ["a100"]], "within": {}, "between": {"latency_ns": 3}}
    assert cluster_of(nodes).links == Links.of(Link(latency_ns=3))


def test_a_device_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write(path, encode(replace(H100, name="mine")))
    cluster = cluster_of(f"2x{path}")
    assert (cluster.devices, cluster.links) == ((str(path),) * 2, cluster_of("2xh100").links)
    write(path, encode(replace(H100, name="mine", within_node=None)))
    with pytest.raises(InputError, match=r"'mine' does not say what joins .*within_node"):
        cluster_of(f"2x{path}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("8xh10", "unknown device 'h10'; did you mean 'h100'"),
        ("8h100", "'8h100' describes no devices; write 8xh100"),
        ("0xh100", "'0xh100' describes no devices"),
        ("4xh100,", "devices='4xh100,': '' describes no devices"),
        ("", "'' describes no devices"),
        ({"nodes": [["b200"]], "within": {}, "between": {}}, "unknown device 'b200'"),
    ],
)
def test_what_is_no_cluster_is_answered(given: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster_of(given)


def test_another_file_is_no_cluster(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    write(path, encode(Links.of(Link())))
    with pytest.raises(FormatError, match="a cluster is expected"):
        cluster_of(path)
