"""A recorded run against its plan, as a page: both timelines to one scale, and the tables."""

from __future__ import annotations

from pipecompile.report.plan_head import headline
from pipecompile.report.recompute import recompute_shares
from pipecompile.report.run_comparison import RunComparison
from pipecompile.report.run_text import (
    comparison_headings,
    comparison_tables,
    figure_texts,
    recorded_text,
    run_notes,
)
from pipecompile.report.svg import picture
from pipecompile.report.templates import page

__all__ = ["run_page"]


def run_page(comparison: RunComparison) -> str:
    """Return the page as HTML; the same plan and run give the same text."""
    plan, run = comparison.plan, comparison.run
    predicted, recorded = comparison.predicted, comparison.typical.timeline()
    # One scale for both, so that a longer step is seen to be longer.
    length = max(predicted.makespan_ns, recorded.makespan_ns)
    first, second = map(str.capitalize, comparison_headings(comparison))
    # Where in a recorded backward regions were recomputed is not known.
    pictures = [
        picture(first, predicted, "ns", recompute_shares(plan), length),
        picture(second, recorded, length_ns=length),
    ]
    return page(
        "run.html",
        time_unit="ns",
        title=": ".join(filter(None, [plan.capture.model, "predicted and measured"])),
        subtitle=f"{headline(plan)}; {recorded_text(comparison)} recorded on "
        f"{run.device}, torch {run.torch}",
        figures=list(figure_texts(comparison)),
        notes=list(run_notes(comparison)),
        pictures=pictures,
        tables=comparison_tables(comparison),
    )
