"""Runs of a stage's nodes that may save by policies, the one that frees a byte in the least time first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from pipecompile.ir.encodings import POLICIES, Policy
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Saving
from pipecompile.memory_model.encoding_costs import SavingCost
from pipecompile.memory_model.encodings import Run, forms_of
from pipecompile.memory_model.live_ranges import Lives
from pipecompile.memory_model.recompute_problem import boundaries
from pipecompile.memory_model.stage_values import Part

__all__ = ["EncodingOffer", "encoding_offers"]


# Of a GPU's link to its host: what copies of pinned memory reach over PCIe 3.0 × 16, an assumption and not measured.
HOST_BYTES_PER_NS = 12


class EncodingOffer(NamedTuple):
    """A run that may save by policies, and what it takes for each byte that it frees."""

    ns_per_byte: Fraction
    saving: Saving


class _Span(NamedTuple):
    """Positions `start` … `stop` − 1, where `policies` make something smaller."""

    start: int
    stop: int
    policies: frozenset[Policy]


def encoding_offers(
    lives: Lives, before: Iterable[str], nodes: Sequence[str], policies: Collection[Policy]
) -> tuple[EncodingOffer, ...]:
    """The runs of a stage for these policies, each as short as it can be; without those that free nothing.

    Kernels that encode take as long per byte as the fastest of the graph. Of what moves to the host on a GPU, the time
    counts that the run's own nodes do not take. `nodes` are in the order of the graph.
    """
    part = Part(
        lives, {lives.place[name] for name in before}, sorted(map(lives.place.__getitem__, nodes))
    )
    spans = _joined(
        _widened(part, _spans(part, policies)), [block_of(node.module) for node in part.own]
    )
    ordered = {
        span: tuple(policy for policy in POLICIES if policy in span.policies) for span in spans
    }
    runs = [Run(tuple(part.nodes[span.start : span.stop]), ordered[span]) for span in spans]
    found = _priced(Part(lives, part.before, part.nodes, (), runs), runs)
    return tuple(sorted(found, key=lambda offer: offer.ns_per_byte))


def _spans(part: Part, policies: Collection[Policy]) -> Iterator[_Span]:
    """For each storage that all its savers together could keep in fewer bytes: where these are.

    By use they must be in one run, so that it is known that nobody else reads it; otherwise each is by itself.
    """
    by_use = frozenset(policies) & {"relu", "pool"}
    position = {place: index for index, place in enumerate(part.nodes)}
    for made in part.made:
        savers = [place for place in made.storage.savers if place in position]
        if not savers or part.is_sent(made.storage):
            continue
        others = (frozenset([policy]) for policy in POLICIES if policy in set(policies) - by_use)
        for chosen in filter(None, (by_use, *others)):
            run = Run(tuple(savers), tuple(policy for policy in POLICIES if policy in chosen))
            forms, plain = forms_of(
                made.storage, savers, dict.fromkeys(savers, run), part.graph.memory
            )
            if plain or sum(form.kept(part.graph.memory) for form in forms) >= made.storage.bytes:
                continue
            places = [position[place] for place in savers]
            if chosen is by_use:
                yield _Span(places[0], places[-1] + 1, chosen)
            else:
                yield from (_Span(place, place + 1, chosen) for place in places)
            break


def _widened(part: Part, spans: Iterable[_Span]) -> Iterator[_Span]:
    """To where runs may begin and end; without those that hold a node which must be in none."""
    allowed = boundaries(part)
    for span in spans:
        start = max(place for place in allowed if place <= span.start)
        stop = min(place for place in allowed if place >= span.stop)
        if all(node.again for node in part.own[start:stop]):
            yield _Span(start, stop, span.policies)


def _joined(spans: Iterable[_Span], blocks: Sequence[str]) -> list[_Span]:
    """Those that overlap as one, and those of the same policies that follow each other in one of the model's blocks.

    But for policies that make all wait until the run is done.
    """
    found: list[_Span] = []
    for span in sorted(spans, key=lambda span: span[:2]):
        last = found[-1] if found else _Span(-1, -1, frozenset())
        follows = span.start == last.stop and blocks[last.stop - 1] == blocks[span.start]
        alike = span.policies == last.policies and not span.policies & {"relu", "pool"}
        if span.start < last.stop or (follows and alike):
            found[-1] = _Span(last.start, max(last.stop, span.stop), last.policies | span.policies)
        else:
            found.append(span)
    return found


def _priced(part: Part, runs: Sequence[Run]) -> Iterator[EncodingOffer]:
    """Those that free anything. What several runs save together counts in equal parts: it needs all of them."""
    freed, costs = defaultdict[Run, Fraction](Fraction), {run: _Bytes() for run in runs}
    for made in part.made:
        sharers = {part.run[place] for form in made.forms for place in form.savers}
        for run in sharers if not part.is_kept(made) else ():
            freed[run] += Fraction(made.storage.bytes, len(sharers))
        for form in made.forms:
            owners = {part.run[place] for place in form.savers}
            for run in owners:
                freed[run] -= Fraction(form.kept(part.graph.memory), len(owners))
                costs[run] = costs[run].plus(form.cost, len(owners))
    for run in runs:
        if freed[run] > 0:
            forward, backward = _times_ns(part, run, costs[run])
            names = tuple(part.graph.nodes[place].name for place in run.places)
            saving = Saving(
                nodes=names, policies=run.policies, forward_ns=forward, backward_ns=backward
            )
            yield EncodingOffer(saving.ns / freed[run], saving)


class _Bytes(NamedTuple):
    """What a run moves: by kernels that encode and decode, and over the link, one way."""

    packed: Fraction = Fraction(0)
    unpacked: Fraction = Fraction(0)
    host: Fraction = Fraction(0)

    def plus(self, cost: SavingCost, parts: int) -> _Bytes:
        """With one of so many parts of `cost`."""
        more = cost.packing_bytes, cost.unpacking_bytes, cost.host_bytes
        return _Bytes(
            *(size + Fraction(each, parts) for size, each in zip(self, more, strict=True))
        )


def _times_ns(part: Part, run: Run, moved: _Bytes) -> tuple[int, int]:
    """Extra time in the forward and in the backward."""
    rate, link = part.lives.bytes_per_ns, 0
    if part.graph.memory == "cuda":
        link = ceil(moved.host / HOST_BYTES_PER_NS)
    nodes = [part.graph.nodes[place] for place in run.places]
    hidden = sum(node.forward_ns for node in nodes), sum(node.backward_ns for node in nodes)
    packing, unpacking = (
        ceil(size / rate) if rate else 0 for size in (moved.packed, moved.unpacked)
    )
    return packing + max(0, link - hidden[0]), unpacking + max(0, link - hidden[1])
