"""A profile as a page: one HTML file that needs nothing else, neither scripts nor fonts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pipecompile.ir.graph import Node
from pipecompile.report.markup import bar, document, line
from pipecompile.report.profile import Profile, Row, headline, share, shown, totals
from pipecompile.report.text import size_text, time_text

__all__ = ["profile_page"]

_KEY = "".join(
    f'<i class="{name}"></i>{name}' for name in ("forward", "backward", "saved", "params")
)


def profile_page(title: str, profile: Profile) -> str:
    """The page; the same profile gives the same bytes."""
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p>{escape(headline(profile))} <span class="key">{_KEY}</span></p>',
        *_totals(profile),
        *_section("By module", "module", profile.modules, profile.total),
        *_section(
            "By operator", "operator", shown(profile.operators, profile.total), profile.total
        ),
        *_nodes(profile),
        "<p>Parameters and buffers that several rows read are counted in each. Bars are shares of the whole.</p>",
    ]
    return document(title, body)


def _totals(profile: Profile) -> Iterator[str]:
    yield "<dl>"
    yield from (
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in totals(profile)
    )
    yield "</dl>"


def _section(heading: str, column: str, rows: Sequence[Row], total: Row) -> Iterator[str]:
    yield f"<h2>{heading}</h2>\n<table>"
    yield line(
        "th", [column, "nodes", "forward", "backward", "", "time", "saved", "", "params", ""]
    )
    for row in rows:
        times = (row.forward_ns, row.backward_ns)
        cells = [
            f"<code>{escape(row.name)}</code>",
            str(row.nodes),
            *map(time_text, times),
            bar(zip(("forward", "backward"), times, strict=True), total.time_ns),
            share(row.time_ns, total.time_ns),
            size_text(row.saved_bytes),
            bar([("saved", row.saved_bytes)], total.saved_bytes),
            size_text(row.parameter_bytes),
            bar([("params", row.parameter_bytes)], total.parameter_bytes),
        ]
        yield line("td", cells, kind="part" if row.depth else "")
    yield "</table>"


def _nodes(profile: Profile) -> Iterator[str]:
    yield "<h2>Nodes that take most of the time, with those alike</h2>\n<table>"
    yield line(
        "th", ["node", "alike", "operator", "forward", "backward", "", "time", "saved", "source"]
    )
    yield from (_node(nodes, profile.total) for nodes in profile.heaviest)
    yield "</table>"


def _node(nodes: Sequence[Node], total: Row) -> str:
    first, times = (
        nodes[0],
        (sum(node.forward_ns for node in nodes), sum(node.backward_ns for node in nodes)),
    )
    cells = [
        f"<code>{escape(first.name)}</code>",
        f"×{len(nodes)}" if len(nodes) > 1 else "",
        f"<code>{escape(first.operator)}</code>",
        *map(time_text, times),
        bar(zip(("forward", "backward"), times, strict=True), total.time_ns),
        share(sum(times), total.time_ns),
        size_text(sum(node.saved_bytes for node in nodes)),
        f"<code>{escape(first.source)}</code>",
    ]
    return line("td", cells)
