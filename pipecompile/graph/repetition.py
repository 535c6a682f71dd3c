"""Repetition in a graph: equal blocks of nodes, one after the other, as the layers of a decoder.

    before | block 0 | block 1 | … | block 79 | after

Names only tell where blocks may begin. That blocks are equal is found by comparing all that decides
what their nodes do: the operator, its constants and the settings of its module, the shapes, strides
and types of what it reads and returns, and where that comes from.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from pipecompile.graph.attributes import REGISTERED_TABLES, is_same_value
from pipecompile.graph.loss_module import called_path
from pipecompile.graph.pytrees import tensor_leaves

__all__ = ["Repetition", "repetitions", "state_of"]

_SOURCE = "·"  # stands for a node among the arguments of another
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Repetition:
    """`count` equal blocks of `period` nodes each, one after the other, from node `start` on."""

    start: int
    period: int
    count: int

    def block_of(self, position: int) -> int:
        """Return the block of the node at `position`: −1 before all, `count` after all."""
        return max(-1, min((position - self.start) // self.period, self.count))


def repetitions(module: fx.GraphModule, graph: fx.Graph) -> list[Repetition]:
    """Return the repetitions of a graph, the one with most nodes first.

    Each block reads from itself, from the block before it, or with all others the same nodes before
    the first. Nodes after the last block read no other block. A parameter is read in one block, or
    in all by the same nodes. Requires `meta["val"]` of `propagate`.
    """
    comparison = _BlockComparison(module, tuple(graph.nodes))
    found = (comparison.longest(starts) for starts in _possible_starts(graph))
    return sorted(
        (each for each in found if each is not None),
        key=lambda each: (-each.period * each.count, each.start),
    )


def _possible_starts(graph: fx.Graph) -> Iterator[list[int]]:
    """Yield, for each list of modules, the positions at which a module of it is entered first.

    The path of a module in a list ends with a number: layers.3, or layers.0.blocks.1 in a nest.
    """
    starts: dict[str, dict[str, int]] = defaultdict(dict)
    for position, node in enumerate(graph.nodes):
        path = node.target if node.op == "call_module" else node.meta.get("module", "")
        for match in re.finditer(r"(?:^|\.)\d+(?=\.|$)", str(path)):
            owner, entered = str(path)[: match.start()], str(path)[: match.end()]
            starts[owner].setdefault(entered, position)
    yield from (sorted(set(entered.values())) for entered in starts.values())


def state_of(module: fx.GraphModule, node: fx.Node) -> tuple[Tensor, ...]:
    """Return the parameters and buffers that a node reads by itself, not from other nodes."""
    path = called_path(node)
    if path is not None:
        called = module.get_submodule(path)
        return (*called.parameters(), *called.buffers())
    if node.op == "get_attr":
        return tensor_leaves(attrgetter(str(node.target))(module))
    return ()


class _Read(NamedTuple):
    """Where a parameter is read: a node, and the parameter's number in the node's state."""

    position: int
    number: int


@dataclass(frozen=True)
class _BlockComparison:
    """Compares blocks of a graph's nodes."""

    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]

    def longest(self, starts: Sequence[int]) -> Repetition | None:
        """Return the longest repetition whose blocks begin at some of `starts`, if there is one."""
        best: Repetition | None = None
        first = 0
        while first < len(starts) - 1:
            count = self._count_from(starts, first)
            found = Repetition(starts[first], starts[first + 1] - starts[first], count)
            # One further: what begins irregularly, as a first layer that makes a mask, may go on
            # regularly.
            if count == 1 or not self._is_closed(found):
                first += 1
                continue
            if best is None or count > best.count:
                best = found
            first += count
        return best

    def _count_from(self, starts: Sequence[int], first: int) -> int:
        """Return how many blocks from `starts[first]` on are of one length and equal."""
        period, count = starts[first + 1] - starts[first], 1
        for before, start in pairwise(starts[first:]):
            end = start + period
            if start - before != period or end > len(self.nodes):
                break
            if not all(self._is_alike(position, period) for position in range(start, end)):
                break
            count += 1
        return count

    def _is_alike(self, position: int, period: int) -> bool:
        """Return whether a node does what the one a period before it does, as seen from there."""
        node, other = self.nodes[position], self.nodes[position - period]
        if self._labels[position] != self._labels[position - period]:
            return False
        # Blocks of 3 nodes from position 1 on: node 5 reads 4 and the mask at 0, and node 2, a
        # period before it, reads 1 and 0. The differences are 3 and 0: what lies in the block
        # before, and what all read.
        pairs = zip(self._sources[position], self._sources[position - period], strict=True)
        # The other parts of a block, or of what all blocks read.
        if any(source - earlier not in (0, period) for source, earlier in pairs):
            return False
        return node.op != "call_module" or self._have_same_settings(node, other)

    def _is_closed(self, blocks: Repetition) -> bool:
        """Return whether the blocks are tied to other nodes and to parameters in a regular way."""
        positions = range(blocks.start + blocks.period, len(self.nodes))
        return self._has_regular_state(blocks) and all(
            self._reads_regularly(position, blocks) for position in positions
        )

    def _reads_regularly(self, position: int, blocks: Repetition) -> bool:
        """Return whether a node after block 0 reads what a node of a regular block may read."""
        block, alike = blocks.block_of(position), self._sources[position - blocks.period]
        for index, source in enumerate(self._sources[position]):
            read = blocks.block_of(source)
            if block == blocks.count:
                is_regular = read in (-1, block - 1, block)
            elif read == -1:
                is_regular = source == alike[index]
            else:
                is_regular = block - read <= 1
            if not is_regular:
                return False
        return True

    def _has_regular_state(self, blocks: Repetition) -> bool:
        """Return whether all blocks read parameters alike: each its own, or all the same."""
        own: list[set[tuple[_Read, ...]]] = [set() for _ in range(blocks.count)]
        for reads in self._reads.values():
            by_block: dict[int, list[_Read]] = defaultdict(list)
            for read in reads:
                block = blocks.block_of(read.position)
                offset = (read.position - blocks.start) % blocks.period
                by_block[block].append(_Read(offset, read.number))
            inside = {block: tuple(at) for block, at in by_block.items() if 0 <= block < len(own)}
            # A weight of one layer is read by one block, at some offset. A table of positions
            # that all layers share is read by all, at one offset. An embedding that one block and
            # the head read is neither.
            is_shared = len(set(inside.values())) == 1 and len(inside) == len(own)
            if inside and len(by_block) > 1 and not is_shared:
                return False
            for block, at in inside.items():
                own[block].add(at)
        return all(each == own[0] for each in own)

    @cached_property
    def _positions(self) -> dict[fx.Node, int]:
        return {node: position for position, node in enumerate(self.nodes)}

    @cached_property
    def _sources(self) -> list[list[int]]:
        """The positions of the nodes that each node reads, in the order of its arguments."""
        sources: list[list[int]] = []
        for node in self.nodes:
            read: list[fx.Node] = []
            fx.map_arg((node.args, node.kwargs), read.append)
            sources.append([self._positions[each] for each in read])
        return sources

    @cached_property
    def _labels(self) -> list[int]:
        """A number for each node: nodes that do the same with equal arguments have the same one."""
        numbers: dict[Any, int] = {}
        return [numbers.setdefault(self._label(node), len(numbers)) for node in self.nodes]

    def _label(self, node: fx.Node) -> tuple[Any, ...]:
        values, meta = node.meta.get("val"), node.meta
        if values is None or meta.get("hook") or meta.get("call_number") is not None:
            # Nothing is known of it that could be compared.
            return (id(node),)
        return (
            node.op,
            None if node.op in ("call_module", "get_attr") else node.target,
            # `add(x, y, alpha=2)` is "(·, ·), {alpha: 2}" in each block; where x and y come from
            # is compared apart.
            repr(fx.map_arg((node.args, node.kwargs), lambda _: _SOURCE)),
            repr(meta.get("autograd_context")),
            tuple(map(_layout, tensor_leaves(values))),
            tuple(map(_layout, state_of(self.module, node))),
            bool(meta.get("random")),
            len(meta.get("mutates") or ()),
        )

    @cached_property
    def _reads(self) -> dict[int, list[_Read]]:
        """Where each parameter and buffer is read, by its id."""
        reads: dict[int, list[_Read]] = defaultdict(list)
        for position, node in enumerate(self.nodes):
            for number, value in enumerate(state_of(self.module, node)):
                reads[id(value)].append(_Read(position, number))
        return reads

    def _have_same_settings(self, left: fx.Node, right: fx.Node) -> bool:
        """Return whether two modules have the same classes and attributes, tensors apart."""
        parts = [
            list(self.module.get_submodule(str(each.target)).modules()) for each in (left, right)
        ]
        return len(parts[0]) == len(parts[1]) and all(map(_is_same_module, *parts))


def _is_same_module(left: nn.Module, right: nn.Module) -> bool:
    if left is right:
        return True
    mine, others = vars(left), vars(right)
    return (
        type(left) is type(right)
        and mine.keys() == others.keys()
        and all(list(mine[table]) == list(others[table]) for table in REGISTERED_TABLES)
        # Hooks are in none of the tables above, and a module with one is like no other.
        and not any(mine[name] for name in _INTERNAL if name.endswith("_hooks"))
        and not any(others[name] for name in _INTERNAL if name.endswith("_hooks"))
        and all(is_same_value(mine[name], others[name]) for name in mine.keys() - _INTERNAL)
    )


def _layout(value: Tensor) -> tuple[Any, ...]:
    return (
        tuple(value.shape),
        tuple(value.stride()),
        value.storage_offset(),
        value.dtype,
        value.requires_grad,
        isinstance(value, nn.Parameter),
    )
