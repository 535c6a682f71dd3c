"""What a check of a plan found, for people: as text, and as Markdown for a page of GitHub."""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir.finding import Finding
from pipecompile.ir.plurals import counted

__all__ = ["findings_headline", "findings_markdown", "findings_text"]

_MARKS = {True: "✓", False: "✗"}


def findings_text(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, with a tick if it passed."""
    return "\n".join(f"{_MARKS[finding.passed]} {finding.message}" for finding in findings)


def findings_markdown(path: str, findings: Sequence[Finding]) -> str:
    """Return the same as Markdown under the path of the plan: for the summary of a job."""
    # Fenced: a node such as __init__ would be bold.
    return f"### {path}: {findings_headline(findings)}\n\n```\n{findings_text(findings)}\n```"


def findings_headline(findings: Sequence[Finding]) -> str:
    """Return in a few words whether all checks passed, or how many did not."""
    failed = sum(not finding.passed for finding in findings)
    if not failed:
        return "the plan is sound" if len(findings) == 1 else f"all {len(findings)} checks passed"
    return f"{failed} of {counted(len(findings), 'check')} failed"
