"""What one stage holds: its nodes followed through a forward and a backward. Part of the memory model, see memory.py.

forward     a storage lives from the node that makes it to its last reader; what a backward saves, and what
            later stages read, lives on: it is `kept`
backward    nodes run from the last to the first. What was saved goes with the first node that saved it, outputs
            at the end. A gradient lives from the node that makes it to the one that lets it go, or to the end if an
            earlier stage does; that of a parameter from its last reader on. Nothing is added in place to what came
            from a later stage: the sum is new
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import NamedTuple

from pipecompile.ir.allocator import ALLOCATORS, ZERO, Amount
from pipecompile.ir.graph import CostGraph, Gradient, Parameter, Tensor
from pipecompile.ir.optimizer import optimizer_bytes
from pipecompile.ir.serde import Value

__all__ = ["NOTHING", "Footprint", "Lives"]

SCRATCH_MARGIN = Fraction(1, 10)  # by which a bound takes the scratch of kernels to be larger than expected


class Footprint(Value, frozen=True, kw_only=True):
    """What one stage holds: always, for a microbatch, and while it computes.

    `kept` is held from a microbatch's forward to its backward, `outputs` (part of it) until the step ends once they
    are sent, as are the gradients of the inputs (`returned`); those that only pass through (`relayed`) lie in what was
    received. Of a backward in two halves, `dropped` is what the first lets go of what was kept, and `between` what
    it leaves to the second. `inputs`, `received` and `received_gradients` are buffers of one microbatch.
    The peaks are the most that lives in a forward, a backward and its halves, above what was held before: the first
    backward of a step makes the gradients of parameters, later ones add to them.
    """

    parameters: Amount
    gradients: Amount
    optimizer: Amount
    optimizer_scratch: Amount
    inputs: Amount
    received: Amount
    received_gradients: Amount
    kept: Amount
    outputs: Amount
    returned: Amount
    relayed: Amount
    dropped: Amount
    between: Amount
    forward_peak: Amount
    first_backward_peak: Amount
    backward_peak: Amount
    input_peak: Amount
    first_weight_peak: Amount
    weight_peak: Amount


NO_SUMS: Mapping[int, int] = {}
NOTHING = Footprint(**dict.fromkeys(Footprint.__struct_fields__, ZERO))


@dataclass(frozen=True)
class _Storage:
    """A storage by the places of nodes: where it is made, who reads it, who saves it for the backward."""

    bytes: int
    readers: tuple[int, ...]
    savers: tuple[int, ...]


class _Gradient(NamedTuple):
    """A storage of the backward: made in that of `producer`, let go in that of `last`.

    A `sum` of others is new unless these were added in place to one that was made in `origin`. `summed` tells whether
    others will be added to it in turn.
    """

    producer: int
    last: int
    bytes: int
    readers: tuple[int, ...]
    sum: bool
    origin: int | None
    summed: bool


class _Change(NamedTuple):
    """At the node of this place a storage of so many bytes begins to live, or ends."""

    place: int
    bytes: int
    begins: bool


@dataclass(frozen=True)
class Lives:
    """The storages of a cost graph, ready for any stage; `optimizer` and `master_weights` are as in a plan's options.

    Nodes are known by their place in the graph's order.
    """

    graph: CostGraph
    optimizer: str | None = None
    master_weights: bool = False

    @cached_property
    def place(self) -> dict[str, int]:
        """The place of each node."""
        return {node.name: index for index, node in enumerate(self.graph.nodes)}

    @cached_property
    def storages(self) -> dict[int, tuple[_Storage, ...]]:
        """By the node that makes them, the storages that a stage may hold; those of the minibatch aside."""
        roots: dict[int, int] = {}
        readers, savers = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        for tensor in self.graph.tensors:
            if tensor.storage is not None:
                producer = self.place[tensor.producer]
                roots[tensor.storage] = min(roots.get(tensor.storage, producer), producer)
                readers[tensor.storage].update(self.place[name] for name in tensor.consumers)
        for index, node in enumerate(self.graph.nodes):
            for storage in node.saved:
                roots.setdefault(storage, index)
                savers[storage].add(index)
        made = defaultdict[int, list[_Storage]](list)
        for storage, root in roots.items():
            if self.graph.nodes[root].operator != "placeholder":
                places = (tuple(sorted(found[storage])) for found in (readers, savers))
                made[root].append(_Storage(self.graph.storages[storage], *places))
        return {root: tuple(storages) for root, storages in made.items()}

    @cached_property
    def tensors(self) -> tuple[tuple[Tensor, int, tuple[int, ...]], ...]:
        """Each tensor that is read, with the places of its producer and its readers."""
        return tuple(
            (tensor, self.place[tensor.producer], tuple(sorted(self.place[name] for name in tensor.consumers)))
            for tensor in self.graph.tensors
            if tensor.consumers
        )

    @cached_property
    def gradients(self) -> dict[int, tuple[_Gradient, ...]]:
        """By the node in whose backward they are made, without summands of a parameter's gradient."""
        made = defaultdict[int, list[_Gradient]](list)
        every = self.graph.gradients
        summed = {gradient.continues for gradient in every}
        for index, gradient in enumerate(every):
            if not self._is_summand(gradient):
                before = gradient.continues
                origin = None if before is None else self.place[every[before].producer]
                producer, last = self.place[gradient.producer], self.place[gradient.last]
                readers = tuple(self.place[name] for name in gradient.readers)
                row = _Gradient(producer, last, gradient.bytes, readers, gradient.sum, origin, index in summed)
                made[producer].append(row)
        return {place: tuple(rows) for place, rows in made.items()}

    def _is_summand(self, gradient: Gradient) -> bool:
        """Whether it goes from one reader of a parameter to another: it counts with the parameter."""
        by_name = self.graph.by_name
        shared = set(by_name[gradient.producer].parameters) & set(by_name[gradient.last].parameters)
        return any(gradient.bytes == self.graph.parameter_by_name[name].bytes for name in shared)

    def footprint(self, before: Iterable[str], nodes: Iterable[str]) -> Footprint:
        """What the stage made of `nodes` holds; the nodes `before` it are in earlier stages, all others in later."""
        return _Stage(
            self, {self.place[name] for name in before}, sorted(map(self.place.__getitem__, nodes))
        ).footprint()


