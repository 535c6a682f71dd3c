"""Coarsening: the groups of nodes that a coarser granularity treats as one.

The tree of modules is known only by the paths of modules, such as `transformer.h.3.attn`: a number
is a place in a list of modules.

A group is a *run*: nodes that follow each other in the forward. A layer with residual connections
shows why. At granularity "modules" its operators form five runs:

    operators   norm_1    q, k, v    add, norm_2    up, down    add
    module      h.0       h.0.attn   h.0            h.0.mlp     h.0

If all operators of `h.0` were one group, `h.0.attn` would lie on a cycle with it, since it reads
norm_1 and feeds the addition, and be drawn in. Runs of one topological order form no cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from pipecompile.ir.graph import CostGraph
from pipecompile.partition.units import Unit

__all__ = ["ModuleTree", "coarse_groups", "finer_groups"]


@dataclass(frozen=True)
class ModuleTree:
    """The tree of modules, as far as blocks and owners depend on it.

    `parents` are the modules that hold other modules. `list_runners` are entries of lists that only
    run a list of their own.
    """

    parents: frozenset[str]
    list_runners: frozenset[str]

    @staticmethod
    def of(paths: Iterable[str]) -> ModuleTree:
        """Return the tree of the modules that operators lie in, from their `paths`."""
        with_operators = frozenset(paths)
        parents = frozenset(outer for path in with_operators for outer in _ancestors(path))
        # An inner entry counts only where it lies in a parent: single layers in a list, as
        # `h.3.mlp.0`, do not make `h.3` a module that only runs a list.
        outer_entries = {outer for path in parents for outer, _ in pairwise(_list_entries(path))}
        return ModuleTree(parents, frozenset(outer_entries - with_operators))

    def block(self, path: str) -> str | None:
        """Return the outermost entry of a list around `path` that does more than run its own list.

        It is None outside of lists. Examples:

            path                                block                  why
            h.3.attn.c_attn                     h.3                    its forward adds residuals
            h.3.mlp.0                           h.3                    `h.3.mlp` is a list inside
            stages.0.layers.1.conv (ResNet)     stages.0.layers.1      stages.0 only runs its list
            layers.0.downsample (Swin)          none                   beside the list of layers.0
        """
        entries = (entry for entry in _list_entries(path) if entry not in self.list_runners)
        return next(entries, None)

    def owner(self, path: str) -> str | None:
        """Return the module whose forward runs the operators of `path`.

        It is None for the model's own forward.

        A module that holds no others belongs to the module around it, unless it is a block.
        """
        # A leaf as `h.3.ln` runs inside the forward of `h.3`, which its operators belong to.
        if path in self.parents or path == self.block(path):
            return path or None
        return path.rpartition(".")[0] or None

    def at(self, level: str, path: str) -> str | None:
        """Return the module whose operators stay together at a level, "modules" or "blocks".

        Blocks contain modules. Outside of blocks, the level "blocks" is that of modules.
        """
        owner = self.owner(path)
        return owner if level == "modules" else self.block(path) or owner


def coarse_groups(graph: CostGraph, granularity: str) -> tuple[Unit, ...]:
    """Return the groups of two nodes or more that a granularity keeps together.

    They come in the order of the forward.

    There are none for "operators", nor for "auto", whose units are the operators.
    """
    return tuple(_runs(graph, granularity)) if granularity in ("modules", "blocks") else ()


def finer_groups(graph: CostGraph) -> dict[Unit, tuple[Unit, ...]]:
    """Return, by block, the groups of modules in it; a block of a single module has no entry."""
    # Outside of blocks both levels have the same groups, so that every module has a block.
    block_of = {name: block for block in coarse_groups(graph, "blocks") for name in block}
    modules: dict[Unit, tuple[Unit, ...]] = {}
    for module in coarse_groups(graph, "modules"):
        block = block_of[module[0]]
        if block != module:
            modules[block] = (*modules.get(block, ()), module)
    return modules


def _runs(graph: CostGraph, level: str) -> Iterator[Unit]:
    tree = ModuleTree.of(node.module for node in graph.nodes)
    for path, nodes in groupby(graph.nodes, lambda node: tree.at(level, node.module)):
        names = tuple(node.name for node in nodes)
        # The model's own forward keeps nothing together, and a single node is its own unit.
        if path is not None and len(names) > 1:
            yield names


def _ancestors(path: str) -> Iterator[str]:
    """Return the modules that hold `path`, the outermost first.

    `path` and the model itself are not among them.
    """
    return accumulate(path.split(".")[:-1], "{}.{}".format)


def _list_entries(path: str) -> Iterator[str]:
    """Return the entries of lists in `path`, the outermost first; `path` itself may be one."""
    modules = (*_ancestors(path), path)
    return (module for module in modules if module.rpartition(".")[2].isdigit())
