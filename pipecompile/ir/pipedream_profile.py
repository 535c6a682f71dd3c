"""Profiles in the text format of PipeDream's profiler, read as cost graphs.

The profiles that its authors published (github.com/msr-fiddle/pipedream, profiler/*/profiles) have
a line for each layer, and a line for each edge:

    node2 -- Conv2d(3, 64) -- forward_compute_time=22.307, …, parameter_size=7168.000
        node1 -- node2

Times are in milliseconds, sizes in bytes, those of a layer with several results in a list.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from pipecompile.errors import FormatError
from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.serialization import decode, read_bytes

__all__ = ["cost_graph_in", "cost_graph_of_profile"]

SEPARATOR = " -- "
NS_PER_MS = 10**6
FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


class _ProfiledLayer(NamedTuple):
    """A line for a layer: times in ms, sizes in bytes."""

    description: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float

    @property
    def is_input(self) -> bool:
        """Whether it stands for what the model is given, and not for work."""
        return self.description.startswith("Input")


def cost_graph_in(path: str | Path) -> CostGraph:
    """Return the cost graph in a file, which is one or a profile of PipeDream's profiler.

    FormatError if it is neither, or cannot be read.
    """
    data = read_bytes(path, CostGraph)
    if data.lstrip().startswith(b"node"):
        return cost_graph_of_profile(data.decode(errors="replace"), str(path))
    return decode(data, CostGraph, origin=str(path))


def cost_graph_of_profile(text: str, origin: str = "the profile") -> CostGraph:
    """Return the cost graph of a profile, its nodes in an order of the forward.

    Inputs are no nodes: what reads them reads the minibatch. A layer's activation is sent to stages
    that read it, and its gradient of the same size is sent back; its backward keeps the activation.
    FormatError names the line that cannot be read.
    """
    layers: dict[str, _ProfiledLayer] = {}
    readers: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(text.splitlines(), 1):
        fields = [field.strip() for field in line.split(SEPARATOR)]
        where = f"{origin}, line {number}"
        match fields:
            case [""]:
                continue
            case [source, target]:
                readers[source].append(target)
            # A description may have the separator in it: the first field is the name, the last
            # has the figures.
            case [name, *_, _] if len(fields) >= 3 and name not in layers:
                layers[name] = _layer(SEPARATOR.join(fields[1:-1]), fields[-1], where)
            case _:
                raise FormatError(f"{where}: {line.strip()!r} is neither a layer nor an edge")
    _check_names(layers, readers, origin)
    named = {name: layer for name, layer in layers.items() if not layer.is_input}
    order = [name for name in _topological(layers, readers, origin) if name in named]
    return CostGraph(
        nodes=tuple(_node(name, named[name]) for name in order),
        tensors=tuple(_tensor(name, named[name], readers[name]) for name in order if readers[name]),
    )


def _layer(description: str, figures: str, where: str) -> _ProfiledLayer:
    """Return what a line says of a layer."""
    # Split at ", ": in the lists of a figure, such as [3; 4] or [3,4], no comma has a space
    # behind it.
    given = dict(part.strip().split("=", 1) for part in figures.split(", ") if "=" in part)
    missing = [name for name in FIGURES if name not in given]
    if missing:
        raise FormatError(
            f"{where}: {missing[0]} is missing; a layer ends with " + ", ".join(FIGURES)
        )
    return _ProfiledLayer(description, *(_number(name, given[name], where) for name in FIGURES))


def _number(name: str, text: str, where: str) -> float:
    """Return a figure: a number, or for "[a; b]" the sum."""
    try:
        numbers = [float(part) for part in re.split("[;,]", text.strip("[] "))]
    except ValueError:
        # Out of the range below, so that both mistakes have one message.
        numbers = [-1.0]
    # Not a number is not in the range either.
    if not all(0 <= number < 1e15 for number in numbers):
        raise FormatError(f"{where}: {name}={text} is not a size or time from 0 to 10¹⁵")
    return sum(numbers)


def _check_names(
    layers: Mapping[str, _ProfiledLayer], readers: Mapping[str, Sequence[str]], origin: str
) -> None:
    """Raise FormatError if an edge leads to or from a layer without a line, or there is none."""
    named = (name for source, targets in readers.items() for name in (source, *targets))
    unknown = next((name for name in named if name not in layers), None)
    if unknown is not None:
        raise FormatError(f"{origin}: an edge names {unknown}, which no line describes")
    if all(layer.is_input for layer in layers.values()):
        raise FormatError(f"{origin}: there is no layer in it")


def _topological(
    layers: Mapping[str, _ProfiledLayer], readers: Mapping[str, Iterable[str]], origin: str
) -> Iterable[str]:
    """Return the layers so that each comes after what it reads."""
    before: dict[str, list[str]] = {name: [] for name in layers}
    for source, targets in readers.items():
        for target in targets:
            before[target].append(source)
    try:
        return tuple(TopologicalSorter(before).static_order())
    except CycleError as error:
        raise FormatError(f"{origin}: these read one another: {error.args[1]}") from None


def _node(name: str, layer: _ProfiledLayer) -> Node:
    return Node(
        name=name,
        forward_ns=round(layer.forward_ms * NS_PER_MS),
        backward_ns=round(layer.backward_ms * NS_PER_MS),
        parameter_bytes=round(layer.parameter_bytes),
        saved_bytes=round(layer.activation_bytes),
        group=None,
        operator=layer.description,
    )


def _tensor(name: str, layer: _ProfiledLayer, readers: Sequence[str]) -> Tensor:
    size = round(layer.activation_bytes)
    # A reader may be named twice, but a tensor is sent to it once.
    return Tensor(
        producer=name, consumers=tuple(dict.fromkeys(readers)), bytes=size, gradient_bytes=size
    )
