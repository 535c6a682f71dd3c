"""What one stage holds: its nodes followed through a forward and a backward. Part of the memory model, see memory.py.

forward     a storage lives from the node that makes it to its last reader; what a backward saves, and what
            later stages read, lives on: it is `kept`
backward    nodes run from the last to the first. What was saved goes with the first node that saved it, outputs
            at the end. A gradient lives from the node that makes it to the one that lets it go, or to the end if an
            earlier stage does; that of a parameter from its last reader on. Nothing is added in place to what came
            from a later stage: the sum is new

A region is computed again: what its nodes save lives only from there on. Kept are what it reads, and what is saved
outside; when the backward comes to its last node, its forward runs once more, up to the last tensor that it saves.
Within a region there may be others: the forward that runs once more keeps of them what they read, and they are computed
again in turn.

What a run of nodes saves by a policy lies in a form of its own from the forward on, and is there again, in full, from
the backward of its last saver to that of its first. What is given to a run lives until it is done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.encodings import Policy
from pipecompile.ir.footprint import Footprint, MessageStorage, SharedParameter
from pipecompile.ir.graph import Parameter
from pipecompile.memory_model.encodings import StorageEncoding, EncodedPlaces
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.optimizer import optimizer_bytes
from pipecompile.memory_model.stage_values import BOUND_SCRATCH, Counting, StoredValue, StageValues
from pipecompile.memory_model.subgraph import LivenessChange

__all__ = ["footprint_of"]

NO_SUMS: Mapping[int, int] = {}


def footprint_of(
    lives: LiveRanges,
    before: Iterable[str],
    nodes: Iterable[str],
    regions: Iterable[Iterable[str]] = (),
    encoded_runs: Iterable[tuple[Iterable[str], tuple[Policy, ...]]] = (),
) -> Footprint:
    """What the stage made of `nodes` holds; the nodes `before` it are in earlier stages, all others in later.

    `regions` are runs of its nodes that are computed again, apart or one within another; `encoded_runs` are runs apart from
    these, with the policies of what they save; none of them under a split backward.
    """
    places = sorted(map(lives.place.__getitem__, nodes))
    again = [sorted(map(lives.place.__getitem__, region)) for region in regions]
    runs = [
        EncodedPlaces(tuple(sorted(map(lives.place.__getitem__, names))), policies)
        for names, policies in encoded_runs
    ]
    return _Stage(lives, {lives.place[name] for name in before}, places, again, runs).footprint()


class _Entry(NamedTuple):
    """What happens as a node begins: the most that lives meanwhile, what lives when it is done, and `beside` the node.

    In a backward a region is computed again, or what the node saved is brought back; in a forward forms are made.
    """

    peak: int
    left: int
    beside: int = 0


NO_ENTRIES: Mapping[int, Sequence[_Entry]] = {}


class _Stage(StageValues):
    """One stage, followed through its actions."""

    def footprint(self) -> Footprint:
        """Everything about the stage."""
        amount = self.allocator.amount
        anonymous = [
            node.parameter_bytes
            for node in self.own
            if not node.parameters and node.parameter_bytes
        ]
        trained = [parameter for parameter, _ in self.trained]
        state, scratch = self._optimizer(trained)
        making, adding = list(self.gradients.making()), list(self.gradients.adding())
        backward = [*self._freed(), *self.gradients.flowing(), *self._copies()]
        whole = [node.backward_peak_bytes for node in self.own]
        second = [*self._freed(half=True), *self.gradients.released()] if self.splits else backward
        stripped = [*second, *self._freed_outputs()]
        rises = list(self.gradients.second_rises()) if self.splits else whole
        first, later = (
            list(ways(half=True)) for ways in (self.gradients.making, self.gradients.adding)
        )
        sums = self.gradients.last_sums()
        last = self.gradients.second_sums() if self.splits else sums
        return Footprint(
            parameters=amount(
                [*(self.graph.parameter_by_name[name].bytes for name in self.readers), *anonymous]
            ),
            gradients=amount([*(parameter.bytes for parameter in trained), *anonymous]),
            optimizer=amount(state),
            optimizer_scratch=amount([scratch]),
            inputs=amount(node.input_bytes for node in self.own),
            received=amount(tensor.bytes for tensor, _ in self.arriving),
            received_gradients=amount(tensor.gradient_bytes for tensor in self.leaving),
            activations=amount(
                [
                    *(
                        made.storage.bytes
                        for made in (*self.made, *self.spread)
                        if self.is_kept(made)
                    ),
                    *(tensor.bytes for tensor in self.copied),
                    *map(self._kept, self._forms),
                    *(size for _, size in self._copied_by_regions(again=True)),
                ]
            ),
            freed_by_input_backward=amount(
                made.storage.bytes for made in (*self.made, *self.spread) if self._is_dropped(made)
            ),
            added_by_input_backward=amount(self.gradients.between) if self.splits else ZERO,
            forward_peak=self._peak(
                self._forward(), [n.forward_peak_bytes for n in self.own], forward=True
            ),
            first_backward_peak=self._peak([*backward, *making], whole, sums, again=True),
            backward_peak=self._peak([*backward, *adding], whole, sums, again=True),
            input_backward_peak=self._input_peak() if self.splits else ZERO,
            first_weight_backward_peak=self._peak([*second, *first], rises, last),
            weight_backward_peak=self._peak([*second, *later], rises, last),
            first_weight_backward_peak_freeing_outputs=self._peak([*stripped, *first], rises, last),
            weight_backward_peak_freeing_outputs=self._peak([*stripped, *later], rises, last),
            buffer_copies=amount(self.written(self.nodes)),
            sent_outputs=tuple(self._parcels()),
            sent_by_backward=tuple(self._given_back(hold=False)),
            sent_by_input_backward=tuple(self._given_back(hold=True)),
            relayed_inputs=tuple(self.handed_on),
            inputs_for_weight_backward=tuple(self._wanted()),
            relayed_gradients=tuple(self.gradients.relayed),
            gradients_for_weight_backward=tuple(self.gradients.retained),
            shared=tuple(self._shared()),
        )

    def _optimizer(self, trained: Sequence[Parameter]) -> tuple[Sequence[int], int]:
        """Of these parameters the storages of state, and the scratch of a step."""
        lives, lists = self.lives, self.allocator.steps_over_lists
        return optimizer_bytes(
            trained, lives.optimizer, master_weights=lives.master_weights, lists=lists
        )

    def _shared(self) -> Iterator[SharedParameter]:
        """Parameters that nodes of other stages read too."""
        amount = self.allocator.amount
        for name in self.readers:
            if not self.lives.reading[name] <= self.inside:
                parameter = self.graph.parameter_by_name[name]
                trained = [parameter] if parameter.trainable else []
                yield SharedParameter(
                    name=name,
                    parameters=amount([parameter.bytes]),
                    gradients=amount(each.bytes for each in trained),
                    optimizer=amount(self._optimizer(trained)[0]),
                )

    def _forward(self) -> Iterator[LivenessChange]:
        for made in (*self.made, *self.spread):
            yield LivenessChange(made.place, made.storage.bytes, begins=True)
            if not self.is_kept(made):
                yield LivenessChange(made.last, made.storage.bytes, begins=False)
        for form in self._forms:
            if form.waits:
                yield LivenessChange(form.made, self._kept(form), begins=True)
        for region, size in self._copied_by_regions(again=False):
            yield LivenessChange(region[-1], size, begins=False)

    def _copied_by_regions(self, *, again: bool) -> Iterator[tuple[Sequence[int], int]]:
        """Regions with each copy that they make of a buffer; of those that are ever computed `again`, or of others."""
        for index, region in enumerate(self.regions):
            if (self.called(index) is not None) == again:
                yield from ((region, size) for size in self.written(region))

    @cached_property
    def _forms(self) -> list[StorageEncoding]:
        return [form for made in self.made for form in made.forms]

    def _kept(self, form: StorageEncoding) -> int:
        return form.kept(self.graph.allocator)

    def _packings(self, level: Counting) -> dict[int, list[_Entry]]:
        """By node the forms that are made as it saves, with what that takes beside, and what regions copy before it."""
        found: dict[int, list[_Entry]] = defaultdict(list)
        for made in self.spread:
            found[self.nodes[0]].append(
                _Entry(level.size_of(made.storage.bytes), level.size_of(made.storage.bytes))
            )
        for region in self.regions:
            copies = sum(map(level.size_of, self.written(region)))
            found[region[0]].append(_Entry(copies, copies))
        for form in self._forms:
            if not form.waits:
                scratch = level.size_of(form.cost.scratch_bytes)
                found[form.made].append(_Entry(0, level.size_of(self._kept(form)), scratch))
        return found

    def _settlings(self, level: Counting) -> dict[int, int]:
        """By the last node of a run the most that lives while its forms are made, above what lives when all is done.

        By the last of all also copies that are sent, and what they are made of, which goes then.
        """
        found = {
            run.places[-1]: self._settling(run, level)
            for run in set(self.run.values())
            if run.settles
        }
        last = self.nodes[-1]
        going = sum(
            level.size_of(made.storage.bytes)
            for made in (*self.made, *self.spread)
            if self._is_copied(made)
        )
        copies = sum(level.size_of(tensor.bytes) for tensor in self.copied)
        return found | {last: going + max(copies, found.get(last, 0))}

    def _is_copied(self, made: StoredValue) -> bool:
        """Whether it goes when copies of its views were made for later stages."""
        return not made.holders and self.is_copied(made.storage)

    def _settling(self, run: EncodedPlaces, level: Counting) -> int:
        """One form after the other: a storage goes with its last, unless the run was given it."""
        end = run.places[-1]
        waiting = [(made, f) for made in self.made for f in made.forms if f.waits and f.made == end]
        waiting.sort(key=lambda pair: min(place for place in pair[1].savers if place in run.places))
        left = Counter(id(made) for made, _ in waiting)
        every = (made for made in (*self.made, *self.spread) if made.last == end)
        ending = [made for made in every if not (self.is_kept(made) or self._is_copied(made))]
        given = {id(made) for made in ending if self.run.get(made.place) is not run}
        own = {id(made) for made in ending if id(made) in left} - given
        now = highest = sum(
            level.size_of(made.storage.bytes) for made in ending if id(made) in own | given
        )
        for made, form in waiting:
            now += level.size_of(self._kept(form))
            highest = max(highest, now + level.size_of(form.cost.scratch_bytes))
            left[id(made)] -= 1
            if not left[id(made)] and id(made) in own:
                now -= level.size_of(made.storage.bytes)
        return highest - sum(level.size_of(self._kept(form)) for _, form in waiting)

    def _is_dropped(self, made: StoredValue) -> bool:
        """Whether no second half comes by where it is saved."""
        if not self.splits or not made.holders or self.is_sent(made.storage):
            return False
        return self.halves.passed_twice.isdisjoint(made.holders)

    def _parcels(self) -> Iterator[MessageStorage]:
        """What is sent; where there are no halves, all that the backward needs counts as needed by the second."""
        for made in (*self.made, *self.spread):
            if names := self.sent_in(made.storage):
                is_needed = not self._passed.isdisjoint(made.holders)
                yield MessageStorage(
                    names=names,
                    size=self.allocator.amount([made.storage.bytes]),
                    is_needed_by_weight_backward=is_needed,
                )
        for tensor in self.copied:
            yield MessageStorage(
                names=(tensor.producer,),
                size=self.allocator.amount([tensor.bytes]),
                is_needed_by_weight_backward=False,
            )

    def _given_back(self, *, hold: bool) -> Iterator[MessageStorage]:
        """The gradients of inputs that take memory; what a first half lends, the second needs."""
        for names, size, lent in self.gradients.returned(hold=hold):
            yield MessageStorage(
                names=names, size=self.allocator.amount([size]), is_needed_by_weight_backward=lent
            )

    def _wanted(self) -> Iterator[str]:
        """What arrives and is needed in a second half: autograd's nodes hold inputs that they lead to."""
        for tensor, _ in self.arriving:
            savers = {
                place for place in self._passed if tensor.storage in self.graph.nodes[place].saved
            }
            is_saved = savers and tensor.storage is not None and not tensor.strided_copy_bytes
            if is_saved or not self._passed.isdisjoint(self.giving(tensor)):
                yield tensor.producer

    def _freed(self, *, half: bool = False) -> Iterator[LivenessChange]:
        """What the backward, or its second half, lets go of what was kept; outputs stay until it ends."""
        for made in (*self.made, *self.spread):
            if (
                made.holders
                and not self.is_sent(made.storage)
                and not (half and self._is_dropped(made))
            ):
                yield LivenessChange(made.holders[0], made.storage.bytes, begins=False)
        for form in self._forms:
            yield LivenessChange(form.savers[0], self._kept(form), begins=False)
            if not half:
                yield LivenessChange(form.savers[0], form.full, begins=False)  # which came back
        for region, size in self._copied_by_regions(again=True):
            yield LivenessChange(region[0], size, begins=False)

    def _freed_outputs(self) -> Iterator[LivenessChange]:
        for made in (*self.made, *self.spread):
            if self.is_sent(made.storage) and not self._passed.isdisjoint(made.holders):
                yield LivenessChange(made.holders[0], made.storage.bytes, begins=False)

    @property
    def _passed(self) -> set[int]:
        """What a second half leads through, which is all if there is no first one."""
        return self.halves.passed_twice if self.splits else self.inside

    def _copies(self, *, early: bool = False) -> Iterator[LivenessChange]:
        """What was computed again is let go where it is needed last; `early` before the backward of that node."""
        for made in self.made:
            for copy in made.copies:
                if copy.early == early:
                    yield LivenessChange(copy.place, made.storage.bytes, begins=False)

    @cached_property
    def _levels(self) -> tuple[Counting, Counting]:
        return Counting(1, int), Counting(BOUND_SCRATCH, self.allocator.rounded)

    @cached_property
    def _entries_by_level(
        self,
    ) -> tuple[Mapping[int, Sequence[_Entry]], Mapping[int, Sequence[_Entry]]]:
        first, second = map(self._entries, self._levels)
        return first, second

    def _entries(self, level: Counting) -> dict[int, list[_Entry]]:
        """The regions by the node whose backward computes them again, from the outermost on; then what is let go.

        With what comes back, by the node for whose backward it does: one storage after the other.
        """
        found: dict[int, list[_Entry]] = defaultdict(list)
        for index in sorted(range(len(self.regions)), key=lambda index: -len(self.regions[index])):
            place = self.called(index)
            if place is not None:
                found[place].append(self._entry(index, level))
        for place, size, _ in self._copies(early=True):
            found[place].append(_Entry(0, -level.size_of(size)))
        for form in self._forms:
            full = level.size_of(form.full)
            found[form.back].append(_Entry(full + level.size_of(form.cost.scratch_bytes), full))
        return found

    def _entry(self, region: int, level: Counting) -> _Entry:
        """The forward once more, of the nodes that must run for what the region holds."""
        nodes = self.run_again(region)
        inside, again = set(nodes), set(self.regions[region])
        here = [
            (made, any(copy.region == region for copy in made.copies))
            for made in self.made
            if made.place in inside
        ]
        changes = [
            change for made, held in here for change in self._once_more(made, again, held=held)
        ]
        rises = [self.graph.nodes[place].forward_peak_bytes for place in nodes]
        peak = self._highest(nodes, changes, rises, level)
        return _Entry(peak, sum(level.size_of(made.storage.bytes) for made, held in here if held))

    def _once_more(
        self, made: StoredValue, region: set[int], *, held: bool
    ) -> Iterator[LivenessChange]:
        """A storage while its region is computed again: what the region holds or returns lives to the end."""
        yield LivenessChange(made.place, made.storage.bytes, begins=True)
        if not held and region.issuperset(made.storage.readers):
            yield LivenessChange(
                self.last_read(made.place, made.storage), made.storage.bytes, begins=False
            )

    def _input_peak(self) -> Amount:
        made = (
            LivenessChange(places[-1], parameter.bytes, begins=True)
            for parameter, places in self.gradients.early
        )
        changes = [*self.gradients.flowing(hold=True), *made]
        dropped = sum(
            made.storage.bytes for made in (*self.made, *self.spread) if self._is_dropped(made)
        )
        return self._peak(
            changes,
            list(self.gradients.first_rises()),
            self.gradients.last_sums(hold=True, dropped=dropped),
        )

    def _peak(
        self,
        changes: Iterable[LivenessChange],
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
        found = []
        for level, entries in zip(self._levels, self._entries_by_level, strict=True):
            begun = self._packings(level) if forward else entries if again else NO_ENTRIES
            last = {place: level.size_of(size) for place, size in sums.items()}
            last |= self._settlings(level) if forward else {}
            found.append(self._highest(nodes, changes, rises, level, last, begun))
        return Amount(expected=found[0], bound=found[1])

    def _highest(
        self,
        nodes: Sequence[int],
        changes: Iterable[LivenessChange],
        rises: Sequence[int],
        level: Counting,
        last: Mapping[int, int] = NO_SUMS,
        entries: Mapping[int, Sequence[_Entry]] = NO_ENTRIES,
    ) -> int:
        """What begins in a node is part of its rise, to which the scratch of its kernels comes; sums come `last`."""
        after: dict[int, int] = defaultdict(int)
        padding: dict[int, int] = defaultdict(int)
        for place, size, begins in changes:
            counted = level.size_of(size)
            if begins:
                after[place] += counted
                padding[place] += counted - size
            else:
                after[place] -= counted
        now = highest = 0
        for place, rise in zip(nodes, rises, strict=True):
            scratch = self.graph.nodes[place].workspace_bytes
            begun = entries.get(place, ())
            for entry in begun:
                highest = max(highest, now + entry.peak)
                now += entry.left
            if rise or begun or place in padding:
                beside = max((entry.beside for entry in begun), default=0) + padding.get(place, 0)
                highest = max(highest, now + self.needed(rise, scratch, level) + beside)
            if place in after:
                now += after[place]
            highest = max(highest, now + last.get(place, 0))
        return highest
