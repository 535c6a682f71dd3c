"""The nodes of one stage: what they make and who needs it, what comes in and goes out, which gradients flow.

Part of the memory model, see memory.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from pipecompile.ir.allocator import ALLOCATORS
from pipecompile.ir.forms import Form, Run, forms_of
from pipecompile.ir.graph import Node, Parameter, Tensor
from pipecompile.ir.halves import Halves
from pipecompile.ir.lives import ORDERLY, GradientLife, Lives, Storage

__all__ = ["BOUND_SCRATCH", "Change", "Level", "Made", "Part"]

BOUND_SCRATCH = 1 + Fraction(1, 10)  # how much larger a bound takes the scratch of kernels to be


class Change(NamedTuple):
    """At the node of this place a storage of so many bytes begins to live, or ends."""

    place: int
    bytes: int
    begins: bool


class Made(NamedTuple):
    """A storage that the node of this place makes.

    `holders` are the places whose backwards need what the forward kept, in order: savers outside regions, and the first
    nodes of regions that read it and save anything (others are never computed again). `copies` are what regions that it
    lies in make of it and hold, from the outermost on. `forms` stand for it where others save it. Where nobody holds
    it, `last` is where a forward lets it go.
    """

    place: int
    storage: Storage
    holders: tuple[int, ...]
    copies: tuple[Copy, ...]
    forms: tuple[Form, ...]
    last: int


class Copy(NamedTuple):
    """What a region (by index) makes anew and holds until the backward of a node is done.

    If `early`, only until that backward has computed again a region within, which reads it.
    """

    region: int
    place: int
    early: bool


class Level(NamedTuple):
    """How sizes are counted, as expected or for a bound: the scratch of kernels times a factor, and storages."""

    scratch: Fraction | int
    size_of: Callable[[int], int]


class Part:
    """One stage as a part of the graph: its nodes by place, in order; `regions` and `runs` of them lie apart."""

    def __init__(
        self,
        lives: Lives,
        before: set[int],
        nodes: Sequence[int],
        regions: Sequence[Sequence[int]] = (),
        runs: Sequence[Run] = (),
    ) -> None:
        self.lives, self.graph = lives, lives.graph
        self.before, self.nodes, self.inside = before, nodes, set(nodes)
        self.regions = regions
        self.around = _around(nodes, regions)
        self.run = {place: run for run in runs for place in run.places}
        self.own = [self.graph.nodes[place] for place in nodes]
        self.allocator = ALLOCATORS[lives.graph.memory]
        self.made = [self._made(place, each) for place in nodes for each in lives.storages.get(place, ())]
        self.arriving = list(lives.crossing(before))  # to be read here or handed on

    def is_later(self, place: int) -> bool:
        """Whether the node of this place lies in a later stage."""
        return place not in self.inside and place not in self.before

    @property
    def leaving(self) -> Iterator[Tensor]:
        """What a later stage reads of this stage or of an earlier one."""
        return (tensor for tensor, _ in self.lives.crossing(self.before | self.inside))

    def is_sent(self, storage: Storage) -> bool:
        """Whether a message to a later stage is it itself."""
        return any(giver in self.inside and self.is_later(reader) for giver, reader in storage.takers)

    def is_copied(self, storage: Storage) -> bool:
        """Whether later stages get copies of its views only."""
        return any(map(self.is_later, storage.readers)) and not self.is_sent(storage)

    def _made(self, place: int, storage: Storage) -> Made:
        """Where a storage that is made at `place` is needed again."""
        savers, home = [saver for saver in storage.savers if saver in self.inside], self.around.get(place, ())[:1]
        users = {self.around[user][0] for user in (*storage.readers, *savers) if self.around.get(user)} - {*home}
        forms, plain = forms_of(storage, [s for s in savers if not self.around[s]], self.run, self.graph.memory)
        holders = [*plain, *(self.regions[index][0] for index in users if self.called(index) is not None)]
        last = max(self.last_read(place, storage), *(form.made for form in forms if form.waits), place)
        if any(map(self.is_later, storage.readers)):
            last = self.nodes[-1]  # then copies are made for them
        return Made(place, storage, tuple(sorted(holders)), tuple(self._copied(place, storage)), forms, last)

    @cached_property
    def spread(self) -> list[Made]:
        """What arrives dense and is brought into its layout again, with gaps, before the first node."""
        return [self._made(-1, self._spread(tensor)) for tensor, _ in self.read if tensor.spread_bytes]

    def _spread(self, tensor: Tensor) -> Storage:
        """Its copy, for those that read it or a view that this stage takes of it."""
        readers = set(map(self.lives.place.__getitem__, tensor.consumers))
        takers: list[tuple[int, int]] = []
        for place in self.nodes:
            view = self.lives.values.get(self.graph.nodes[place].name) if place in readers else None
            if view is not None and view.storage == tensor.storage is not None:
                places = set(map(self.lives.place.__getitem__, view.consumers))
                readers |= places
                takers += [(place, reader) for reader in places if view.dense]
        savers = (place for place in readers & self.inside if tensor.storage in self.graph.nodes[place].saved)
        return Storage(tensor.spread_bytes, tuple(sorted(readers)), tuple(sorted(savers)), takers=tuple(takers))

    @cached_property
    def handed_on(self) -> list[Tensor]:
        """What arrives and is sent on as it came."""
        copied = {tensor.producer for tensor in self.copied}
        arriving = {tensor.producer for tensor, _ in self.arriving}
        return [t for t in self.leaving if t.producer in arriving - copied]

    @cached_property
    def copied(self) -> list[Tensor]:
        """What is sent as a copy."""
        read = {tensor.producer for tensor, _ in self.read}
        return [
            tensor
            for tensor in self.leaving
            if (not tensor.dense and self.lives.place[tensor.producer] in self.inside)
            or (tensor.spread_bytes and tensor.gradient_bytes and tensor.producer in read)
        ]

    def _copied(self, place: int, storage: Storage) -> Iterator[Copy]:
        """What each region around `place` holds of the storage: for its own nodes, and for regions within it."""
        home = self.around.get(place, ())
        users = {user for user in (*storage.readers, *storage.savers) if user in self.inside} if home else set()
        for depth in range(1, len(home) + 1):
            beside = [u for u in users if self._meet(home, self.around[u]) == depth]
            ends = [(user, False) for user in beside if user in storage.savers]
            inner = {region for user in beside for region in self.around[user][depth:]}
            ends += [(at, True) for at in map(self.called, inner) if at is not None]
            if ends:
                yield Copy(home[depth - 1], *min(ends))

    def last_read(self, place: int, storage: Storage) -> int:
        """Until when a forward has what is made at `place` and not held.

        A region, and a run of nodes that save by policies, has what it is given until it ends.
        """
        home = self.around.get(place, ())
        paths = [self.around.get(reader, ()) for reader in storage.readers]
        inner = [region for path in paths for region in path[self._meet(home, path) :]]
        runs = [self.run[reader] for reader in storage.readers if reader in self.run]
        ends = [run.places[-1] for run in runs if run is not self.run.get(place)]
        return max([*storage.readers, *(self.regions[region][-1] for region in inner), *ends], default=place)

    @staticmethod
    def _meet(one: tuple[int, ...], other: tuple[int, ...]) -> int:
        """How many regions are around both."""
        return sum(a == b for a, b in zip(one, other, strict=False))

    def called(self, region: int) -> int | None:
        """The node in whose backward a region is computed again: its last one that saves anything."""
        return max((place for place in self.regions[region] if self._packs(place) != "never"), default=None)

    def run_again(self, region: int) -> list[int]:
        """The nodes that are computed again: until there is all that is held for the region.

        The last of that is what a node of its own saves, or what a region within it reads, which then does not begin.
        """
        nodes = self.regions[region]
        own = [place for place in nodes if self.around[place][-1] == region and self._packs(place) != "never"]
        within = [self.regions[index][0] for index in self._within(region)]
        last = max([*own, *within], default=-1)
        runs_last = last in own and last not in within and self._packs(last) == "after"
        return [place for place in nodes if place < last or (runs_last and place == last)]

    def _within(self, region: int) -> set[int]:
        """The regions directly within a region."""
        paths = (self.around[place] for place in self.regions[region])
        return {path[path.index(region) + 1] for path in paths if path[-1] != region}

    def written(self, places: Iterable[int]) -> Iterator[int]:
        """The sizes of copies by which these nodes can be computed again with buffers as they were."""
        return (size for place in places for size in self.graph.nodes[place].written)

    def _packs(self, place: int) -> str:
        return self.graph.nodes[place].packs

    def is_kept(self, made: Made) -> bool:
        """Whether it lives on after the forward."""
        return bool(made.holders) or self.is_sent(made.storage)

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The nodes of the stage that read each parameter."""
        found: dict[str, list[int]] = defaultdict(list)
        for place in self.nodes:
            for name in self.graph.nodes[place].parameters:
                found[name].append(place)
        return found

    @cached_property
    def trained(self) -> list[tuple[Parameter, list[int]]]:
        """The parameters that get a gradient, with the nodes of the stage that read them."""
        pairs = [(self.graph.parameter_by_name[name], places) for name, places in self.readers.items()]
        return [(parameter, places) for parameter, places in pairs if parameter.trainable]

    @cached_property
    def captured(self) -> list[tuple[GradientLife, int]]:
        """What the first half of a split backward holds, each with the node where the second lets it go.

        Those that are returned lie in the message.
        """
        returned = set(map(id, self.homes(hold=True)))
        found = [(each, places) for each, places in self._captured if id(each) not in returned]
        return [(each, min(map(self.halves.end_of_second, places))) for each, places in found]

    @property
    def lent(self) -> list[GradientLife]:
        """What the first half holds and returns."""
        returned = set(map(id, self.homes(hold=True)))
        return [each for each, _ in self._captured if id(each) in returned]

    @cached_property
    def _captured(self) -> list[tuple[GradientLife, set[int]]]:
        pairs = ((each, self.halves.captured_at(each)) for each in self.own_gradients)
        return [(each, places) for each, places in pairs if places]

    @cached_property
    def retained(self) -> list[int]:
        """The sizes of what the first half holds of what was received: all if the second begins with that."""
        if not self.splits or self.halves.begins_at_outputs:
            return [tensor.gradient_bytes for tensor in self.leaving]
        elsewhere = self._own.union(map(id, self.homes(hold=True)))
        found = {id(each): each for place in self.nodes for each in self.lives.capturing.get(place, ())}
        copied = {(id(each), copy.last) for each, copy in self._brought_in_order}
        return [
            each.bytes
            for key, each in found.items()
            if key not in elsewhere and any((key, place) not in copied for place in self.halves.captured_at(each))
        ]

    @cached_property
    def halves(self) -> Halves:
        """Where the halves of a split backward run."""
        reading = frozenset(place for _, places in self.trained for place in places)
        sent = frozenset(self.lives.place[tensor.producer] for tensor in self.leaving if tensor.gradient_bytes)
        return Halves(self.lives, frozenset(self.before), tuple(self.nodes), reading, sent)

    def homes(self, *, hold: bool) -> Sequence[GradientLife | None]:
        """In what the gradient of each input that is read lies as it is returned; None where that is a copy.

        A whole backward copies what others have too, except what it made itself and has through a view; a first half
        (`hold`) does not.
        """
        return self._held_homes if hold else self._taken_homes

    @cached_property
    def _held_homes(self) -> Sequence[GradientLife | None]:
        return self._matched(list(self._given_homes))

    @cached_property
    def _taken_homes(self) -> Sequence[GradientLife | None]:
        views = self.lives.viewed
        seen = [tensor.permuted or self.lives.place[tensor.producer] in views for tensor, _ in self.read]
        pairs = zip(seen, self._given_homes, strict=True)
        return self._matched([home if is_seen and id(home) in self._own else None for is_seen, home in pairs])

    @cached_property
    def _given_homes(self) -> Sequence[GradientLife | None]:
        return [self._only_given(tensor, place) for tensor, place in self.read]

    def _matched(self, homes: list[GradientLife | None]) -> list[GradientLife | None]:
        """With own gradients that go on to earlier stages, each for an input of its size that is complete there."""
        taken = set(map(id, homes))
        for gradient in self.own_gradients:
            if gradient.last not in self.inside and id(gradient) not in taken:
                index = next((i for i, home in enumerate(homes) if home is None and self._fits(gradient, i)), None)
                if index is not None:
                    homes[index] = gradient
        return homes

    def _fits(self, gradient: GradientLife, index: int) -> bool:
        tensor, place = self.read[index]
        return (gradient.producer, gradient.bytes) == (place, tensor.gradient_bytes)

    def _only_given(self, tensor: Tensor, place: int) -> GradientLife | None:
        """That of which the gradient of an input with one reader, at `place`, is: made here, or what was received."""
        readers = {self.lives.place[name] for name in tensor.consumers} - self.before
        found = self.lives.given.get((self.lives.place[tensor.producer], place)) if readers == {place} else None
        if found is None or found.bytes != tensor.gradient_bytes:
            return None
        pair, is_received = (self.lives.place[tensor.producer], place), id(found) not in self._own
        is_turned = pair in self.lives.turned or (is_received and self._turns(tensor, place))
        return None if is_turned or self._arrives_anew(pair[0], found) else found

    def _arrives_anew(self, place: int, found: GradientLife) -> bool:
        """Whether a gradient comes to a node of an earlier stage in another order, because of a cut behind."""
        senders = [sender for gradient, sender in self._laid_out_anew if gradient is found]
        return any(place in self.lives.reached(found, s) and not self._is_one_storage(place, s) for s in senders)

    def _turns(self, tensor: Tensor, place: int) -> bool:
        """Whether the reader changes the order of elements: then a copy of a gradient that came in order is sent.

        A view does that unless its operator keeps the order. One that keeps it and is no view had to copy, since what
        it was given is not in order; so the gradient would not be.
        """
        reader = self.graph.nodes[place]
        value = self.lives.values.get(reader.name)
        is_view = value is not None and value.storage == tensor.storage
        return reader.operator not in ORDERLY if is_view else reader.operator in ORDERLY

    def returned(self, *, hold: bool) -> list[Tensor]:
        """The inputs whose gradients take memory as they are returned, by a whole backward or a first half (`hold`).

        What lies in one gradient counts once, what lies in a message not, as that does which a later stage alone reads,
        through a view.
        """
        once: dict[int, Tensor] = {}
        for index, ((tensor, _), home) in enumerate(zip(self.read, self.homes(hold=hold), strict=True)):
            if not self._is_handed_on(tensor) and (home is None or id(home) in self._own):
                once[-index - 1 if home is None else id(home)] = tensor
        return list(once.values())

    def relayed(self, *, hold: bool) -> list[Tensor]:
        """The inputs whose gradients lie in what was received; what lies in one of these counts once."""
        passing = [tensor for tensor, readers in self.arriving if self.inside.isdisjoint(readers)]
        once: dict[int, Tensor] = {}
        for index, ((tensor, _), home) in enumerate(zip(self.read, self.homes(hold=hold), strict=True)):
            if self._is_handed_on(tensor):
                once[-index - 1] = tensor
            elif home is not None and id(home) not in self._own:
                once[id(home)] = tensor
        return [*passing, *once.values()]

    @cached_property
    def own_gradients(self) -> list[GradientLife]:
        """Those that are made here, with copies that only a cut brings about."""
        return [*self.uncut_gradients, *(copy for _, copy in self._brought_in_order)]

    @cached_property
    def uncut_gradients(self) -> list[GradientLife]:
        """Those that the whole model has too; what comes from later stages is in order, and needs no copy."""
        made = (gradient for place in self.nodes for gradient in self.lives.gradients.get(place, ()))
        return [gradient for gradient in made if not (gradient.copy and gradient.producer in self._sent_as_is)]

    @cached_property
    def _brought_in_order(self) -> list[tuple[GradientLife, GradientLife]]:
        """What the cut laid out anew, each with its copy for a node that makes a parameter's gradient of it.

        Linear layers and products copy it, since they take its leading dimensions as one; others may.
        """
        found = []
        for gradient, sender in self._laid_out_anew:
            for place, reader in self.lives.reached(gradient, sender).items():
                is_taken = place in self.inside and place in gradient.captured
                if is_taken and not self._is_one_storage(place, sender):
                    users = (), (place,), ()
                    copy = GradientLife(reader, place, gradient.bytes, *users, sum=False, copy=True, continues=None)
                    found.append((gradient, copy))
        return found

    @cached_property
    def _laid_out_anew(self) -> list[tuple[GradientLife, int]]:
        """Gradients of what is sent that the whole model has in another order than messages, and who sends that."""
        found = []
        for tensor in self.leaving:
            pairs = [(self.lives.place[tensor.producer], self.lives.place[name]) for name in tensor.consumers]
            gradient = self.lives.given.get(pairs[0]) if len(pairs) == 1 else None
            if gradient is not None and pairs[0] in self.lives.turned and self.is_later(pairs[0][1]):
                found.append((gradient, pairs[0][0]))
        return found

    def _is_one_storage(self, one: int, other: int) -> bool:
        first, second = (self.lives.values.get(self.graph.nodes[place].name) for place in (one, other))
        return first is not None and second is not None and first.storage == second.storage

    @cached_property
    def _own(self) -> set[int]:
        return set(map(id, self.own_gradients))

    @cached_property
    def _sent_as_is(self) -> set[int]:
        """The nodes of which only later stages have gradients: as they are, or through views."""
        read_here = {source for place in self.nodes for source in self.lives.sources[place]}
        found = {self.lives.place[tensor.producer] for tensor in self.leaving} - read_here
        for place in reversed(self.nodes):
            if self.lives.viewed.get(place) in found:
                found.add(place)
        return found

    @cached_property
    def read(self) -> list[tuple[Tensor, int]]:
        """What arrives and is read here, with the place where its gradient is complete."""
        places = [(tensor, self.inside.intersection(readers)) for tensor, readers in self.arriving]
        return [(tensor, min(inside)) for tensor, inside in places if inside]

    def _is_handed_on(self, tensor: Tensor) -> bool:
        view = self.lives.seen_through.get(tensor.producer)
        readers = () if view is None else map(self.lives.place.__getitem__, view.consumers)
        return bool(view and view.consumers) and all(map(self.is_later, readers))

    @cached_property
    def splits(self) -> bool:
        """Whether a backward has two halves: a first stage has no gradients of inputs to compute."""
        return any(tensor.gradient_bytes for tensor, _ in self.arriving)

    @staticmethod
    def needed(node: Node, rise: int, level: Level, *, forward: bool) -> int:
        """What a node that makes `rise` live takes with the scratch of its kernels: without it, it does not run."""
        if not rise:
            return 0
        scratch = -(-node.workspace_bytes * level.scratch.numerator // level.scratch.denominator)
        height = node.forward_height_bytes if forward else node.backward_height_bytes
        if height is None:
            return rise + scratch
        return max(rise, min(rise, height - node.workspace_bytes) + scratch)

    def flowing(self, *, hold: bool = False) -> Iterator[Change]:
        """Gradients of tensors; with `hold` those stay that flow into nodes with parameters."""
        homes = self.homes(hold=hold)
        stay = {id(gradient) for gradient, _ in self.captured if hold}.union(map(id, homes))
        for gradient in self.own_gradients:
            yield Change(gradient.producer, gradient.bytes, begins=True)
            if id(gradient) not in stay:
                yield Change(self._last(gradient), gradient.bytes, begins=False)
        for (tensor, place), home in zip(self.read, homes, strict=True):
            if home is None:  # it lies in what others hold, or not in order: autograd copies it
                yield Change(place, tensor.gradient_bytes, begins=True)

    def _last(self, gradient: GradientLife) -> int:
        """The node of the stage in whose backward it is let go."""
        users = self.inside.intersection((*gradient.readers, *gradient.captured, *gradient.joined))
        return gradient.last if gradient.last in self.inside else min(users, default=gradient.producer)

    def made_gradients(self) -> Iterator[Change]:
        """In the first backward of a step the gradients of parameters begin to live."""
        for parameter, places in self.trained:
            yield Change(places[-1], parameter.bytes, begins=True)
        for place, node in zip(self.nodes, self.own, strict=True):
            if not node.parameters:
                yield Change(place, node.parameter_bytes, begins=True)

    def added_gradients(self) -> Iterator[Change]:
        """Later they are made, added and let go."""
        for parameter, places in self.trained:
            if len(places) > 1:
                yield Change(places[-1], parameter.bytes, begins=True)
                yield Change(places[0], parameter.bytes, begins=False)

    def sums(self, *, hold: bool = False) -> dict[int, int]:
        """By node what lives beside the new sums that are made when its backward is done: the summands.

        Nothing is added in place to what came from a later stage, nor, with `hold`, to what stays.
        """
        sums: dict[int, int] = defaultdict(int)
        held = {id(each) for each, _ in self._captured if hold}
        stay = held.union(map(id, self.homes(hold=hold)))
        for gradient in self.own_gradients:
            before = gradient.continues
            if gradient.sum and (before is None or self.is_later(before.producer) or id(before) in held):
                sums[gradient.producer] += gradient.bytes
        apart = {(each.producer, each.bytes) for each in self.own_gradients if each.sum and each.continues is None}
        for place, size in apart:
            others = (each for each in self.lives.summed.get(place, ()) if id(each) in self._own - stay)
            sums[place] += sum(each.bytes for each in others if each.bytes == size)
        return sums


def _around(nodes: Sequence[int], regions: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The regions (by index) that each node lies in, from the outermost on."""
    found: dict[int, tuple[int, ...]] = dict.fromkeys(nodes, ())
    for index in sorted(range(len(regions)), key=lambda index: -len(regions[index])):
        for place in regions[index]:
            found[place] += (index,)
    return found
