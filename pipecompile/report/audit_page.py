"""An audit as a page: the layout and the best cuts, with the load of each rank."""

from __future__ import annotations

from pipecompile.ir.audit import Audit
from pipecompile.report.audit_text import (
    audit_rows,
    audit_subtitle,
    cut_name,
    findings_of,
    part_rows,
    shared_text,
)
from pipecompile.report.templates import page

__all__ = ["audit_page"]


def audit_page(title: str, audit: Audit) -> str:
    """Return the page as HTML; the same audit gives the same text."""
    header, *rows = audit_rows(audit)
    # All bars have one scale, so that cuts can be compared with each other.
    largest = max(max(cut.loads_ns) for cut in audit.cuts)
    return page(
        "audit.html",
        time_unit=audit.time_unit,
        title=title,
        subtitle=audit_subtitle(audit),
        figures=[("layout", audit.layout_format), ("layers", audit.layers or "not found")],
        layout=audit.layout,
        header=header,
        rows=[{"cells": row, "is_part": False} for row in rows],
        findings=list(findings_of(audit)),
        cuts=[(cut_name(cut), cut) for cut in audit.cuts],
        largest=largest,
        mean=sum(audit.hand.loads_ns) // audit.ranks,
        parts=part_rows(audit),
        shared=list(map(shared_text, audit.shared)),
    )
