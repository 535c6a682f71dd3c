"""What one stage holds, by position: for a choice of what to compute again. Part of the memory model, see memory.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipecompile.ir.lives import Lives
from pipecompile.ir.part import BOUND_SCRATCH, Change, Level, Made, Part
from pipecompile.ir.tape import Held, Tape

__all__ = ["tape_of"]


def tape_of(lives: Lives, before: Iterable[str], nodes: Iterable[str], *, summed: bool) -> Tape:
    """The same stage for a choice of regions: in the first backward of a step, or with gradients `summed` before."""
    places = sorted(map(lives.place.__getitem__, nodes))
    return _tape(Part(lives, {lives.place[name] for name in before}, places, ()), summed=summed)


def _tape(part: Part, *, summed: bool) -> Tape:
    """By position, as a bound counts."""
    level = Level(BOUND_SCRATCH, part.allocator.rounded)
    position = {place: index for index, place in enumerate(part.nodes)}
    sums_of_parameters = part.added_gradients() if summed else part.made_gradients()
    flowing, before, after = _gradient_levels(part, [*part.flowing(), *sums_of_parameters], level)
    padding = [sum(level.size_of(s.bytes) - s.bytes for s in part.lives.storages.get(p, ())) for p in part.nodes]
    return Tape(
        ns=tuple(node.forward_ns for node in part.own),
        packs=tuple(node.packs for node in part.own),
        forward=tuple(
            part.needed(node, node.forward_peak_bytes, level) + more
            for node, more in zip(part.own, padding, strict=True)
        ),
        flowing=flowing,
        before=before,
        after=after,
        held=tuple(_held(part, made, position, level) for made in part.made),
        boundaries=_boundaries(part, position),
        fixed=frozenset(position[place] for place in part.nodes if not part.graph.nodes[place].again),
    )


def _held(part: Part, made: Made, position: Mapping[int, int], level: Level) -> Held:
    storage = made.storage
    return Held(
        level.size_of(storage.bytes),
        position[made.place],
        tuple(position[place] for place in storage.readers if place in position),
        tuple(position[place] for place in storage.savers if place in position),
        part.is_sent(storage),
    )


def _gradient_levels(part: Part, changes: Sequence[Change], level: Level) -> Iterator[tuple[int, ...]]:
    """What a backward has of gradients when a node's begins, what it needs then, and what lives when it is done."""
    found = []
    now = 0
    by_place = defaultdict[int, list[tuple[int, int, bool]]](list)
    for at, size, begins in changes:
        by_place[at].append((level.size_of(size), size, begins))
    for place, node in reversed(list(zip(part.nodes, part.own, strict=True))):
        here = by_place[place]
        padding = sum(counted - size for counted, size, begins in here if begins)
        needed = part.needed(node, node.backward_peak_bytes, level) + padding
        done = now + sum(counted if begins else -counted for counted, _, begins in here)
        found.append((now, now + needed, done + level.size_of(part.sums.get(place, 0))))
        now = done
    return zip(*reversed(found), strict=True)


def _boundaries(part: Part, position: Mapping[int, int]) -> tuple[int, ...]:
    """Where nothing that belongs together lies on both sides."""
    named = {part.graph.nodes[place].name: index for place, index in position.items()}
    members = ([named[name] for name in names if name in named] for names in part.graph.together)
    inside = {index for places in members if places for index in range(min(places) + 1, max(places) + 1)}
    return tuple(index for index in range(len(part.nodes) + 1) if index not in inside)
