"""The parts of a plan's page about something beside the plan: a recorded run, or another plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipecompile.ir.plan import Plan
from pipecompile.report.model_blocks import StageRow, stage_rows
from pipecompile.report.plan_diff import compare_plans
from pipecompile.report.plan_diff_text import DiffTable, diff_headline, diff_tables
from pipecompile.report.run_comparison import RunComparison
from pipecompile.report.run_text import (
    RunTable,
    comparison_tables,
    figure_texts,
    recorded_text,
    run_notes,
)

__all__ = ["ComparisonPart", "DifferencePart", "comparison_part", "difference_part"]


@dataclass(frozen=True)
class ComparisonPart:
    """Predicted against measured: figures of the step, what was recorded, notes and tables."""

    figures: Sequence[tuple[str, str]]
    recorded: str
    notes: Sequence[str]
    tables: Sequence[RunTable]


@dataclass(frozen=True)
class DifferencePart:
    """What differs from the plan `name`. `strips` are both models, old and new, by stage; none
    where one of the files does not have the blocks.
    """

    name: str
    headline: str
    notes: Sequence[str]
    strips: Sequence[tuple[str, Sequence[StageRow]]]
    tables: Sequence[DiffTable]


def comparison_part(comparison: RunComparison) -> ComparisonPart:
    """Return what a page shows of a recorded run."""
    run = comparison.run
    return ComparisonPart(
        figures=list(figure_texts(comparison)),
        recorded=f"{recorded_text(comparison)} recorded on {run.device}, torch {run.torch}",
        notes=list(run_notes(comparison)),
        tables=comparison_tables(comparison),
    )


def difference_part(plan: Plan, old: Plan, name: str) -> DifferencePart:
    """Return what a page shows of the changes from the plan `old`, of the file `name`."""
    difference = compare_plans(old, plan)
    # Both or none: one alone could not be compared with anything.
    strips = [(name, stage_rows(old)), ("this plan", stage_rows(plan))]
    return DifferencePart(
        name=name,
        headline=diff_headline(difference),
        notes=difference.notes,
        strips=strips if all(rows for _, rows in strips) else [],
        tables=list(diff_tables(difference)),
    )
