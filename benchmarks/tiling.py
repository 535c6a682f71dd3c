"""The cost graph of a deep model from that of a shallow one: its second layer again and again.

What lies before the layers counts as layer −1, what lies behind as a layer after the last. A node, storage or gradient
is known by its layer and its place in it, and names others by where these lie relative to it; so whatever belongs to
the second layer is there once for each layer between the first and the last. tests/benchmarks/test_tiling.py holds
this against captures of deeper models.
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

__all__ = ["LEAST", "tiled"]

LEAST = 3  # layers: the first, the last, and one that is like all others between them
BEFORE, REPEATED = -1, 1


class _Home(NamedTuple):
    """Where something lies: in which layer, and as which of its kind there."""

    layer: int
    place: int


def tiled(graph: CostGraph, layers: int) -> CostGraph:
    """`graph`, of a model whose blocks are three layers or more, as if there were `layers` of them.

    Nodes of a layer are named after it and after the first layer's. ValueError if there are too few layers, if they
    differ in their nodes, or if anything but a neighbour reads what is made in one.
    """
    return _Tiling(graph, layers).graph()


@dataclass(frozen=True)
class _Tiling:
    source: CostGraph
    layers: int

    def graph(self) -> CostGraph:
        """Everything where it will be."""
        kinds = [[node.operator for node in nodes] for nodes in self._by_layer]
        if min(len(kinds), self.layers) < LEAST or any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                f"{len(kinds)} layers cannot be tiled to {self.layers}: give {LEAST} or more that are alike"
            )
        source = self.source
        nodes = [self._node(source.nodes[index], to) for index, to in self._moved(self._node_homes)]
        tensors = [
            self._tensor(source.tensors[index], to) for index, to in self._moved(self._tensor_homes)
        ]
        gradients = [
            self._gradient(source.gradients[index], to) for index, to in self._new_gradients
        ]
        storages = [index for index, _ in self._moved(self._storage_homes)]
        return replace(
            source,
            fingerprint="",
            nodes=tuple(nodes),
            tensors=tuple(tensors),
            storages=tuple(source.storages[index] for index in storages),
            contents=tuple(source.contents[index] for index in storages) if source.contents else (),
            parameters=tuple(sorted(self._parameters(), key=lambda parameter: parameter.name)),
            gradients=tuple(gradients),
            recomputed_together=tuple(
                tuple(
                    self._named(name, homes[index].layer, to)
                    for name in source.recomputed_together[index]
                )
                for homes in [[self._home[names[0]] for names in source.recomputed_together]]
                for index, to in self._moved(homes)
            ),
        )

    @cached_property
    def _by_layer(self) -> list[list[Node]]:
        found: dict[int, list[Node]] = defaultdict(list)
        for node, home in zip(self.source.nodes, self._node_homes, strict=True):
            found[home.layer].append(node)
        return [found[layer] for layer in range(self._last + 1)]

    @cached_property
    def _last(self) -> int:
        return max((_layer(node.module) for node in self.source.nodes), default=BEFORE)

    @cached_property
    def _node_homes(self) -> list[_Home]:
        layers, now = [], BEFORE
        for node in self.source.nodes:
            inside = _layer(node.module)
            now = inside if inside > BEFORE else BEFORE if now == BEFORE else self._last + 1
            layers.append(now)
        return _numbered(layers)

    @cached_property
    def _home(self) -> dict[str, _Home]:
        return {
            node.name: home for node, home in zip(self.source.nodes, self._node_homes, strict=True)
        }

    @cached_property
    def _tensor_homes(self) -> list[_Home]:
        return [self._home[tensor.producer] for tensor in self.source.tensors]

    @cached_property
    def _storage_homes(self) -> list[_Home]:
        """Where the first node that makes or saves each storage lies."""
        found: dict[int, int] = {}
        for tensor in self.source.tensors:
            if tensor.storage is not None:
                layer = self._home[tensor.producer].layer
                found[tensor.storage] = min(layer, found.get(tensor.storage, layer))
        for node in self.source.nodes:
            for storage in node.saved:
                found.setdefault(storage, self._home[node.name].layer)
        return _numbered(found[index] for index in range(len(self.source.storages)))

    @cached_property
    def _gradient_homes(self) -> list[_Home]:
        return _numbered(self._home[gradient.producer].layer for gradient in self.source.gradients)

    def _moved(
        self, homes: Sequence[_Home], *, backward: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Indices of things with the layer where each will be, layer by layer; those of a `backward` from the last."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, home in enumerate(homes):
            found[home.layer].append(index)
        for to in sorted(range(BEFORE, self.layers + 1), reverse=backward):
            yield from ((index, to) for index in found[self._origin(to)])

    def _origin(self, to: int) -> int:
        """The layer that a layer is made from."""
        if to < REPEATED:
            return to
        return REPEATED if to < self.layers - 1 else to - self._more

    @property
    def _more(self) -> int:
        return self.layers - 1 - self._last

    @cached_property
    def _new_storages(self) -> dict[_Home, int]:
        homes = self._storage_homes
        return {_Home(to, homes[i].place): new for new, (i, to) in enumerate(self._moved(homes))}

    @cached_property
    def _new_gradients(self) -> list[tuple[int, int]]:
        return list(self._moved(self._gradient_homes, backward=True))

    @cached_property
    def _gradient_places(self) -> dict[_Home, int]:
        homes = self._gradient_homes
        return {_Home(to, homes[i].place): new for new, (i, to) in enumerate(self._new_gradients)}

    def _from(self, home: _Home, layer: int, to: int) -> _Home:
        """What lies at `home` as something in `layer` sees it, once that is in layer `to`."""
        if abs(home.layer - layer) > 1:
            raise ValueError(
                f"something in layer {layer} names what lies in layer {home.layer}: this cannot be tiled"
            )
        return _Home(home.layer + to - layer, home.place)

    def _named(self, name: str, layer: int, to: int) -> str:
        home = self._from(self._home[name], layer, to)
        return self._name(home)

    def _name(self, home: _Home) -> str:
        if not BEFORE < home.layer < self.layers:
            return self._outside[home]
        first = re.sub(r"^\w*?_0_", "", self._by_layer[0][home.place].name)
        return f"layer_{home.layer}_{first}"

    @cached_property
    def _outside(self) -> dict[_Home, str]:
        ends = {BEFORE: BEFORE, self._last + 1: self.layers}
        return {
            _Home(ends[home.layer], home.place): name
            for name, home in self._home.items()
            if home.layer in ends
        }

    def _stored(self, storage: int, layer: int, to: int) -> int:
        return self._new_storages[self._from(self._storage_homes[storage], layer, to)]

    def _node(self, node: Node, to: int) -> Node:
        layer = self._home[node.name].layer
        return replace(
            node,
            name=self._named(node.name, layer, to),
            group=self._named(node.group, layer, to) if node.group in self._home else node.group,
            module=_renamed(node.module, to),
            parameters=tuple(_renamed(name, to) for name in node.parameters),
            view_gradients=tuple(_renamed(name, to) for name in node.view_gradients),
            saved=tuple(self._stored(storage, layer, to) for storage in node.saved),
        )

    def _tensor(self, tensor: Tensor, to: int) -> Tensor:
        layer = self._home[tensor.producer].layer
        return replace(
            tensor,
            producer=self._named(tensor.producer, layer, to),
            consumers=tuple(self._named(name, layer, to) for name in tensor.consumers),
            storage=None if tensor.storage is None else self._stored(tensor.storage, layer, to),
        )

    def _gradient(self, gradient: GradientStorage, to: int) -> GradientStorage:
        layer, before = self._home[gradient.producer].layer, gradient.continues
        return replace(
            gradient,
            producer=self._named(gradient.producer, layer, to),
            last=self._named(gradient.last, layer, to),
            readers=tuple(self._named(name, layer, to) for name in gradient.readers),
            captured_at=tuple(self._named(name, layer, to) for name in gradient.captured_at),
            edges=tuple(
                tuple(self._named(name, layer, to) for name in pair) for pair in gradient.edges
            ),
            continues=None
            if before is None
            else self._gradient_places[self._from(self._gradient_homes[before], layer, to)],
        )

    def _parameters(self) -> Iterator[Parameter]:
        layers = [_layer(parameter.name) for parameter in self.source.parameters]
        homes = [_Home(layer, index) for index, layer in enumerate(layers)]
        for index, to in self._moved(homes):
            parameter = self.source.parameters[index]
            yield replace(parameter, name=_renamed(parameter.name, to))


def _layer(path: str) -> int:
    """The layer in which a module or a parameter lies; −1 if in none."""
    number = block_of(path).rpartition(".")[2]
    return int(number) if number.isdigit() else BEFORE


def _renamed(path: str, to: int) -> str:
    """The same module or parameter of another layer; what lies in none keeps its path."""
    return re.sub(r"\d+", str(to), path, count=1) if _layer(path) > BEFORE else path


def _numbered(layers: Iterable[int]) -> list[_Home]:
    counts: dict[int, int] = defaultdict(int)
    homes = []
    for layer in layers:
        homes.append(_Home(layer, counts[layer]))
        counts[layer] += 1
    return homes
