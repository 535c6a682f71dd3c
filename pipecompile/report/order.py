"""The scheduler's answer for people: how good it is, what the named schedules are worth, where ranks wait."""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir.schedule import Timeline
from pipecompile.ir.schedule_problem import NamedOrder, Order
from pipecompile.report.text import idle_shares, size_text, table, time_text, timeline_text

__all__ = ["order_text", "order_title"]

_WIDTH = 92  # of an order, beside its rank


def order_text(order: Order, timeline: Timeline) -> str:
    """Figures, the named schedules beside it, idle time and memory of each rank, and the beginning of the orders."""
    parts = [_header(order), order.violations, _named(order), _ranks(order), _orders(order)]
    return "\n\n".join(
        ["\n".join(part) for part in map(list, parts) if part] + [timeline_text(timeline)]
    )


def order_title(order: Order) -> str:
    """What it is, in one line."""
    sizes = f"{len(order.placement)} stages on {len(order.orders)} ranks, {order.microbatches} microbatches"
    return f"{order.name}: {sizes}"


def _header(order: Order) -> Iterator[str]:
    placed = "" if order.shape == "own" else f" ({order.shape})"
    yield f"{order_title(order)}{placed}"
    yield f"  makespan   {time_text(order.makespan_ns)}{_bounded(order, 'makespan')}"
    yield f"  span       {time_text(order.span_ns)} at most from a rank's start to its end{_bounded(order, 'span')}"
    yield f"  bubble     {order.bubble:.1%}"
    yield f"  memory     {_memory(order)}"
    if order.weight_versions != "synchronous":
        step = next(
            (
                text
                for row in order.orders
                for text in row
                if "STEP" in text and text.endswith("@1")
            ),
            "",
        )
        made = f", {step} makes version 1" if step else ""
        yield f"  weights    {order.weight_versions}: versions stand behind the @{made}; no flush"
    if order.asked == "search":
        yield f"  search     {_gain(order)}; {order.seconds:.2f} s"


def _bounded(order: Order, objective: str) -> str:
    """The bound, behind the figure that it is for; orders over the caps are beyond it."""
    if order.objective != objective or order.lower_bound_ns is None or not order.fits:
        return ""
    proof = "proven" if order.proven else "not proven"
    return (
        f", bound {time_text(order.lower_bound_ns)}, ratio {_ratio(order.value_ns, order)}, {proof}"
    )


def _ratio(value: int, order: Order) -> str:
    return f"{value / order.lower_bound_ns:.4f}" if order.lower_bound_ns else "-"


def _memory(order: Order) -> str:
    largest = size_text(max(order.peak_bytes))
    if order.memory_bytes is None:
        return f"at most {largest} on a rank; no cap"
    return f"at most {largest} on a rank; {'fits' if order.fits else 'does not fit'}"


def _gain(order: Order) -> str:
    best = order.best_named
    if best is None:
        return "no named schedule fits"
    if order.name != "search":
        return f"nothing better than {order.name}"
    gain = f"{1 - order.value_ns / best.value_ns:.2%}"
    return f"{gain} less than {best.name} ({best.shape}), the best named one that fits"


def _named(order: Order) -> Iterator[str]:
    if order.named:
        rows = [["named", "placed", order.objective, "ratio", "memory"]]
        rows += [
            [other.name, other.shape, time_text(other.value_ns), *_worth(other, order)]
            for other in order.named
        ]
        yield from table(rows, left={0, 1, 4})


def _worth(other: NamedOrder, order: Order) -> tuple[str, str]:
    """Its ratio to the bound, which only those within the caps have, and whether it is one of those."""
    held = size_text(other.peak_bytes)
    if other.over_bytes:
        return "-", f"{held}, {size_text(other.over_bytes)} over"
    return _ratio(other.value_ns, order), held if order.memory_bytes is None else f"{held}, fits"


def _ranks(order: Order) -> Iterator[str]:
    causes = ("dependency", "transfer", "memory", "imbalance")
    rows = [["rank", "idle", *causes, "peak", "cap"]]
    for rank, (idle, peak) in enumerate(zip(order.idle, order.peak_bytes, strict=True)):
        cap = "none" if order.memory_bytes is None else size_text(order.memory_bytes[rank])
        rows.append([str(rank), *idle_shares(idle, order.makespan_ns), size_text(peak), cap])
    return table(rows, left=set())


def _orders(order: Order) -> Iterator[str]:
    for rank, row in enumerate(order.orders):
        text = " ".join(row)
        yield f"{rank:>4} {text if len(text) <= _WIDTH else f'{text[: _WIDTH - 1]}…'}"
