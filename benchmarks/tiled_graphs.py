"""The cost graph of a deep model, made from that of a shallow one by repeating its second layer.

    captured, three layers:   before | layer 0 | layer 1 | layer 2 | after
    tiled to five layers:     before | layer 0 | layer 1 | layer 1 | layer 1 | layer 2 | after

A node, storage, tensor or gradient has a place: its layer (−1 before all layers, and the number of
layers after them) and its index within the layer. It names others by their layer relative to its
own, so a reference from layer 1 to layer 0 becomes one from layer 3 to layer 2.
`benchmarks.gpipe_memory` plans models of 1663 layers and more this way and captures only three.
tests/benchmarks/test_tiled_graphs.py compares tiled graphs with captures of deeper models.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph, GradientStorage, Node, Parameter, Tensor
from pipecompile.ir.module_paths import block_of

__all__ = ["LEAST_LAYERS", "tile"]

LEAST_LAYERS = 3  # the first, the last, and one that is like all others between them
BEFORE, REPEATED = -1, 1


class _Place(NamedTuple):
    """Where something is: its layer, and its index among the things of its kind there."""

    layer: int
    index: int


def tile(graph: CostGraph, layers: int) -> CostGraph:
    """Return `graph`, whose model has three layers or more, as if it had `layers` of them.

    The nodes of layer 7 are called `layer_7_…` after those of layer 0. ValueError if there are too
    few layers, if their operators differ, or if a layer reads from one that is not its neighbour.
    """
    return _Tiling(graph, layers).graph()


@dataclass(frozen=True)
class _Tiling:
    """A cost graph and the number of layers that it is to have."""

    source: CostGraph
    layers: int

    def graph(self) -> CostGraph:
        """Return the tiled graph."""
        kinds = [[node.operator for node in nodes] for nodes in self._by_layer]
        if min(len(kinds), self.layers) < LEAST_LAYERS or any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                f"{len(kinds)} layers cannot be tiled to {self.layers}: "
                f"give {LEAST_LAYERS} or more that are alike"
            )
        source = self.source
        nodes = [
            self._node(source.nodes[index], to) for index, to in self._moved(self._node_places)
        ]
        tensors = [
            self._tensor(source.tensors[index], to)
            for index, to in self._moved(self._tensor_places)
        ]
        gradients = [
            self._gradient(source.gradients[index], to) for index, to in self._new_gradients
        ]
        storages = [index for index, _ in self._moved(self._storage_places)]
        return replace(
            source,
            fingerprint="",
            nodes=tuple(nodes),
            tensors=tuple(tensors),
            storages=tuple(source.storages[index] for index in storages),
            contents=tuple(source.contents[index] for index in storages) if source.contents else (),
            parameters=tuple(sorted(self._parameters(), key=lambda parameter: parameter.name)),
            gradients=tuple(gradients),
            recomputed_together=tuple(self._recomputed_together()),
        )

    def _recomputed_together(self) -> Iterator[tuple[str, ...]]:
        together = self.source.recomputed_together
        places = [self._place_of[names[0]] for names in together]
        for index, to in self._moved(places):
            yield tuple(self._named(name, places[index].layer, to) for name in together[index])

    @cached_property
    def _by_layer(self) -> list[list[Node]]:
        nodes: dict[int, list[Node]] = defaultdict(list)
        for node, place in zip(self.source.nodes, self._node_places, strict=True):
            nodes[place.layer].append(node)
        return [nodes[layer] for layer in range(self._last + 1)]

    @cached_property
    def _last(self) -> int:
        return max((_layer(node.module) for node in self.source.nodes), default=BEFORE)

    @cached_property
    def _node_places(self) -> list[_Place]:
        layers, layer = [], BEFORE
        for node in self.source.nodes:
            inside = _layer(node.module)
            if inside > BEFORE:
                layer = inside
            elif layer != BEFORE:
                layer = self._last + 1  # A node outside of all layers comes after them.
            layers.append(layer)
        return _numbered(layers)

    @cached_property
    def _place_of(self) -> dict[str, _Place]:
        return {
            node.name: place
            for node, place in zip(self.source.nodes, self._node_places, strict=True)
        }

    @cached_property
    def _tensor_places(self) -> list[_Place]:
        return [self._place_of[tensor.producer] for tensor in self.source.tensors]

    @cached_property
    def _storage_places(self) -> list[_Place]:
        """Return for each storage the place of the first node that makes or saves it."""
        layers: dict[int, int] = {}
        for tensor in self.source.tensors:
            if tensor.storage is not None:
                layer = self._place_of[tensor.producer].layer
                layers[tensor.storage] = min(layer, layers.get(tensor.storage, layer))
        for node in self.source.nodes:
            for storage in node.saved:
                layers.setdefault(storage, self._place_of[node.name].layer)
        return _numbered(layers[index] for index in range(len(self.source.storages)))

    @cached_property
    def _gradient_origins(self) -> list[_Place]:
        return _numbered(
            self._place_of[gradient.producer].layer for gradient in self.source.gradients
        )

    def _moved(
        self, places: Sequence[_Place], *, backward: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Yield (index of a thing in the source, its layer in the tiled graph), layer by layer.

        With `backward` the last layer comes first, as in the order of gradients.
        """
        indices: dict[int, list[int]] = defaultdict(list)
        for index, place in enumerate(places):
            indices[place.layer].append(index)
        for to in sorted(range(BEFORE, self.layers + 1), reverse=backward):
            yield from ((index, to) for index in indices[self._origin(to)])

    def _origin(self, to: int) -> int:
        """Return the layer of the source that layer `to` is a copy of."""
        if to < REPEATED:
            return to
        return REPEATED if to < self.layers - 1 else to - self._added_layers

    @property
    def _added_layers(self) -> int:
        return self.layers - 1 - self._last

    @cached_property
    def _new_storages(self) -> dict[_Place, int]:
        places = self._storage_places
        return {_Place(to, places[i].index): new for new, (i, to) in enumerate(self._moved(places))}

    @cached_property
    def _new_gradients(self) -> list[tuple[int, int]]:
        return list(self._moved(self._gradient_origins, backward=True))

    @cached_property
    def _gradient_places(self) -> dict[_Place, int]:
        places = self._gradient_origins
        return {_Place(to, places[i].index): new for new, (i, to) in enumerate(self._new_gradients)}

    def _shifted(self, place: _Place, layer: int, to: int) -> _Place:
        """Return what `place`, as seen from `layer`, becomes when seen from layer `to`."""
        if abs(place.layer - layer) > 1:
            raise ValueError(
                f"something in layer {layer} refers to layer {place.layer}: this cannot be tiled"
            )
        return _Place(place.layer + to - layer, place.index)

    def _named(self, name: str, layer: int, to: int) -> str:
        place = self._shifted(self._place_of[name], layer, to)
        return self._name(place)

    def _name(self, place: _Place) -> str:
        if not BEFORE < place.layer < self.layers:
            return self._outside[place]
        first = re.sub(r"^\w*?_0_", "", self._by_layer[0][place.index].name)
        return f"layer_{place.layer}_{first}"

    @cached_property
    def _outside(self) -> dict[_Place, str]:
        ends = {BEFORE: BEFORE, self._last + 1: self.layers}
        return {
            _Place(ends[place.layer], place.index): name
            for name, place in self._place_of.items()
            if place.layer in ends
        }

    def _stored(self, storage: int, layer: int, to: int) -> int:
        return self._new_storages[self._shifted(self._storage_places[storage], layer, to)]

    def _node(self, node: Node, to: int) -> Node:
        layer = self._place_of[node.name].layer
        return replace(
            node,
            name=self._named(node.name, layer, to),
            group=self._named(node.group, layer, to)
            if node.group in self._place_of
            else node.group,
            module=_renamed(node.module, to),
            parameters=tuple(_renamed(name, to) for name in node.parameters),
            view_gradients=tuple(_renamed(name, to) for name in node.view_gradients),
            saved=tuple(self._stored(storage, layer, to) for storage in node.saved),
        )

    def _tensor(self, tensor: Tensor, to: int) -> Tensor:
        layer = self._place_of[tensor.producer].layer
        return replace(
            tensor,
            producer=self._named(tensor.producer, layer, to),
            consumers=tuple(self._named(name, layer, to) for name in tensor.consumers),
            storage=None if tensor.storage is None else self._stored(tensor.storage, layer, to),
        )

    def _gradient(self, gradient: GradientStorage, to: int) -> GradientStorage:
        layer, continues = self._place_of[gradient.producer].layer, gradient.continues
        if continues is not None:
            origin = self._gradient_origins[continues]
            continues = self._gradient_places[self._shifted(origin, layer, to)]
        return replace(
            gradient,
            producer=self._named(gradient.producer, layer, to),
            last=self._named(gradient.last, layer, to),
            readers=tuple(self._named(name, layer, to) for name in gradient.readers),
            captured_at=tuple(self._named(name, layer, to) for name in gradient.captured_at),
            edges=tuple(
                tuple(self._named(name, layer, to) for name in pair) for pair in gradient.edges
            ),
            continues=continues,
        )

    def _parameters(self) -> Iterator[Parameter]:
        layers = [_layer(parameter.name) for parameter in self.source.parameters]
        places = [_Place(layer, index) for index, layer in enumerate(layers)]
        for index, to in self._moved(places):
            parameter = self.source.parameters[index]
            yield replace(parameter, name=_renamed(parameter.name, to))


def _layer(path: str) -> int:
    """Return the layer of a module or a parameter; −1 if it is in none."""
    number = block_of(path).rpartition(".")[2]
    return int(number) if number.isdigit() else BEFORE


def _renamed(path: str, to: int) -> str:
    """Return the path of the same module or parameter in layer `to`; `path` if in no layer."""
    return re.sub(r"\d+", str(to), path, count=1) if _layer(path) > BEFORE else path


def _numbered(layers: Iterable[int]) -> list[_Place]:
    """Return the place of each thing, given the layer of each, in order."""
    counts: dict[int, int] = defaultdict(int)
    places = []
    for layer in layers:
        places.append(_Place(layer, counts[layer]))
        counts[layer] += 1
    return places
