"""Folding: a step is observed with four blocks in the place of many that are equal.

    the graph           before | 0 | 1 | 2 | … | n − 3 | n − 2 | n − 1 | after
    folded              before | 0 | 1 |                 n − 2 | n − 1 | after

Blocks 2 … n − 3 are then what block 1 is, seen from their place. That this holds is checked: block
1, moved to the place of block n − 2, must be what was observed there, in all that is known of it.
What comes before the blocks and after them may refer to the first and to the last one alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec
from torch import fx

from pipecompile.cost_models.protocol import CallCost
from pipecompile.graph.repetition import Repetition, repetitions, state_of
from pipecompile.ir.graph import Content, GradientStorage
from pipecompile.profiling.observation import NodeObservation, StepObservation
from pipecompile.profiling.workload import Workload

__all__ = ["Fold", "IrregularError", "folds_of"]

# With three, the block that is copied would lie between the first and the
# last one, and there would be no other in the middle to compare it with.
KEPT = 4  # blocks: the first, the last, and two between them that are compared
SECOND = 1  # the block that is copied


class IrregularError(Exception):
    """Blocks that looked alike differ in what a step shows of them."""


def folds_of(workload: Workload) -> list[Fold]:
    """Return the folds of a workload, each of what the one before it leaves."""
    folds: list[Fold] = []
    while True:
        found = repetitions(workload.module, workload.graph)
        long = [blocks for blocks in found if blocks.count > KEPT]
        if not long:
            return folds
        # An encoder and a decoder are two repetitions: the
        # second one is folded in what the first leaves.
        folds.append(Fold(workload, long[0]))
        workload = folds[-1].folded


@dataclass(frozen=True)
class Fold:
    """A workload whose graph repeats `blocks`. Positions are those of its nodes."""

    workload: Workload
    blocks: Repetition

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of the whole graph."""
        return tuple(self.workload.graph.nodes)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each node, by its name."""
        return {node.name: position for position, node in enumerate(self.nodes)}

    @cached_property
    def folded(self) -> Workload:
        """The workload with the blocks that are kept."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}

        def copied(source: fx.Node) -> fx.Node:
            return copies[self.nodes[self.origin(self.positions[source.name])]]

        for position, node in enumerate(self.nodes):
            if self.origin(position) == position:
                copies[node] = graph.node_copy(node, copied)
        return replace(self.workload, graph=graph)

    def origin(self, position: int) -> int:
        """Return the position of the kept node that the node at `position` is, or is a copy of."""
        block = self.blocks.block_of(position)
        if SECOND < block < self.blocks.count - 2:
            return position - (block - SECOND) * self.blocks.period
        return position

    def unfolded(self, observation: StepObservation) -> StepObservation:
        """Return what a step of the whole workload shows, given what the folded one does.

        IrregularError if the blocks are not alike.
        """
        return _Unfolding(self, observation).observation()

    def unfolded_costs(self, costs: Mapping[str, CallCost]) -> dict[str, CallCost]:
        """Return the costs of all nodes, given those of the folded workload.

        IrregularError if the blocks do not cost the same.
        """
        blocks = self.blocks
        for offset in range(blocks.start, blocks.start + blocks.period):
            alike = (self.nodes[offset + n * blocks.period] for n in (SECOND, blocks.count - 2))
            if len({costs.get(node.name) for node in alike}) > 1:
                raise IrregularError
        return {
            node.name: costs[self.nodes[self.origin(position)].name]
            for position, node in enumerate(self.nodes)
            if node.op != "get_attr"
        }


@dataclass(frozen=True)
class _Shift:
    """The way of something that was observed in block `home` to the same place in block `to`."""

    blocks: Repetition
    home: int
    to: int

    def block(self, other: int) -> int:
        """Return which block `other`, of the observation, is as seen from the new place."""
        inside = range(self.blocks.count)
        if other not in inside:
            return other
        if self.home not in inside:
            if other not in (inside[0], inside[-1]):
                raise IrregularError
            return other
        # Of 10 blocks 0 1 8 9 are kept, and 1 and 8 are neighbours in the folded graph. What
        # block 1 shows of blocks 0 and 8 is, seen as block 4, about blocks 3 and 5. It may show
        # nothing of block 9: what that would be for a block in the middle, nobody can tell.
        distance = self._kept_index(other) - self._kept_index(self.home)
        if abs(distance) > 1:
            raise IrregularError
        return self.to + distance

    def position(self, other: int) -> int:
        """Return the position of what the node at `other` is as seen from the new place."""
        block = self.blocks.block_of(other)
        return other + (self.block(block) - block) * self.blocks.period

    def _kept_index(self, block: int) -> int:
        return block if block <= SECOND else block - self.blocks.count + KEPT


