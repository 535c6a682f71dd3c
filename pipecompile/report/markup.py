"""What pages are made of: one style, tables and bars; no scripts, fonts or other files."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["bar", "document", "line"]

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
.saved, .activations { background: #6aa56b; } .params, .parameters { background: #8a77b5; }
.gradients { background: #c98bb9; } .optimizer { background: #5d7290; } .buffers { background: #d9b44a; }
.workspace { background: #b3aea4; }
svg { max-width: 100%; height: auto; margin-top: 1.2rem; }
.key i { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin: 0 .3rem 0 .8rem; }
"""


def document(title: str, body: Iterable[str]) -> str:
    """The page around `body`."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def line(tag: str, cells: Iterable[str], kind: str = "") -> str:
    """A row of a table, of `th` or `td`; its cells are HTML."""
    chosen = f' class="{kind}"' if kind else ""
    return f"<tr{chosen}>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def bar(parts: Iterable[tuple[str, int]], whole: int) -> str:
    """A bar of parts, each of a class that gives its colour, as shares of `whole`."""
    filled = (
        f'<i class="{name}" style="width:{100 * part / max(whole, 1):.2f}%"></i>'
        for name, part in parts
    )
    return f'<span class="bar">{"".join(filled)}</span>'
