"""A profile as a page: one HTML file that needs nothing else, neither scripts nor fonts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from pipecompile.ir.graph import Node
from pipecompile.report.profile import Profile, Row, headline, share, shown, totals
from pipecompile.report.text import size_text, time_text

__all__ = ["profile_page"]

_STYLE = """
body { margin: 2rem auto; max-width: 68rem; padding: 0 1.5rem; background: #fbfbfa; color: #1f2328;
  font: 14px/1.5 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .5rem; }
p { color: #59636e; margin: .2rem 0 1.2rem; }
dl { display: flex; flex-wrap: wrap; gap: .6rem; margin: 0; }
dl div { background: #fff; border: 1px solid #d9d9d6; border-radius: 8px; padding: .45rem .8rem; }
dt { color: #59636e; font-size: 12px; } dd { margin: 0; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; background: #fff; border: 1px solid #d9d9d6; }
th, td { padding: .28rem .6rem; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th { color: #59636e; font-weight: 500; border-bottom: 1px solid #d9d9d6; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tr + tr td { border-top: 1px solid #eeeeec; } tr.part td { color: #59636e; }
tr.part td:first-child { padding-left: 2rem; }
code { font: 12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.bar { display: inline-block; width: 6rem; height: .7rem; background: #f0f0ee; border-radius: 2px; overflow: hidden; }
.bar i { display: block; float: left; height: 100%; }
.forward { background: #4f83cc; } .backward { background: #d2741f; }
.saved { background: #6aa56b; } .params { background: #8a77b5; }
.key i { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin: 0 .3rem 0 .8rem; }
"""
_KEY = "".join(f'<i class="{name}"></i>{name}' for name in ("forward", "backward", "saved", "params"))


def profile_page(title: str, profile: Profile) -> str:
    """The page; the same profile gives the same bytes."""
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p>{escape(headline(profile))} <span class="key">{_KEY}</span></p>',
        *_totals(profile),
        *_section("By module", "module", profile.modules, profile.total),
        *_section("By operator", "operator", shown(profile.operators, profile.total), profile.total),
        *_nodes(profile),
        "<p>Parameters and buffers that several rows read are counted in each. Bars are shares of the whole.</p>",
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _totals(profile: Profile) -> Iterator[str]:
    yield "<dl>"
    yield from (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in totals(profile))
    yield "</dl>"


def _section(heading: str, column: str, rows: Sequence[Row], total: Row) -> Iterator[str]:
    yield f"<h2>{heading}</h2>\n<table>"
    yield _line("th", [column, "nodes", "forward", "backward", "", "time", "saved", "", "params", ""])
    for row in rows:
        times = (row.forward_ns, row.backward_ns)
        cells = [
            f"<code>{escape(row.name)}</code>",
            str(row.nodes),
            *map(time_text, times),
            _bar(zip(("forward", "backward"), times, strict=True), total.time_ns),
            share(row.time_ns, total.time_ns),
            size_text(row.saved_bytes),
            _bar([("saved", row.saved_bytes)], total.saved_bytes),
            size_text(row.parameter_bytes),
            _bar([("params", row.parameter_bytes)], total.parameter_bytes),
        ]
        yield _line("td", cells, kind="part" if row.depth else "")
    yield "</table>"


def _line(tag: str, cells: Iterable[str], kind: str = "") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f"<tr{chosen}>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def _bar(parts: Iterable[tuple[str, int]], whole: int) -> str:
    filled = (f'<i class="{name}" style="width:{100 * part / max(whole, 1):.2f}%"></i>' for name, part in parts)
    return f'<span class="bar">{"".join(filled)}</span>'


def _nodes(profile: Profile) -> Iterator[str]:
    yield "<h2>Nodes that take most of the time, with those alike</h2>\n<table>"
    yield _line("th", ["node", "alike", "operator", "forward", "backward", "", "time", "saved", "source"])
    yield from (_node(nodes, profile.total) for nodes in profile.heaviest)
    yield "</table>"


def _node(nodes: Sequence[Node], total: Row) -> str:
    first, times = nodes[0], (sum(node.forward_ns for node in nodes), sum(node.backward_ns for node in nodes))
    cells = [
        f"<code>{escape(first.name)}</code>",
        f"×{len(nodes)}" if len(nodes) > 1 else "",
        f"<code>{escape(first.operator)}</code>",
        *map(time_text, times),
        _bar(zip(("forward", "backward"), times, strict=True), total.time_ns),
        share(sum(times), total.time_ns),
        size_text(sum(node.saved_bytes for node in nodes)),
        f"<code>{escape(first.source)}</code>",
    ]
    return _line("td", cells)