class _Stage:
    """One stage: its nodes by place, in order."""

    def __init__(self, lives: Lives, before: set[int], nodes: Sequence[int]) -> None:
        self.lives, self.graph = lives, lives.graph
        self.before, self.nodes, self.inside = before, nodes, set(nodes)
        self.own = [self.graph.nodes[place] for place in nodes]
        self.allocator = ALLOCATORS[lives.graph.memory]
        self.made = [(node, storage) for node in nodes for storage in lives.storages.get(node, ())]
        self.arriving = [(t, readers) for t, producer, readers in lives.tensors if self._arrives(producer, readers)]

    def _is_later(self, place: int) -> bool:
        return place not in self.inside and place not in self.before

    def _arrives(self, producer: int, readers: Sequence[int]) -> bool:
        return producer in self.before and any(reader not in self.before for reader in readers)

    def _leaves(self, producer: int, readers: Sequence[int]) -> bool:
        return not self._is_later(producer) and any(map(self._is_later, readers))

    def _is_sent(self, storage: _Storage) -> bool:
        return any(map(self._is_later, storage.readers))

    def _savers(self, storage: _Storage) -> list[int]:
        return [place for place in storage.savers if place in self.inside]

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
    def _captured(self) -> list[_Gradient]:
        """What flows into nodes with parameters: there the second half of a split backward begins."""
        read = {place for _, places in self._trained for place in places}
        return [gradient for gradient in self._own_gradients if gradient.last in read and not gradient.summed]

    @cached_property
    def _own_gradients(self) -> list[_Gradient]:
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
        backward = [*self._freed(), *self._flowing()]
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
            kept=amount(s.bytes for _, s in self.made if self._savers(s) or self._is_sent(s)),
            outputs=amount(s.bytes for _, s in self.made if self._is_sent(s)),
            returned=amount(tensor.gradient_bytes for tensor, _ in self._read),
            relayed=amount(t.gradient_bytes for t, readers in self.arriving if self.inside.isdisjoint(readers)),
            dropped=amount(s.bytes for _, s in self.made if self._is_dropped(s)),
            between=amount(gradient.bytes for gradient in self._captured) if self._splits else ZERO,
            forward_peak=self._peak(self._forward(), [n.forward_peak_bytes for n in self.own], forward=True),
            first_backward_peak=self._peak([*backward, *making], whole, self._sums),
            backward_peak=self._peak([*backward, *adding], whole, self._sums),
            input_peak=self._input_peak() if self._splits else ZERO,
            first_weight_peak=self._peak([*second, *making], rises, sums),
            weight_peak=self._peak([*second, *adding], rises, sums),
        )

    @property
    def _splits(self) -> bool:
        """Whether a backward has two halves: a first stage has no gradients of inputs to compute."""
        return any(tensor.gradient_bytes for tensor, _ in self.arriving)

    def _forward(self) -> Iterator[_Change]:
        for place, storage in self.made:
            yield _Change(place, storage.bytes, begins=True)
            if not self._savers(storage) and not self._is_sent(storage):
                yield _Change(max(storage.readers, default=place), storage.bytes, begins=False)

    def _is_dropped(self, storage: _Storage) -> bool:
        """Whether only nodes behind the last one with parameters save it: no second half comes by there."""
        last = max((places[-1] for _, places in self._trained), default=-1)
        savers = self._savers(storage)
        return self._splits and bool(savers) and savers[0] > last and not self._is_sent(storage)

    def _freed(self, *, half: bool = False) -> Iterator[_Change]:
        """What the backward, or its second half, lets go of what was kept; outputs stay until it ends."""
        for _, storage in self.made:
            savers = self._savers(storage)
            if savers and not self._is_sent(storage) and not (half and self._is_dropped(storage)):
                yield _Change(savers[0], storage.bytes, begins=False)

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
    ) -> Amount:
        """The most that lives above what lived before; `rises` is in the order of the nodes, `sums` by node."""
        changes = list(changes)
        return Amount(
            expected=self._highest(changes, rises, sums, 1, lambda size: size, forward),
            bound=self._highest(changes, rises, sums, 1 + SCRATCH_MARGIN, self.allocator.rounded, forward),
        )

    def _highest(
        self,
        changes: Sequence[_Change],
        rises: Sequence[int],
        sums: Mapping[int, int],
        scratch: Fraction | int,
        size_of: Callable[[int], int],
        forward: bool,
    ) -> int:
        """What begins in a node is part of its rise, to which the scratch of its kernels comes; sums are made last."""
        after: dict[int, int] = defaultdict(int)
        padding: dict[int, int] = defaultdict(int)
        for place, size, begins in changes:
            after[place] += size_of(size) if begins else -size_of(size)
            padding[place] += size_of(size) - size if begins else 0
        now = highest = 0
        rows = list(zip(self.nodes, self.own, rises, strict=True))
        for place, node, rise in rows if forward else reversed(rows):
            needed = rise + ceil(scratch * node.workspace_bytes) if rise else 0
            highest = max(highest, now + needed + padding[place])
            now += after[place]
            highest = max(highest, now + size_of(sums.get(place, 0)))
        return highest
