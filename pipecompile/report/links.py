"""How ranks are connected, for people: as tables, and in a line of a plan's summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipecompile.ir.duration import time_text
from pipecompile.ir.links import Link, Links
from pipecompile.report.tables import DrawTable, plain_table

__all__ = ["link_text", "links_table", "links_text", "overhead_texts"]

_TYPICAL = 1 << 20  # bytes of a message by which links are compared


def links_table(links: Links, draw: DrawTable = plain_table) -> str:
    """Return bandwidth and latency from each rank (row) to each other rank, as two tables."""
    # Links for any number of ranks are alike between all of them: two rows show all.
    ranks = links.ranks or 2

    def latency_text(link: Link) -> str:
        return f"{link.latency_ns / 1000:.1f}"

    parts = [
        _matrix(links, "GB/s", ranks, _rate_text, draw),
        _matrix(links, "µs", ranks, latency_text, draw),
        overhead_texts(links),
    ]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


def _matrix(
    links: Links, unit: str, ranks: int, text: Callable[[Link], str], draw: DrawTable
) -> Iterator[str]:
    rows = [[unit, *(f"to {rank}" for rank in range(ranks))]]
    for source in range(ranks):
        cells = ["-" if source == rank else text(links.link(source, rank)) for rank in range(ranks)]
        rows.append([f"from {source}", *cells])
    return draw(rows, {0})


def _rate_text(link: Link) -> str:
    rate = link.bandwidth_bytes_per_s
    return "any" if rate is None else f"{rate / 1e9:.2f}"


def links_text(links: Links) -> str:
    """Return how ranks are connected in one line, from the slowest to the fastest link."""
    distinct = {link for *_, link in links.pairs()}
    if distinct <= {Link()}:
        return "free: none given"
    # Latency decides for small messages and bandwidth for large ones: one of typical size decides.
    slowest_first = sorted(distinct, key=lambda link: link.transfer_ns(_TYPICAL), reverse=True)
    ends = dict.fromkeys([slowest_first[0], slowest_first[-1]])
    return " – ".join(map(link_text, ends))


def overhead_texts(links: Links) -> Iterator[str]:
    """Yield what a message takes of its sender and its receiver, where it takes anything."""
    for action, link in (("sending", links.sending), ("receiving", links.receiving)):
        if link != Link():
            yield f"{action} keeps a rank for {link_text(link)}"


def link_text(link: Link) -> str:
    """Return bandwidth and latency."""
    rate = link.bandwidth_bytes_per_s
    size = "any size" if rate is None else f"{rate / 1e9:.1f} GB/s"
    return f"{size} + {time_text(link.latency_ns)}"
