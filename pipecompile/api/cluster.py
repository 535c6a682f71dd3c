"""The devices that a user has: from a text, a file or a value. Needs no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipecompile.cost_models.device import Device, load_device, named_devices
from pipecompile.errors import InputError, unknown
from pipecompile.ir.cluster import Cluster
from pipecompile.ir.links import Link, slowest
from pipecompile.ir.serialization import decode, encode

__all__ = ["ClusterInput", "caps_of", "cluster_of"]

ClusterInput = Cluster | Mapping[str, Any] | str | Path

# 8xh100, or 2x8xh100; a kind may hold an x too: 8xrtx4090.
_NODES = re.compile(r"(?:(?P<nodes>[1-9]\d*)x)?(?P<devices>[1-9]\d*)x(?P<kind>[^\d\s].*)")


def cluster_of(given: ClusterInput) -> Cluster:
    """Return `given` as a cluster: a text, the path of a JSON file, or its content as a mapping.

    `8xh100` is a node of eight devices, `2x8xh100` two such nodes, and `4xh100,4xa100` a node of
    each kind. What joins them is then that of the named devices; between nodes of several kinds it
    is the slowest of theirs. InputError shows the forms, or suggests the nearest device.
    """
    if isinstance(given, Cluster):
        return _known(given)
    if isinstance(given, Mapping):
        return _known(decode(encode(given), Cluster, origin="devices"))
    text = str(given)
    if Path(text).is_file():
        return _known(Cluster.load(text))
    return _named_cluster([_nodes(text, part.strip()) for part in text.split(",")])


def caps_of(cluster: Cluster) -> tuple[int, ...]:
    """Return the memory of each device in bytes."""
    memory = {kind: load_device(kind).memory_bytes for kind in cluster.kinds}
    return tuple(memory[kind] for kind in cluster.devices)


def _known(cluster: Cluster) -> Cluster:
    """Return `cluster`; InputError if it names a device that nobody knows."""
    for kind in cluster.kinds:
        _device(kind)
    return cluster


def _nodes(text: str, part: str) -> tuple[tuple[str, ...], ...]:
    """Return the nodes that one part of a text describes."""
    match = _NODES.fullmatch(part)
    if match is None:
        raise InputError(
            f"devices={text!r}: {part!r} describes no devices; write 8xh100 (one node of eight), "
            "2x8xh100 (two such nodes) or 4xh100,4xa100 (a node of each), or name a cluster file"
        )
    # Names are known in whatever case; the path of a device file is taken as it is.
    kind = match["kind"]
    # 8xH100 is 8xh100, and 8x./Mine.json stays as it is. "2x8xh100" is read from the left, as
    # 2 nodes of 8; in "8xrtx4090" the second x belongs to the name, since no digit follows the
    # first x.
    name = kind.lower() if kind.lower() in named_devices() else kind
    return ((name,) * int(match["devices"]),) * int(match["nodes"] or 1)


def _named_cluster(parts: Iterable[tuple[tuple[str, ...], ...]]) -> Cluster:
    """Return the cluster of `parts`, each some nodes of one kind, joined as such devices are."""
    nodes = tuple(node for part in parts for node in part)
    devices = [_device(node[0]) for node in nodes]
    # A node with one device has no link within it, and a single node none between: a device file
    # that says nothing of them is then complete all the same.
    within = [
        _link(device, device.within_node) if len(node) > 1 else Link()
        for node, device in zip(nodes, devices, strict=True)
    ]
    between = [_link(device, device.between_nodes) for device in devices if len(nodes) > 1]
    return Cluster(
        nodes=nodes,
        within=within[0] if len(set(within)) == 1 else tuple(within),
        between=slowest(between) if between else Link(),
    )


def _device(kind: str) -> Device:
    if kind in named_devices() or Path(kind).is_file():
        return load_device(kind)
    raise unknown("device", kind, named_devices())


def _link(device: Device, link: Link | None) -> Link:
    if link is None:
        raise InputError(
            f"device {device.name!r} does not say what joins several of its kind; add within_node "
            "and between_nodes to its file, or describe the nodes in a cluster file"
        )
    return link
