"""A profile as a page: where time and memory of a microbatch go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipecompile.ir.graph import Node
from pipecompile.report.profile import Profile, large_rows
from pipecompile.report.profile_text import profile_headline, totals
from pipecompile.report.templates import page

__all__ = ["profile_page"]


def profile_page(title: str, profile: Profile) -> str:
    """Return the page as HTML; the same profile gives the same text."""
    return page(
        "profile.html",
        time_unit=profile.time_unit,
        title=title,
        subtitle=profile_headline(profile),
        figures=list(totals(profile)),
        total=profile.total,
        modules=profile.modules,
        operators=large_rows(profile.operators, profile.total),
        heaviest=list(map(_node_row, profile.heaviest)),
    )


def _node_row(nodes: Sequence[Node]) -> dict[str, Any]:
    """Return the row of nodes that are alike, under the name of the first."""
    # Nodes that are alike come from one line, so any of them tells the operator and the source.
    first = nodes[0]
    return {
        "name": first.name,
        "nodes": len(nodes),
        "operator": first.operator,
        "forward_ns": sum(node.forward_ns for node in nodes),
        "backward_ns": sum(node.backward_ns for node in nodes),
        "saved_bytes": sum(node.saved_bytes for node in nodes),
        "source": first.source,
    }
