"""The gradients that flow through a stage: made in it, received, returned, and held between halves of a backward.

Part of the memory model, see memory.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from operator import add

from pipecompile.ir.graph import GradientStorage, Parameter, Tensor
from pipecompile.memory_model.subgraph import LivenessChange, StageSubgraph

__all__ = ["GradientFlow"]

AT_ONCE = frozenset({"torch.nn.LSTM"})
"""Operators whose kernel makes all gradients in either half of a backward."""


class GradientFlow:
    """Those of one stage, a `section` of the graph."""

    def __init__(self, section: StageSubgraph) -> None:
        self.section = section
        self.lives, self.graph = section.lives, section.graph
        self.nodes, self.inside = section.nodes, section.inside
        self.place = section.lives.place

    @cached_property
    def captured(self) -> list[tuple[GradientStorage, int]]:
        """What the first half of a split backward holds, each with the node where the second lets it go.

        Those that are returned lie in the message.
        """
        returned = set(map(id, self.homes(hold=True)))
        found = [(each, places) for each, places in self._captured if id(each) not in returned]
        return [
            (each, min(map(self.section.halves.end_of_second, places))) for each, places in found
        ]

    @cached_property
    def _captured(self) -> list[tuple[GradientStorage, set[int]]]:
        pairs = ((each, self.section.halves.captured_at(each)) for each in self.own)
        return [(each, places) for each, places in pairs if places]

    @property
    def retained(self) -> Iterator[str]:
        """What leaves and whose gradient the first half holds as it came: all if the second begins with that."""
        if not self.section.splits or self.section.halves.begins_at_outputs:
            yield from (tensor.producer for tensor in self.section.leaving)
        else:
            held = self._held_as_received()
            yield from dict.fromkeys(name for each in held for name in self._came_for(each))

    def _held_as_received(self) -> Iterator[GradientStorage]:
        found = {
            id(each): each for place in self.nodes for each in self.lives.capturing.get(place, ())
        }
        for key, each in found.items():
            if key not in self._own and self.section.halves.captured_at(each):
                yield each

    def _came_for(self, received: GradientStorage) -> list[str]:
        """The leaving tensors whose gradient it may be that is captured: all if none is seen to be."""
        names = {
            tensor.producer: self.lives.place[tensor.producer] for tensor in self.section.leaving
        }
        users = {self.place[name] for name in received.captured_at}
        met = [
            name
            for name, sent in names.items()
            if not users.isdisjoint({sent, *self.lives.reached(received, sent)})
        ]
        return met or list(names)

    def homes(self, *, hold: bool) -> Sequence[GradientStorage | None]:
        """In which gradient of the stage that of each input lies as it is returned; None where it is a copy.

        A whole backward copies what others have too, except what it has through a view; a first half (`hold`) does
        not.
        """
        return self._own_homes if hold else self._taken_homes

    @cached_property
    def _taken_homes(self) -> Sequence[GradientStorage | None]:
        views = self.lives.viewed
        pairs = zip(self.section.given, self._own_homes, strict=True)
        return [
            home if tensor.is_permuted or self.lives.place[tensor.producer] in views else None
            for (tensor, _), home in pairs
        ]

    @cached_property
    def _own_homes(self) -> Sequence[GradientStorage | None]:
        pairs = ((tensor, self._sole(tensor, place)) for tensor, place in self.section.given)
        return [
            found
            if found is not None and found.bytes == tensor.gradient_bytes and id(found) in self._own
            else None
            for tensor, found in pairs
        ]

    def _sole(self, tensor: Tensor, place: int) -> GradientStorage | None:
        """In what the gradient of an input lies if its one reader is at `place`."""
        givers = {
            self.lives.place[name] for name in tensor.consumers_with_gradient
        } - self.section.before
        return (
            self.lives.given.get((self.lives.place[tensor.producer], place))
            if givers == {place}
            else None
        )

    @cached_property
    def _parts(self) -> list[tuple[Tensor, GradientStorage]]:
        """The inputs whose gradients are parts of larger ones, which live until the backward ends."""
        pairs = ((tensor, self._sole(tensor, place)) for tensor, place in self.section.given)
        return [
            (tensor, found)
            for tensor, found in pairs
            if found is not None
            and found.bytes > tensor.gradient_bytes
            and not tensor.strided_copy_bytes
        ]

    def returned(self, *, hold: bool) -> Iterator[tuple[tuple[str, ...], int, bool]]:
        """The gradients of inputs that take memory as a whole backward returns them, or a first half (`hold`).

        Each with the inputs whose gradients lie in it, its size, and whether the first half holds it too. What lies in
        a message takes none, as that does which a later stage alone reads, through a view.
        """
        held = {id(gradient) for gradient, _ in self._captured if hold and self.section.splits}
        for home, tensors in self._by_home(hold=hold):
            names = tuple(tensor.producer for tensor in tensors)
            yield names, tensors[-1].gradient_bytes, id(home) in held
        for tensor in self._zeros:
            yield (tensor.producer,), tensor.gradient_bytes, False

    @property
    def relayed(self) -> Iterator[str]:
        """What leaves and whose gradient, as it came, is that of an input."""
        for tensor, _ in self.section.arriving:
            if not self.section.giving(tensor):
                yield tensor.producer
        yield from filter(None, (self._sent_view_of(tensor) for tensor, _ in self.section.given))

    @property
    def _zeros(self) -> Iterator[Tensor]:
        """What arrives and ends here, and is given no gradient: torch.distributed.pipelining then sends zeros."""
        ends = {tensor.producer for tensor, _ in self.section.arriving} - {
            t.producer for t in self.section.leaving
        }
        unread = (tensor for tensor, _ in self.section.arriving if not self.section.giving(tensor))
        return (tensor for tensor in unread if tensor.gradient_bytes and tensor.producer in ends)

    def _by_home(self, *, hold: bool) -> list[tuple[GradientStorage | None, list[Tensor]]]:
        """The inputs that are read, with what their gradients lie in, if that is no copy."""
        found: dict[int, tuple[GradientStorage | None, list[Tensor]]] = {}
        for index, ((tensor, _), home) in enumerate(
            zip(self.section.given, self.homes(hold=hold), strict=True)
        ):
            if self._sent_view_of(tensor) is None:
                found.setdefault(-index - 1 if home is None else id(home), (home, []))[1].append(
                    tensor
                )
        return list(found.values())

    def _sent_view_of(self, tensor: Tensor) -> str | None:
        """The view that the stage takes of it only for later ones, if that is sent as it is."""
        places = list(self.lives.views_of(tensor.producer, self.inside))
        if not places:
            return None
        last = self.lives.values.get(self.graph.nodes[places[-1]].name)
        if (
            last is None
            or not last.consumers
            or any(self.lives.place[name] in self.inside for name in last.consumers)
        ):
            return None
        return last.producer if tensor.is_dense and last.is_dense else None

    @cached_property
    def own(self) -> list[GradientStorage]:
        """Those that are made here; what comes from later stages is in order, and needs no copy."""
        return [
            gradient
            for place in self.nodes
            for gradient in self.lives.gradients.get(place, ())
            if not (gradient.is_copy and place in self._sent_as_is)
        ]

    @cached_property
    def _own(self) -> set[int]:
        return set(map(id, self.own))

    @cached_property
    def _sent_as_is(self) -> set[int]:
        """The nodes of which only later stages have gradients: as they are, or through views."""
        read_here = {source for place in self.nodes for source in self.lives.sources[place]}
        found = {self.lives.place[tensor.producer] for tensor in self.section.leaving} - read_here
        for place in reversed(self.nodes):
            if self.lives.viewed.get(place) in found:
                found.add(place)
        return found

    def flowing(self, *, hold: bool = False) -> Iterator[LivenessChange]:
        """Gradients of tensors; with `hold` those stay that flow into nodes with parameters."""
        homes, parts = self.homes(hold=hold), self._parts
        held = {id(gradient) for gradient, _ in self.captured if hold}
        parted = {id(found) for _, found in parts} - held
        stay = held.union(map(id, homes))
        for gradient in self.own:
            yield LivenessChange(self.place[gradient.producer], gradient.bytes, begins=True)
            if id(gradient) not in stay:
                last = self.nodes[0] if id(gradient) in parted else self._last(gradient)
                yield LivenessChange(last, gradient.bytes, begins=False)
        late = {tensor.producer for tensor, _ in parts if hold}
        for (tensor, place), home in zip(self.section.given, homes, strict=True):
            if home is None:  # it lies in what others hold, or not in order: autograd copies it
                at = self.nodes[0] if tensor.producer in late else place
                yield LivenessChange(at, tensor.gradient_bytes, begins=True)
        for tensor in self._zeros:
            yield LivenessChange(self.nodes[0], tensor.gradient_bytes, begins=True)

    def last_sums(self, *, hold: bool = False, dropped: int = 0) -> dict[int, int]:
        """`sums`, and what lives at the end with parts that stay until then.

        A first half copies them one by one, when so many bytes were `dropped`.
        """
        parts, stay = self._parts, {id(gradient) for gradient, _ in self.captured if hold}
        going = self._own - stay.union(map(id, self.homes(hold=hold)))
        left = [
            sum({id(f): f.bytes for _, f in parts[i:] if id(f) in going}.values())
            for i in range(len(parts))
        ]
        sums, end = self.sums(hold=hold), self.nodes[0]
        if parts:
            copied = list(accumulate(tensor.gradient_bytes if hold else 0 for tensor, _ in parts))
            before = sums.get(end, 0) + left[0]
            meanwhile = max(map(add, left, copied)) - dropped
            sums[end] = max(0, max(before, meanwhile) - copied[-1])
        return sums

    def _last(self, gradient: GradientStorage) -> int:
        """The node of the stage in whose backward it is let go."""
        last = self.place[gradient.last]
        if last in self.inside:
            return last
        users = (self.place[name] for name in (*gradient.readers, *gradient.captured_at))
        return min(self.inside.intersection(users), default=self.place[gradient.producer])

    @property
    def early(self) -> list[tuple[Parameter, list[int]]]:
        """The parameters whose gradients the first half of a split backward makes, and holds."""
        return [pair for pair in self.section.trained if pair[0].name in self._early]

    @property
    def _early(self) -> frozenset[str]:
        return self.section.halves.early if self.section.splits else frozenset()

    def making(self, *, half: bool = False) -> Iterator[LivenessChange]:
        """In the first backward of a step the gradients of parameters begin to live.

        In a second `half` those that the first made are copied last.
        """
        early = self._early if half else ()
        for parameter, places in self.section.trained:
            yield LivenessChange(
                self.nodes[0] if parameter.name in early else places[-1],
                parameter.bytes,
                begins=True,
            )
        for place, node in zip(self.nodes, self.section.own, strict=True):
            if not node.parameters:
                yield LivenessChange(place, node.parameter_bytes, begins=True)

    def adding(self, *, half: bool = False) -> Iterator[LivenessChange]:
        """Later they are made, added and let go, but for what the first half made if this is the second."""
        early = self._early if half else ()
        for parameter, places in self.section.trained:
            if len(places) > 1 and parameter.name not in early:
                yield LivenessChange(places[-1], parameter.bytes, begins=True)
                yield LivenessChange(places[0], parameter.bytes, begins=False)

    @property
    def between(self) -> Iterator[int]:
        """The sizes of what lives between the halves of a split backward, besides what the forward saved."""
        yield from (gradient.bytes for gradient, _ in self.captured)
        yield from (parameter.bytes for parameter, _ in self.early)

    def released(self) -> Iterator[LivenessChange]:
        """In a second half: what the first held for it, and gradients that only it needs."""
        for gradient, place in self.captured:
            yield LivenessChange(place, gradient.bytes, begins=False)
        for gradient in filter(self.section.halves.is_aside, self.own):
            yield LivenessChange(self.place[gradient.producer], gradient.bytes, begins=True)
            yield LivenessChange(self.place[gradient.last], gradient.bytes, begins=False)

    def first_rises(self) -> Iterator[int]:
        """By node what it makes live in the first half, which makes few gradients of parameters."""
        for node in self.section.own:
            names = set(node.parameters) - self.section.halves.early
            parameters = (self.graph.parameter_by_name[name] for name in names)
            made = (
                0 if node.operator in AT_ONCE else sum(p.bytes for p in parameters if p.trainable)
            )
            yield max(0, node.backward_peak_bytes - made)

    def second_rises(self) -> Iterator[int]:
        """By node what it makes live in the second half, which runs those that lead to parameters."""
        halves, others = self.section.halves, defaultdict[int, int](int)
        for gradient in self.own:
            place = self.place[gradient.producer]
            made = self._is_at_once(place) or halves.is_aside(gradient)
            others[place] += 0 if gradient.is_sum or made else gradient.bytes
        for parameter, places in self.early:
            for place in places:
                others[place] += 0 if self._is_at_once(place) else parameter.bytes
        for place, node in zip(self.nodes, self.section.own, strict=True):
            yield (
                max(0, node.backward_peak_bytes - others[place]) if place in halves.run_twice else 0
            )

    def _is_at_once(self, place: int) -> bool:
        return self.graph.nodes[place].operator in AT_ONCE

    def sums(self, *, hold: bool = False) -> dict[int, int]:
        """By node what lives beside the new sums that are made when its backward is done: the summands.

        Nothing is added in place to what came from a later stage, nor, with `hold`, to what stays.
        """
        sums: dict[int, int] = defaultdict(int)
        held = {id(each) for each, _ in self._captured if hold}
        parts = (id(found) for _, found in self._parts)
        stay = held.union(map(id, self.homes(hold=hold)), parts)
        new = [gradient for gradient in self.own if gradient.is_sum]
        for gradient in new:
            if not self._is_in_place(gradient, held):
                sums[self.place[gradient.producer]] += gradient.bytes
        apart = {self.place[each.producer]: each.bytes for each in new if each.continues is None}
        for place, size in apart.items():
            others = (
                each for each in self.lives.summed.get(place, ()) if id(each) in self._own - stay
            )
            sums[place] += sum(
                each.bytes for each in others if each.bytes >= size
            )  # larger if a part of it is added
        for place, size in self._added_anew(self.early if hold else self.section.trained):
            sums[place] += size
        return sums

    def _is_in_place(self, gradient: GradientStorage, held: Collection[int]) -> bool:
        """Whether a sum lies in what the first of its summands lay in, which is none that is `held`."""
        if gradient.continues is None:
            return False
        before = self.graph.gradients[gradient.continues]
        return not self.section.is_later(self.place[before.producer]) and id(before) not in held

    def second_sums(self) -> dict[int, int]:
        """The same of the second half of a split backward, which makes but gradients of parameters."""
        sums = defaultdict[int, int](int)
        for place, size in self._added_anew(
            pair for pair in self.section.trained if pair[0].name not in self._early
        ):
            sums[place] += size
        return sums

    def _added_anew(
        self, parameters: Iterable[tuple[Parameter, list[int]]]
    ) -> Iterator[tuple[int, int]]:
        """Where a gradient of a parameter is added to one that is a view, which gives a new sum: both summands."""
        for parameter, places in parameters:
            if len(places) > 1 and parameter.name in self.graph.nodes[places[-1]].view_gradients:
                yield places[-2], 2 * parameter.bytes
