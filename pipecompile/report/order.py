"""The scheduler's answer for people: quality, named schedules beside it, where ranks wait."""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.plurals import counted
from pipecompile.ir.schedule import Timeline
from pipecompile.ir.schedule_problem import NamedOrder, Order
from pipecompile.ir.size import size_text
from pipecompile.report.tables import DrawTable, plain_table
from pipecompile.report.timeline_text import IDLE_CAUSES, idle_shares, timeline_text
from pipecompile.report.units import RELATIVE_NOTE, gap_text

__all__ = ["order_text", "order_title"]

_WIDTH = 92  # of an order, beside its rank


def order_text(
    order: Order,
    timeline: Timeline,
    draw: DrawTable = plain_table,
    time_unit: TimeUnit = "ns",
) -> str:
    """Return what `pipecompile schedule` prints: figures, named schedules, ranks, orders."""
    parts = [
        _header(order, time_unit),
        order.violations,
        _named(order, draw, time_unit),
        _ranks(order, draw),
        _orders(order),
    ]
    texts = ["\n".join(part) for part in map(list, parts) if part]
    return "\n\n".join([*texts, timeline_text(timeline)])


def order_title(order: Order) -> str:
    """Return in one line what the order is for."""
    return (
        f"{order.name}: {counted(len(order.placement), 'stage')} on "
        f"{counted(len(order.orders), 'rank')}, {counted(order.microbatches, 'microbatch')}"
    )


def _header(order: Order, time_unit: TimeUnit) -> Iterator[str]:
    """Yield the figures of the order, each with its name."""
    shape = "" if order.placement_shape == "own" else f" ({order.placement_shape})"
    step = time_with_unit(order.makespan_ns, time_unit)
    span = time_with_unit(order.span_ns, time_unit)
    yield f"{order_title(order)}{shape}"
    if time_unit == "relative":
        yield f"  times      {RELATIVE_NOTE}"
    yield f"  step       {step}{_bound(order, 'makespan', time_unit)}"
    span_bound = _bound(order, "span", time_unit)
    yield f"  span       {span} at most from a rank's start to its end{span_bound}"
    yield f"  bubble     {order.bubble:.1%}"
    yield f"  memory     {_memory(order)}"
    if order.weight_versions != "synchronous":
        yield f"  weights    {order.weight_versions}: {_versions(order)}; no flush"
    if order.request == "search":
        yield f"  search     {_gain(order)}; {order.seconds:.2f} s"


def _versions(order: Order) -> str:
    """Return how versions of the weights are written, with the step that makes version 1 as an
    example.
    """
    steps = [text for row in order.orders for text in row if "STEP" in text]
    first = next((text for text in steps if text.endswith("@1")), None)
    example = f", {first} makes version 1" if first else ""
    return f"the number behind @ is the version{example}"


def _bound(order: Order, objective: str, time_unit: TimeUnit) -> str:
    """Return the lower bound, behind the figure that is the objective; orders over a cap have
    none.
    """
    if order.objective != objective or order.lower_bound_ns is None or not order.fits:
        return ""
    proof = "proven" if order.proven else "not proven"
    bound = time_with_unit(order.lower_bound_ns, time_unit)
    return f", bound {bound}, gap {_gap(order.value_ns, order)}, {proof}"


def _gap(value: int, order: Order) -> str:
    return gap_text((value - order.lower_bound_ns) / value) if order.lower_bound_ns else "-"


def _memory(order: Order) -> str:
    largest = size_text(max(order.peak_bytes))
    if order.memory_bytes is None:
        return f"activations of at most {largest} on a rank; no cap"
    fits = "they fit" if order.fits else "they do not fit"
    return f"activations of at most {largest} on a rank; {fits}"


def _gain(order: Order) -> str:
    best = order.best_named
    if best is None:
        return "no named schedule fits"
    # A search returns a named schedule by its own name where it found none shorter.
    if order.name != "search":
        return f"nothing better than {order.name}"
    # Against the best named order on any placement that was allowed, not on this one alone.
    gain = f"{1 - order.value_ns / best.value_ns:.2%}"
    return f"{gain} less than {best.name} ({best.placement_shape}), the best named one that fits"


def _named(order: Order, draw: DrawTable, time_unit: TimeUnit) -> Iterator[str]:
    if order.named:
        # The step is what plans call the makespan.
        time = "step" if order.objective == "makespan" else order.objective
        rows = [["named", "placed", time, "gap", "activations ≤"]]
        for other in order.named:
            value = time_text(other.value_ns, time_unit)
            rows.append([other.name, other.placement_shape, value, *_gap_and_memory(other, order)])
        yield from draw(rows, {0, 1, 4})


def _gap_and_memory(other: NamedOrder, order: Order) -> tuple[str, str]:
    """Return its gap to the bound, which only orders within the caps have, and its activations."""
    held = size_text(other.peak_bytes)
    if other.over_bytes:
        return "-", f"{held}, {size_text(other.over_bytes)} over"
    fits = "" if order.memory_bytes is None else ", fits"
    return _gap(other.value_ns, order), f"{held}{fits}"


def _ranks(order: Order, draw: DrawTable) -> Iterator[str]:
    # Without caps there is nothing to compare a peak with. What the caps of a plan leave is less
    # than these: parameters, gradients and the optimizer's state have their share.
    caps = order.memory_bytes
    left = ["left for activations"] * (caps is not None)
    rows = [["rank", "idle", *IDLE_CAUSES, "activations ≤", *left]]
    for rank, (idle, peak) in enumerate(zip(order.idle, order.peak_bytes, strict=True)):
        sizes = [peak] if caps is None else [peak, caps[rank]]
        rows.append([str(rank), *idle_shares(idle, order.makespan_ns), *map(size_text, sizes)])
    return draw(rows, ())


def _orders(order: Order) -> Iterator[str]:
    for rank, row in enumerate(order.orders):
        text = " ".join(row)
        yield f"{rank:>4} {text if len(text) <= _WIDTH else f'{text[: _WIDTH - 1]}…'}"
