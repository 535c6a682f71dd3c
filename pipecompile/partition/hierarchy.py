"""The tree of modules that nodes lie in, and which nodes a planner that looks at one of its levels keeps together.

Paths of modules are all that is known of the tree, and all that is needed. A number in a path is the place of a module
in a list of modules. What is kept together is a run of the forward, nodes that follow each other: what lies between
two parts of a module cuts it in two, so units that are made of runs form no cycle. Where a residual connection goes
around a submodule, a set of all of the module's own operators would have drawn the submodule in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from pipecompile.ir.graph import CostGraph
from pipecompile.partition.units import Unit

__all__ = ["Modules", "inside", "kept_together"]


@dataclass(frozen=True)
class Modules:
    """The tree: modules that hold others, and entries of lists that do nothing but run a list of their own."""

    holding: frozenset[str]
    lists: frozenset[str]

    @staticmethod
    def of(paths: Iterable[str]) -> Modules:
        """The tree of the modules that operators lie in."""
        found = frozenset(paths)
        holding = frozenset(outer for path in found for outer in _ancestors(path))
        nested = {outer for path in holding for outer, _ in pairwise(_entries(path))}
        return Modules(holding, frozenset(nested - found))

    def block(self, path: str) -> str | None:
        """The outermost entry of a list of modules that `path` lies in, unless it only runs a list of its own.

        The outermost in GPT-2 (`h.3`), whose layers add what their modules give to what came, and in a network that
        has lists of layers in its blocks. One further in where an entry has no operators of its own and its list
        holds more than single layers: stages of a ResNet (`stages.0.layers.1`) or Swin (`layers.0.blocks.1`), blocks
        of T5 (`block.0.layer.1`). What lies beside that list, and in no other, is in no block.
        """
        return next((entry for entry in _entries(path) if entry not in self.lists), None)

    def owner(self, path: str) -> str | None:
        """The module whose forward runs the operators of `path`: its own, and those of modules that hold no others.

        A block that holds no others owns itself. The model's own forward keeps nothing together.
        """
        block = self.block(path)
        owner = path if path in self.holding or path == block else path.rpartition(".")[0]
        return owner or None

    def at(self, level: str, path: str) -> str | None:
        """What keeps the operators of `path` together at a level. Blocks contain modules; outside, they are these."""
        return self.owner(path) if level == "modules" else self.block(path) or self.owner(path)


def kept_together(graph: CostGraph, granularity: str) -> tuple[Unit, ...]:
    """Per module or block the nodes that are kept together, in the order of the forward; none between operators.

    Nodes that stay alone are left out. "auto" starts from no level: its units are the operators.
    """
    return tuple(_runs(graph, granularity)) if granularity in ("modules", "blocks") else ()


def inside(graph: CostGraph) -> dict[Unit, tuple[Unit, ...]]:
    """What the nodes of each block are kept together in at the next finer level that tells them apart."""
    modules = kept_together(graph, "modules")
    home = {name: block for block in kept_together(graph, "blocks") for name in block}
    found: dict[Unit, tuple[Unit, ...]] = {}
    for module in modules:
        block = home[module[0]]
        if block != module:
            found[block] = (*found.get(block, ()), module)
    return found


def _runs(graph: CostGraph, level: str) -> Iterator[Unit]:
    modules = Modules.of(node.module for node in graph.nodes)
    for path, nodes in groupby(graph.nodes, lambda node: modules.at(level, node.module)):
        names = tuple(node.name for node in nodes)
        if path is not None and len(names) > 1:
            yield names


def _ancestors(path: str) -> Iterator[str]:
    """The modules that hold `path`, from the outermost; the model itself aside."""
    return accumulate(path.split(".")[:-1], "{}.{}".format)


def _entries(path: str) -> Iterator[str]:
    """The entries of lists in `path`, itself included, from the outermost."""
    return (outer for outer in (*_ancestors(path), path) if outer.rpartition(".")[2].isdigit())
