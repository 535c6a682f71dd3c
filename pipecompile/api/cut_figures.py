"""The figures of one audited cut, from its plan. Needs no PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pipecompile.cost_models.device import devices_of, load_device
from pipecompile.errors import InputError
from pipecompile.ir.audit import AuditedCut, AuditedPart, Grain
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import LayoutFormat, Options, Plan
from pipecompile.ir.size import caps_by_rank
from pipecompile.layouts.export import export_layout
from pipecompile.layouts.grains import Sections
from pipecompile.layouts.sections import Section
from pipecompile.memory_model.lower_bounds import bytes_lower_bounds

__all__ = ["CutFigures", "caps_of", "parts_of"]


@dataclass(frozen=True)
class CutFigures:
    """What is the same for all cuts of one audit: the graph, the options of the layout's plan, and
    the sections of the nodes by layers, if the model has layers.
    """

    graph: CostGraph
    options: Options
    layers: Sections | None

    def of(self, plan: Plan, grain: Grain | None, bound_ns: int, step_bound_ns: int) -> AuditedCut:
        """Return the figures of the cut of `plan`; the bounds are those of its grain."""
        form, text = self._text(plan, grain)
        prediction = plan.prediction
        return AuditedCut(
            grain=grain,
            loads_ns=prediction.loads_ns,
            heaviest_ns=plan.search.values["max_load_ns"],
            bound_ns=bound_ns,
            step_ns=prediction.step_ns,
            step_bound_ns=step_bound_ns,
            bubble=prediction.bubble,
            memory=tuple(rank.total.bound for rank in prediction.memory),
            memory_bound=self._held_on_average // plan.ranks,
            parts=self._on_heaviest_rank(plan),
            form=form,
            text=text,
        )

    def _text(self, plan: Plan, grain: Grain | None) -> tuple[str, str]:
        """Return a format that can say the cut, and the cut in it; twice "" if none can."""
        assert self.options.layout is not None and self.options.layout_format is not None
        if grain is None:
            return self.options.layout_format, self.options.layout
        # A hybrid pattern says what Megatron's string cannot: cuts within a layer.
        formats: tuple[LayoutFormat, ...] = (self.options.layout_format, "megatron-hybrid")
        for layout_format in formats:
            try:
                layout = export_layout(plan, layout_format, self.options.layers)
            except InputError:
                continue
            return layout_format, layout.text.rstrip()
        return "", ""

    @cached_property
    def _held_on_average(self) -> int:
        """Bytes that all ranks together hold at their peaks, whatever the cut.

        Each stage has at least one microbatch in flight.
        """
        resident, saved = bytes_lower_bounds(
            self.graph, self.options.recompute, gradients=False, encodings=self.options.encodings
        )
        return sum(resident.values()) + sum(saved.values())

    def _on_heaviest_rank(self, plan: Plan) -> dict[str, float]:
        """Return how many sections lie on the heaviest rank, by symbol: of one that is parted, the
        share of its time.
        """
        if self.layers is None:
            return {}
        loads, ranks = plan.prediction.loads_ns, plan.schedule.stage_ranks
        heaviest, stage = loads.index(max(loads)), plan.assignment
        whole, here = Counter[Section](), Counter[Section]()
        for node, section in zip(self.graph.nodes, self.layers, strict=True):
            if section is not None:
                ns = node.forward_ns + node.backward_ns
                whole[section] += ns
                # A layer of 10 ms, of which 4 ms lie on the heaviest rank, counts as 0.4 of one;
                # with three whole layers beside it that rank has {"t": 3.4}.
                here[section] += ns * (heaviest in ranks[stage[node.name]])
        shares: dict[str, float] = {}
        for section, ns in here.items():
            if ns:
                shares[section.symbol] = shares.get(section.symbol, 0) + ns / whole[section]
        return {symbol: round(share, 2) for symbol, share in shares.items()}


def parts_of(graph: CostGraph, sections: Sections) -> Iterator[AuditedPart]:
    """Yield the sections that take the same times together, in the order of the forward."""
    forward, backward = Counter[Section](), Counter[Section]()
    for node, section in zip(graph.nodes, sections, strict=False):
        if section is not None:
            forward[section] += node.forward_ns
            backward[section] += node.backward_ns
    # Thirty-two layers that take the same times are one line "32 ×", and one that differs by a
    # nanosecond is another: rounding is left to who prints it.
    alike = Counter((part.symbol, forward[part], backward[part]) for part in forward)
    for (name, forward_ns, backward_ns), count in alike.items():
        yield AuditedPart(name=name, count=count, forward_ns=forward_ns, backward_ns=backward_ns)


def caps_of(options: Options, ranks: int) -> tuple[int, ...] | None:
    """Return the cap of each rank, or what the costs' device has; None if neither is known."""
    if options.memory_bytes is not None:
        return caps_by_rank(options.memory_bytes, ranks)
    kind, _, text = options.costs.partition(":")
    if kind != "roofline":
        return None
    sizes = tuple(load_device(name).memory_bytes for name in devices_of(text))
    return sizes * ranks if len(sizes) == 1 else sizes
