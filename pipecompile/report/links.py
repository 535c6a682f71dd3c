"""How ranks are connected, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipecompile.ir.links import Link, Links
from pipecompile.report.text import own_texts, table

__all__ = ["links_table"]


def links_table(links: Links) -> str:
    """Bandwidth and latency from each rank (row) to each other one, and what messages take of the ranks."""
    ranks = links.ranks or 2
    parts = [
        _matrix("GB/s", ranks, lambda a, b: _rate(links.link(a, b))),
        _matrix("µs", ranks, lambda a, b: f"{links.link(a, b).latency_ns / 1000:.1f}"),
        own_texts(links),
    ]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


def _matrix(unit: str, ranks: int, cell: Callable[[int, int], str]) -> Iterator[str]:
    rows = [[unit, *(f"to {rank}" for rank in range(ranks))]]
    rows += [
        [f"from {a}", *("-" if a == b else cell(a, b) for b in range(ranks))] for a in range(ranks)
    ]
    return table(rows, left={0})


def _rate(link: Link) -> str:
    return (
        "any" if link.bandwidth_bytes_per_s is None else f"{link.bandwidth_bytes_per_s / 1e9:.2f}"
    )
