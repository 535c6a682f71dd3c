"""What one stage holds: its nodes followed through a forward and a backward. Part of the memory model, see memory.py.

forward     a storage lives from the node that makes it to its last reader; what a backward saves, and what
            later stages read, lives on: it is `kept`
backward    nodes run from the last to the first. What was saved goes with the first node that saved it, outputs
            at the end. A gradient lives from the node that makes it to the one that lets it go, or to the end if an
            earlier stage does; that of a parameter from its last reader on. Nothing is added in place to what came
            from a later stage: the sum is new

A region is computed again: what its nodes save lives only from there on. Kept are what it reads, and what is saved
outside; when the backward comes to its last node, its forward runs once more, up to the last tensor that it saves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import NamedTuple

from pipecompile.ir.allocator import ALLOCATORS, ZERO, Amount
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import Node, Parameter, Tensor
from pipecompile.ir.lives import GradientLife, Lives, Storage
from pipecompile.ir.optimizer import optimizer_bytes
from pipecompile.ir.tape import Held, Tape

__all__ = ["footprint_of", "tape_of"]

SCRATCH_MARGIN = Fraction(1, 10)  # by which a bound takes the scratch of kernels to be larger than expected
NO_SUMS: Mapping[int, int] = {}


def footprint_of(
    lives: Lives, before: Iterable[str], nodes: Iterable[str], regions: Iterable[Iterable[str]] = ()
) -> Footprint:
    """What the stage made of `nodes` holds; the nodes `before` it are in earlier stages, all others in later.

    `regions` are runs of its nodes that are computed again; none of them under a split backward.
    """
    places = sorted(map(lives.place.__getitem__, nodes))
    again = [sorted(map(lives.place.__getitem__, region)) for region in regions]
    return _Stage(lives, {lives.place[name] for name in before}, places, again).footprint()


def tape_of(lives: Lives, before: Iterable[str], nodes: Iterable[str], *, summed: bool) -> Tape:
    """The same stage for a choice of regions: in the first backward of a step, or with gradients `summed` before."""
    places = sorted(map(lives.place.__getitem__, nodes))
    return _Stage(lives, {lives.place[name] for name in before}, places, ()).tape(summed=summed)


class _Change(NamedTuple):
    """At the node of this place a storage of so many bytes begins to live, or ends."""

    place: int
    bytes: int
    begins: bool


class _Made(NamedTuple):
    """A storage that the node of this place makes.

    `holders` are the places whose backwards need what the forward kept, in order: savers outside regions, and the first
    nodes of regions that read it. `again` are those of its own region's nodes that save what is computed again.
    """

    place: int
    storage: Storage
    holders: tuple[int, ...]
    again: tuple[int, ...]


class _Level(NamedTuple):
    """How sizes are counted, as expected or for a bound: the scratch of kernels times a factor, and storages."""

    scratch: Fraction | int
    size_of: Callable[[int], int]


class _Entry(NamedTuple):
    """A region computed again: the most that lives meanwhile, and what lives when it is done."""

    peak: int
    left: int


NO_ENTRY = _Entry(0, 0)
NO_ENTRIES: Mapping[int, _Entry] = {}


class _Stage:
    """One stage: its nodes by place, in order."""

    def __init__(self, lives: Lives, before: set[int], nodes: Sequence[int], regions: Sequence[Sequence[int]]) -> None:
        self.lives, self.graph = lives, lives.graph
        self.before, self.nodes, self.inside = before, nodes, set(nodes)
        self.regions = regions
        self.region = {place: index for index, region in enumerate(regions) for place in region}
        self.own = [self.graph.nodes[place] for place in nodes]
        self.allocator = ALLOCATORS[lives.graph.memory]
        self.made = [self._made(place, each) for place in nodes for each in lives.storages.get(place, ())]
        self.arriving = [(t, readers) for t, producer, readers in lives.tensors if self._arrives(producer, readers)]

    def _is_later(self, place: int) -> bool:
        return place not in self.inside and place not in self.before

    def _arrives(self, producer: int, readers: Sequence[int]) -> bool:
        return producer in self.before and any(reader not in self.before for reader in readers)

    def _leaves(self, producer: int, readers: Sequence[int]) -> bool:
        return not self._is_later(producer) and any(map(self._is_later, readers))

    def _is_sent(self, storage: Storage) -> bool:
        return any(map(self._is_later, storage.readers))

    def _made(self, place: int, storage: Storage) -> _Made:
        """Where a storage that is made at `place` is needed again."""
        savers, home = [saver for saver in storage.savers if saver in self.inside], self.region.get(place)
        users = {self.region[user] for user in (*storage.readers, *savers) if user in self.region} - {home}
        holders = [saver for saver in savers if saver not in self.region]
        holders += [self.regions[index][0] for index in users]
        again = [saver for saver in savers if home is not None and self.region.get(saver) == home]
        return _Made(place, storage, tuple(sorted(holders)), tuple(again))

    def _is_kept(self, made: _Made) -> bool:
        return bool(made.holders) or self._is_sent(made.storage)

    @cached_property
    def _readers(self) -> dict[str, list[int]]:
        """The nodes of the stage that read each parameter."""
        found: dict[str, list[int]] = defaultdict(list)
        for place in self.nodes:
            for name in self.graph.nodes[place].parameters:
                found[name].append(place)
        return found

    @cached_property
    def _trained(self) -> list[tuple[Parameter, list[int]]]:
        """The parameters that get a gradient, with the nodes of the stage that read them."""
        pairs = [(self.graph.parameter_by_name[name], places) for name, places in self._readers.items()]
        return [(parameter, places) for parameter, places in pairs if parameter.trainable]

    @cached_property
    def _captured(self) -> list[GradientLife]:
        """What flows into nodes with parameters: there the second half of a split backward begins."""
        read = {place for _, places in self._trained for place in places}
        return [gradient for gradient in self._own_gradients if gradient.last in read and not gradient.summed]

    @cached_property
    def _own_gradients(self) -> list[GradientLife]:
        return [gradient for place in self.nodes for gradient in self.lives.gradients.get(place, ())]

    @cached_property
    def _read(self) -> list[tuple[Tensor, int]]:
        """What arrives and is read here, with the place where its gradient is complete."""
        places = [(tensor, self.inside.intersection(readers)) for tensor, readers in self.arriving]
        return [(tensor, min(inside)) for tensor, inside in places if inside]

    def footprint(self) -> Footprint:
        """Everything about the stage."""
        amount = self.allocator.amount
        anonymous = [node.parameter_bytes for node in self.own if not node.parameters and node.parameter_bytes]
        trained = [parameter for parameter, _ in self._trained]
        state, scratch = optimizer_bytes(
            trained,
            self.lives.optimizer,
            master_weights=self.lives.master_weights,
            lists=self.allocator.steps_over_lists,
        )
        making, adding = list(self._made_gradients()), list(self._added_gradients())
        backward = [*self._freed(), *self._flowing(), *self._copies()]
        whole = [node.backward_peak_bytes for node in self.own]
        second = [*self._freed(half=True), *self._released()] if self._splits else backward
        rises = list(self._weight_rises()) if self._splits else whole
        sums = NO_SUMS if self._splits else self._sums
        return Footprint(
            parameters=amount([*(self.graph.parameter_by_name[name].bytes for name in self._readers), *anonymous]),
            gradients=amount([*(parameter.bytes for parameter in trained), *anonymous]),
            optimizer=amount(state),
            optimizer_scratch=amount([scratch]),
            inputs=amount(node.input_bytes for node in self.own),
            received=amount(tensor.bytes for tensor, _ in self.arriving),
            received_gradients=amount(t.gradient_bytes for t, p, r in self.lives.tensors if self._leaves(p, r)),
            kept=amount(made.storage.bytes for made in self.made if self._is_kept(made)),
            outputs=amount(made.storage.bytes for made in self.made if self._is_sent(made.storage)),
            returned=amount(tensor.gradient_bytes for tensor, _ in self._read),
            relayed=amount(t.gradient_bytes for t, readers in self.arriving if self.inside.isdisjoint(readers)),
            dropped=amount(made.storage.bytes for made in self.made if self._is_dropped(made)),
            between=amount(gradient.bytes for gradient in self._captured) if self._splits else ZERO,
            forward_peak=self._peak(self._forward(), [n.forward_peak_bytes for n in self.own], forward=True),
            first_backward_peak=self._peak([*backward, *making], whole, self._sums, again=True),
            backward_peak=self._peak([*backward, *adding], whole, self._sums, again=True),
            input_peak=self._input_peak() if self._splits else ZERO,
            first_weight_peak=self._peak([*second, *making], rises, sums),
            weight_peak=self._peak([*second, *adding], rises, sums),
        )

    def tape(self, *, summed: bool) -> Tape:
        """By position, as a bound counts."""
        level = _Level(1 + SCRATCH_MARGIN, self.allocator.rounded)
        position = {place: index for index, place in enumerate(self.nodes)}
        sums_of_parameters = self._added_gradients() if summed else self._made_gradients()
        flowing, before, after = self._gradient_levels([*self._flowing(), *sums_of_parameters], level)
        padding = [sum(level.size_of(s.bytes) - s.bytes for s in self.lives.storages.get(p, ())) for p in self.nodes]
        return Tape(
            ns=tuple(node.forward_ns for node in self.own),
            packs=tuple(node.packs for node in self.own),
            forward=tuple(
                self._needed(node, node.forward_peak_bytes, level) + more
                for node, more in zip(self.own, padding, strict=True)
            ),
            flowing=flowing,
            before=before,
            after=after,
            held=tuple(self._held(made, position, level) for made in self.made),
            boundaries=self._boundaries(position),
            fixed=frozenset(position[place] for place in self.nodes if not self.graph.nodes[place].again),
        )

    def _held(self, made: _Made, position: Mapping[int, int], level: _Level) -> Held:
        storage = made.storage
        return Held(
            level.size_of(storage.bytes),
            position[made.place],
            tuple(position[place] for place in storage.readers if place in position),
            tuple(position[place] for place in storage.savers if place in position),
            self._is_sent(storage),
        )

    def _gradient_levels(self, changes: Sequence[_Change], level: _Level) -> Iterator[tuple[int, ...]]:
        """What a backward has of gradients when a node's begins, what it needs then, and what lives when it is done."""
        found = []
        now = 0
        for place, node in reversed(list(zip(self.nodes, self.own, strict=True))):
            here = [(level.size_of(size), size, begins) for at, size, begins in changes if at == place]
            padding = sum(counted - size for counted, size, begins in here if begins)
            needed = self._needed(node, node.backward_peak_bytes, level) + padding
            done = now + sum(counted if begins else -counted for counted, _, begins in here)
            found.append((now, now + needed, done + level.size_of(self._sums.get(place, 0))))
            now = done
        return zip(*reversed(found), strict=True)

    def _boundaries(self, position: Mapping[int, int]) -> tuple[int, ...]:
        """Where nothing that belongs together lies on both sides."""
        named = {self.graph.nodes[place].name: index for place, index in position.items()}
        members = ([named[name] for name in names if name in named] for names in self.graph.together)
        inside = {index for places in members if places for index in range(min(places) + 1, max(places) + 1)}
        return tuple(index for index in range(len(self.nodes) + 1) if index not in inside)

    @staticmethod
    def _needed(node: Node, rise: int, level: _Level) -> int:
        """What a node that makes `rise` live takes with the scratch of its kernels: without it, it does not run."""
        return rise + ceil(level.scratch * node.workspace_bytes) if rise else 0

    @property
    def _splits(self) -> bool:
        """Whether a backward has two halves: a first stage has no gradients of inputs to compute."""
        return any(tensor.gradient_bytes for tensor, _ in self.arriving)

    def _forward(self) -> Iterator[_Change]:
        for made in self.made:
            yield _Change(made.place, made.storage.bytes, begins=True)
            if not self._is_kept(made):
                yield _Change(max(made.storage.readers, default=made.place), made.storage.bytes, begins=False)

    def _is_dropped(self, made: _Made) -> bool:
        """Whether only nodes behind the last one with parameters save it: no second half comes by there."""
        last = max((places[-1] for _, places in self._trained), default=-1)
        return self._splits and bool(made.holders) and made.holders[0] > last and not self._is_sent(made.storage)

    def _freed(self, *, half: bool = False) -> Iterator[_Change]:
        """What the backward, or its second half, lets go of what was kept; outputs stay until it ends."""
        for made in self.made:
            if made.holders and not self._is_sent(made.storage) and not (half and self._is_dropped(made)):
                yield _Change(made.holders[0], made.storage.bytes, begins=False)

    def _copies(self) -> Iterator[_Change]:
        """What was computed again is let go by the first node of its region that saved it."""
        for made in self.made:
            if made.again:
                yield _Change(made.again[0], made.storage.bytes, begins=False)

    def _entries(self, level: _Level) -> dict[int, _Entry]:
        """The regions by the node whose backward computes them again: the last one that saves anything."""
        saving = [[place for place in region if self._packs(place) != "never"] for region in self.regions]
        return {
            places[-1]: self._entry(region, places[-1], level)
            for region, places in zip(self.regions, saving, strict=True)
            if places
        }

    def _entry(self, region: Sequence[int], last: int, level: _Level) -> _Entry:
        """The forward once more, until node `last` has saved what it saves: that may be before its kernels run."""
        nodes = [place for place in region if place < last or (place == last and self._packs(last) == "after")]
        again = [made for made in self.made if made.place in set(nodes)]
        changes = [change for made in again for change in self._once_more(made, set(region))]
        peak = self._highest(nodes, changes, [self.graph.nodes[place].forward_peak_bytes for place in nodes], level)
        return _Entry(peak, sum(level.size_of(made.storage.bytes) for made in again if made.again))

    def _once_more(self, made: _Made, region: set[int]) -> Iterator[_Change]:
        """A storage while its region is computed again: what the region saves or returns lives to the end."""
        yield _Change(made.place, made.storage.bytes, begins=True)
        if not made.again and region.issuperset(made.storage.readers):
            yield _Change(max(made.storage.readers, default=made.place), made.storage.bytes, begins=False)

    def _packs(self, place: int) -> str:
        return self.graph.nodes[place].packs

    def _flowing(self, *, hold: bool = False) -> Iterator[_Change]:
        """Gradients of tensors; with `hold` those stay that flow into nodes with parameters."""
        held = {id(gradient) for gradient in self._captured} if hold else set()
        returned = [(place, tensor.gradient_bytes) for tensor, place in self._read]
        for gradient in self._own_gradients:
            yield _Change(gradient.producer, gradient.bytes, begins=True)
            made = gradient.producer, gradient.bytes
            if gradient.last in self.inside:
                if id(gradient) not in held:
                    yield _Change(gradient.last, gradient.bytes, begins=False)
            elif made in returned:  # it is the gradient of an input
                returned.remove(made)
            else:
                last = min(self.inside.intersection(gradient.readers), default=gradient.producer)
                yield _Change(last, gradient.bytes, begins=False)
        for place, size in returned:  # it lies in what others hold, or not in order: autograd copies it
            yield _Change(place, size, begins=True)

    def _made_gradients(self) -> Iterator[_Change]:
        """In the first backward of a step the gradients of parameters begin to live."""
        for parameter, places in self._trained:
            yield _Change(places[-1], parameter.bytes, begins=True)
        for place, node in zip(self.nodes, self.own, strict=True):
            if not node.parameters:
                yield _Change(place, node.parameter_bytes, begins=True)

    def _added_gradients(self) -> Iterator[_Change]:
        """Later they are made, added and let go."""
        for parameter, places in self._trained:
            if len(places) > 1:
                yield _Change(places[-1], parameter.bytes, begins=True)
                yield _Change(places[0], parameter.bytes, begins=False)

    def _released(self) -> Iterator[_Change]:
        """What the first half held for the second."""
        for gradient in self._captured:
            yield _Change(gradient.last, gradient.bytes, begins=False)

    @cached_property
    def _sums(self) -> dict[int, int]:
        """By node what lives beside the new sums that are made when its backward is done: the last summand."""
        sums: dict[int, int] = defaultdict(int)
        for gradient in self._own_gradients:
            if gradient.sum and (gradient.origin is None or self._is_later(gradient.origin)):
                sums[gradient.producer] += gradient.bytes
        return sums

    def _input_rises(self) -> Iterator[int]:
        """The first half of a backward makes no gradients of parameters."""
        for node in self.own:
            parameters = (self.graph.parameter_by_name[name] for name in node.parameters)
            yield max(0, node.backward_peak_bytes - sum(p.bytes for p in parameters if p.trainable))

    def _weight_rises(self) -> Iterator[int]:
        """The second half runs nodes with parameters alone, and makes no other gradients."""
        others: dict[int, int] = defaultdict(int)
        for gradient in self._own_gradients:
            others[gradient.producer] += 0 if gradient.sum else gradient.bytes
        read = {place for _, places in self._trained for place in places}
        for place, node in zip(self.nodes, self.own, strict=True):
            yield max(0, node.backward_peak_bytes - others[place]) if place in read else 0

    def _input_peak(self) -> Amount:
        return self._peak(self._flowing(hold=True), list(self._input_rises()), self._sums)

    def _peak(
        self,
        changes: Iterable[_Change],
        rises: Sequence[int],
        sums: Mapping[int, int] = NO_SUMS,
        *,
        forward: bool = False,
        again: bool = False,
    ) -> Amount:
        """The most that lives above what lived before; `rises` is in the order of the nodes, `sums` by node.

        A forward runs them in this order; a backward the other way, and may compute regions `again`.
        """
        changes = list(changes)
        nodes, rises = (self.nodes, rises) if forward else (self.nodes[::-1], rises[::-1])
        expected, bound = (
            self._highest(nodes, changes, rises, level, sums, self._entries(level) if again else NO_ENTRIES)
            for level in (_Level(1, lambda size: size), _Level(1 + SCRATCH_MARGIN, self.allocator.rounded))
        )
        return Amount(expected=expected, bound=bound)

    def _highest(
        self,
        nodes: Sequence[int],
        changes: Iterable[_Change],
        rises: Sequence[int],
        level: _Level,
        sums: Mapping[int, int] = NO_SUMS,
        entries: Mapping[int, _Entry] = NO_ENTRIES,
    ) -> int:
        """What begins in a node is part of its rise, to which the scratch of its kernels comes; sums are made last."""
        after: dict[int, int] = defaultdict(int)
        padding: dict[int, int] = defaultdict(int)
        for place, size, begins in changes:
            counted = level.size_of(size)
            after[place] += counted if begins else -counted
            padding[place] += counted - size if begins else 0
        now = highest = 0
        for place, rise in zip(nodes, rises, strict=True):
            entry = entries.get(place, NO_ENTRY)
            highest = max(highest, now + entry.peak)
            now += entry.left
            needed = self._needed(self.graph.nodes[place], rise, level)
            highest = max(highest, now + needed + padding[place])
            now += after[place]
            highest = max(highest, now + level.size_of(sums.get(place, 0)))
        return highest