class _Stored(NamedTuple):
    """A storage: the position of the first node that has it, and its number among that one's."""

    position: int
    number: int


@dataclass(frozen=True)
class _Unfolding:
    """What was observed of a folded workload, to be seen as of the whole one."""

    fold: Fold
    seen: StepObservation

    def observation(self) -> StepObservation:
        """Return the whole observation; IrregularError if the blocks are not alike."""
        self._check_copied_block()
        fold, seen = self.fold, self.seen
        places = [(fold.origin(to), to) for to, node in enumerate(fold.nodes)]
        nodes = {
            fold.nodes[to].name: self._node(at, to)
            for at, to in places
            if fold.nodes[at].op != "get_attr"
        }
        storages = [each for at, _ in places for each in self._storages_at.get(at, ())]
        contents = {
            new: seen.contents[old] for new, old in enumerate(storages) if old in seen.contents
        }
        gradients = tuple(self._gradient(index, block) for index, block in self._moved_gradients)
        expanded = {}
        for at, to in places:
            reader = seen.expanded_by.get(fold.nodes[at].name)
            if reader is not None:
                expanded[fold.nodes[to].name] = self._name(reader, self._move(at, to))
        sizes = tuple(seen.storages[each] for each in storages)
        return StepObservation(nodes, sizes, contents, gradients, expanded)

    def _check_copied_block(self) -> None:
        """Raise IrregularError unless the block that is copied is what the last but one is."""
        blocks, last = self.fold.blocks, self.fold.blocks.count - 2
        for offset in range(blocks.period):
            at, to = (blocks.start + block * blocks.period + offset for block in (SECOND, last))
            is_read = self.fold.nodes[at].op == "get_attr"
            if not is_read and self._node(at, to) != self._node(to, to):
                raise IrregularError
            if self._described_storages(at) != self._described_storages(to):
                raise IrregularError
        second, other = (self._gradients_in.get(block, []) for block in (SECOND, last))
        if [self._gradient(each, last) for each in second] != [
            self._gradient(each, last) for each in other
        ]:
            raise IrregularError

    def _described_storages(self, position: int) -> list[tuple[int, Content | None]]:
        storages = self._storages_at.get(position, [])
        return [(self.seen.storages[each], self.seen.contents.get(each)) for each in storages]

    def _move(self, at: int, to: int) -> _Shift:
        blocks = self.fold.blocks
        return _Shift(blocks, blocks.block_of(at), blocks.block_of(to))

    def _name(self, name: str, move: _Shift) -> str:
        return self.fold.nodes[move.position(self.fold.positions[name])].name

    def _names(self, names: Iterable[str], move: _Shift) -> tuple[str, ...]:
        return tuple(self._name(name, move) for name in names)

    # Nodes

    def _node(self, at: int, to: int) -> NodeObservation:
        """Return what the node at `to` shows, given that it does what the one at `at` does."""
        node, move = self.seen.nodes[self.fold.nodes[at].name], self._move(at, to)
        parameters = self._parameter_names(move)

        def renamed(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(parameters.get(name, name) for name in names)

        return replace(
            node,
            storages=tuple(self._storage(each, move) for each in node.storages),
            saved=tuple(self._storage(each, move) for each in node.saved),
            parameters=renamed(node.parameters),
            view_gradients=renamed(node.view_gradients),
            gradients_by_input_backward=renamed(node.gradients_by_input_backward),
            sums_with=None if node.sums_with is None else self._name(node.sums_with, move),
            consumers_without_gradient=self._names(node.consumers_without_gradient, move),
        )

    def _parameter_names(self, move: _Shift) -> dict[str, str]:
        """Return, by the name of each parameter of the old block, that of the new block's."""
        if move.home == move.to:
            return {}
        if move not in self._renamings:
            pairs = zip(*map(self._parameters_of_block, (move.home, move.to)), strict=True)
            self._renamings[move] = dict(pairs)
        return self._renamings[move]

    def _parameters_of_block(self, block: int) -> list[str]:
        workload, blocks = self.fold.workload, self.fold.blocks
        start = blocks.start + block * blocks.period
        return [
            workload.names[id(value)]
            for node in self.fold.nodes[start : start + blocks.period]
            for value in state_of(workload.module, node)
            if id(value) in workload.names
        ]

    @cached_property
    def _renamings(self) -> dict[_Shift, dict[str, str]]:
        return {}

    # Storages belong to the first node that has them, and are numbered in the order of nodes.

    @cached_property
    def _stored(self) -> dict[int, _Stored]:
        """Where each storage is first; IrregularError if their numbers have another order."""
        stored: dict[int, _Stored] = {}
        # In the whole graph storages are numbered by counting them node by node, so
        # the observer must have met them in that order too; this is checked below.
        for name, node in self.seen.nodes.items():
            position = self.fold.positions[name]
            new = sorted({*node.storages, *node.saved} - stored.keys())
            stored |= {each: _Stored(position, number) for number, each in enumerate(new)}
        if sorted(stored) != list(stored):
            raise IrregularError
        return stored

    @cached_property
    def _storages_at(self) -> dict[int, list[int]]:
        """The storages that a node is the first to have, by its position."""
        storages: dict[int, list[int]] = defaultdict(list)
        for storage, stored in self._stored.items():
            storages[stored.position].append(storage)
        return dict(storages)

    @cached_property
    def _first_number(self) -> list[int]:
        """The number of the first storage of each node, by its position in the whole graph."""
        origins = map(self.fold.origin, range(len(self.fold.nodes)))
        counts = (len(self._storages_at.get(each, ())) for each in origins)
        return list(accumulate(counts, initial=0))

    def _storage(self, storage: int, move: _Shift) -> int:
        stored = self._stored[storage]
        return self._first_number[move.position(stored.position)] + stored.number

    # Gradients belong to the block of their producer, the last block first.

    @cached_property
    def _gradient_blocks(self) -> list[int]:
        """The block of each gradient; IrregularError if blocks do not follow one another."""
        positions = (self.fold.positions[each.producer] for each in self.seen.gradients)
        blocks = list(map(self.fold.blocks.block_of, positions))
        if sorted(blocks, reverse=True) != blocks:
            raise IrregularError
        return blocks

    @cached_property
    def _gradients_in(self) -> dict[int, list[int]]:
        """The gradients of each block, by their index."""
        gradients: dict[int, list[int]] = defaultdict(list)
        for index, block in enumerate(self._gradient_blocks):
            gradients[block].append(index)
        return dict(gradients)

    @cached_property
    def _moved_gradients(self) -> list[tuple[int, int]]:
        """Each gradient of the whole graph: its index in the observation, and its block."""
        count = self.fold.blocks.count
        return [
            (index, block)
            # A backward meets first what lies after all blocks
            # (`count`), and last what lies before (−1).
            for block in range(count, -2, -1)
            for index in self._gradients_in.get(self._origin_block(block), ())
        ]

    def _origin_block(self, block: int) -> int:
        return SECOND if SECOND < block < self.fold.blocks.count - 2 else block

    @cached_property
    def _gradient_numbers(self) -> dict[tuple[int, int], int]:
        return {moved: number for number, moved in enumerate(self._moved_gradients)}

    def _gradient(self, index: int, block: int) -> GradientStorage:
        """Return a gradient as one of `block`."""
        gradient, home = self.seen.gradients[index], self._gradient_blocks[index]
        move = _Shift(self.fold.blocks, home, block)
        return msgspec.structs.replace(
            gradient,
            producer=self._name(gradient.producer, move),
            last=self._name(gradient.last, move),
            readers=self._names(gradient.readers, move),
            captured_at=self._names(gradient.captured_at, move),
            edges=tuple(
                (self._name(source, move), self._name(reader, move))
                for source, reader in gradient.edges
            ),
            continues=self._continued(gradient.continues, move),
        )

    def _continued(self, index: int | None, move: _Shift) -> int | None:
        """Return the number of the gradient `index` as seen from the new place."""
        if index is None:
            return None
        home = self._gradient_blocks[index]
        block = move.block(home)
        # The index of the same gradient in the block that stands for that one.
        # Alike blocks have alike gradients in the same order:
        # the n-th of one is the n-th of the other.
        place = self._gradients_in[home].index(index)
        origin = self._gradients_in[self._origin_block(block)]
        if place >= len(origin):
            raise IrregularError
        return self._gradient_numbers[origin[place], block]
