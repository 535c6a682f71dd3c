"""What one stage holds, by position: for a choice of what to compute again. Part of the memory model, see memory.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add

from pipecompile.ir.encodings import Policy
from pipecompile.memory_model.encodings import EncodedPlaces
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.stage_values import BOUND_SCRATCH, Counting, StoredValue, StageValues
from pipecompile.memory_model.subgraph import LivenessChange

__all__ = ["StoredTensor", "RecomputeProblem", "boundaries", "recompute_problem_of"]


@dataclass(frozen=True)
class StoredTensor:
    """A storage by the positions of a stage's nodes: who produces, uses and saves it.

    `producer` is −1 for what is there before the first node. `uses` read it or save it in the
    forward, `savers` keep it for their backward. What `is_sent` to later stages is held until the
    backward ends, whatever is recomputed. What is copied for later stages lives until the position
    `copied_at`, the stage's last, is done and the copies are made.
    """

    bytes: int
    producer: int
    uses: tuple[int, ...]
    savers: tuple[int, ...]
    is_sent: bool
    copied_at: int | None = None

    @property
    def last_use(self) -> int:
        """The last position that needs it in the forward."""
        if self.copied_at is not None:
            return self.copied_at
        return max((*self.uses, *self.savers), default=self.producer)


@dataclass(frozen=True)
class RecomputeProblem:
    """What a choice of recompute must know of a stage, by position 0 … n − 1 of its nodes.

    Bytes are those of one microbatch, as a bound counts them. `saves_at` says when a node's forward
    hands tensors to its backward: "before" its kernels run, "after" them, or "never".
    `forward_peak` is what must be free when a node's forward begins. `backward_peak` is what must be
    free when its backward begins: gradients and workspace, of which `gradients_before` live already,
    and `gradients_after` live when it is done, sums of gradients included. What the forward kept
    comes on top of these.

    A region keeps `buffer_copies` of the buffers that its nodes write to. Regions begin and end at
    `boundaries`, among 0 … n, and contain none of the `excluded` positions. When the last node is
    done, `sent_copies` bytes of copies are made for later stages.
    """

    forward_ns: tuple[int, ...]
    saves_at: tuple[str, ...]
    forward_peak: tuple[int, ...]
    gradients_before: tuple[int, ...]
    backward_peak: tuple[int, ...]
    gradients_after: tuple[int, ...]
    tensors: tuple[StoredTensor, ...]
    buffer_copies: tuple[int, ...]
    boundaries: tuple[int, ...]
    excluded: frozenset[int] = frozenset()
    sent_copies: int = 0

    @cached_property
    def sent_bytes(self) -> int:
        """What is held for later stages."""
        return self.sent_copies + sum(t.bytes for t in self.tensors if t.is_sent)


def recompute_problem_of(
    lives: LiveRanges,
    before: Iterable[str],
    nodes: Iterable[str],
    *,
    summed: bool,
    encoded_runs: Iterable[tuple[Iterable[str], tuple[Policy, ...]]] = (),
) -> RecomputeProblem:
    """The same stage for a choice of regions: in the first backward of a step, or with gradients `summed` before.

    Nodes that save by policies, as in `footprint_of`, are in no region.
    """
    places = sorted(map(lives.place.__getitem__, nodes))
    runs = [
        EncodedPlaces(tuple(sorted(map(lives.place.__getitem__, names))), policies)
        for names, policies in encoded_runs
    ]
    return _tape(
        StageValues(lives, {lives.place[name] for name in before}, places, (), runs), summed=summed
    )


def _tape(part: StageValues, *, summed: bool) -> RecomputeProblem:
    """By position, as a bound counts."""
    level = Counting(BOUND_SCRATCH, part.allocator.rounded)
    position = {place: index for index, place in enumerate(part.nodes)}
    sums_of_parameters = part.gradients.adding() if summed else part.gradients.making()
    flowing, before, after = _gradient_levels(
        part, [*part.gradients.flowing(), *sums_of_parameters], level
    )
    padding = [
        sum(level.size_of(s.bytes) - s.bytes for s in part.lives.storages.get(p, ()))
        for p in part.nodes
    ]
    forms = _Forms(part, position, level)
    return RecomputeProblem(
        forward_ns=tuple(node.forward_ns for node in part.own),
        saves_at=tuple(node.saves_at for node in part.own),
        forward_peak=tuple(
            part.needed(node.forward_peak_bytes, node.workspace_bytes, level) + sum(more)
            for node, *more in zip(part.own, padding, forms.forward, strict=True)
        ),
        gradients_before=tuple(map(add, flowing, forms.flowing)),
        backward_peak=tuple(map(add, before, forms.before)),
        gradients_after=tuple(map(add, after, forms.after)),
        tensors=(
            *(_held(part, made, position, level) for made in (*part.spread, *part.made)),
            *forms.held,
        ),
        buffer_copies=tuple(sum(map(level.size_of, node.buffer_copies)) for node in part.own),
        boundaries=boundaries(part),
        excluded=frozenset(
            position[p]
            for p in part.nodes
            if p in part.run or not part.graph.nodes[p].is_recomputable
        ),
        sent_copies=sum(level.size_of(tensor.bytes) for tensor in part.copied),
    )


def _held(
    part: StageValues, made: StoredValue, position: Mapping[int, int], level: Counting
) -> StoredTensor:
    storage, formed = made.storage, {place for form in made.forms for place in form.savers}
    is_copied = part.is_copied(storage)
    uses = sorted({*storage.readers, *(() if is_copied else (made.last,))} - {made.place})
    return StoredTensor(
        level.size_of(storage.bytes),
        position.get(made.place, -1),
        tuple(position[place] for place in uses if place in position),
        tuple(
            position[place] for place in storage.savers if place in position and place not in formed
        ),
        part.is_sent(storage),
        len(part.nodes) - 1 if is_copied else None,
    )


class _Forms:
    """What forms of storages add to a tape: themselves, and by position what lives besides."""

    def __init__(self, part: StageValues, position: Mapping[int, int], level: Counting) -> None:
        count = len(part.nodes)
        self.forward, self.flowing, self.before, self.after = ([0] * count for _ in range(4))
        self.held: list[StoredTensor] = []
        for form in (form for made in part.made for form in made.forms):
            savers = tuple(position[place] for place in form.savers)
            kept, full = level.size_of(form.kept(part.graph.allocator)), level.size_of(form.full)
            self.held.append(StoredTensor(kept, savers[0], (), savers, is_sent=False))
            # All that a node makes at once, each with its scratch: a bound.
            self.forward[position[form.made]] += kept + level.size_of(form.cost.scratch_bytes)
            self._bring_back(full, savers[0], position[form.back])
            self.before[position[form.back]] += level.size_of(form.cost.scratch_bytes)

    def _bring_back(self, full: int, first: int, back: int) -> None:
        """It is there from the backward of the last saver to that of the first."""
        for place in range(first, back + 1):
            self.before[place] += full
            self.flowing[place] += full if place < back else 0
            self.after[place] += full if place > first else 0


def _gradient_levels(
    part: StageValues, changes: Sequence[LivenessChange], level: Counting
) -> Iterator[tuple[int, ...]]:
    """What a backward has of gradients when a node's begins, what it needs then, and what lives when it is done."""
    found = []
    now = 0
    sums = part.gradients.last_sums()
    by_place = defaultdict[int, list[tuple[int, int, bool]]](list)
    for at, size, begins in changes:
        by_place[at].append((level.size_of(size), size, begins))
    for place, node in reversed(list(zip(part.nodes, part.own, strict=True))):
        here = by_place[place]
        padding = sum(counted - size for counted, size, begins in here if begins)
        needed = part.needed(node.backward_peak_bytes, node.workspace_bytes, level) + padding
        done = now + sum(counted if begins else -counted for counted, _, begins in here)
        found.append((now, now + needed, done + level.size_of(sums.get(place, 0))))
        now = done
    return zip(*reversed(found), strict=True)


def boundaries(part: StageValues) -> tuple[int, ...]:
    """Positions between nodes such that nothing that belongs together lies on both sides."""
    named = {node.name: index for index, node in enumerate(part.own)}
    members = (
        [named[name] for name in names if name in named] for names in part.graph.recomputed_together
    )
    inside = {
        index for places in members if places for index in range(min(places) + 1, max(places) + 1)
    }
    return tuple(index for index in range(len(part.nodes) + 1) if index not in inside)
