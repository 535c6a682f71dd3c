"""Plans and answers as people and other programs read them: text, pages, pictures, traces, figures.

The command line calls these functions, and so can a program. Needs no PyTorch.
"""

from __future__ import annotations

from typing import Any

from pipecompile.api.comparison import comparison_of
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.ir.schedule import Timeline
from pipecompile.report.audit_page import audit_page
from pipecompile.report.audit_text import audit_headline, audit_markdown, audit_text
from pipecompile.report.cut import cut_text
from pipecompile.report.links import links_table
from pipecompile.report.plan_card import plan_card
from pipecompile.report.plan_page import OtherPlan, plan_page
from pipecompile.report.profile import profile_figures
from pipecompile.report.profile_page import profile_page
from pipecompile.report.profile_text import profile_text
from pipecompile.report.recompute import recompute_shares
from pipecompile.report.step import step_figures, step_text
from pipecompile.report.summary import summary
from pipecompile.report.svg import timeline_svg
from pipecompile.report.tables import DrawTable, plain_table, terminal_table
from pipecompile.report.timeline_text import timeline_text
from pipecompile.report.trace import trace
from pipecompile.schedule.critical_path import critical_path
from pipecompile.schedule.post_validation import step_in_a_row_ns
from pipecompile.schedule.simulator import simulate_plan
from pipecompile.schedule.stages import problem_of_plan

__all__ = [
    "DrawTable",
    "audit_headline",
    "audit_markdown",
    "audit_page",
    "audit_text",
    "card_of",
    "cut_text",
    "links_table",
    "page_of",
    "picture_of",
    "plain_table",
    "profile_figures",
    "profile_page",
    "profile_text",
    "step_figures_of",
    "step_text_of",
    "terminal_table",
    "text_of",
    "timeline_of",
    "trace_of",
]


def timeline_of(plan: Plan) -> Timeline:
    """Return when each rank does what in one step of `plan`, simulated."""
    return simulate_plan(plan)


def text_of(plan: Plan, draw: DrawTable = plain_table) -> str:
    """Return the plan for people: stages, loads, memory and timeline."""
    return f"{summary(plan, draw)}\n{timeline_text(timeline_of(plan), recompute_shares(plan))}"


def page_of(
    plan: Plan, *, run: RecordedRun | None = None, against: tuple[str, Plan] | None = None
) -> str:
    """Return the plan as one HTML page.

    Beside it a `run` that was recorded of it, and what differs from another plan (`against`, with
    the name of its file). InputError if the run is of another plan.
    """
    comparison = None if run is None else comparison_of(plan, run)
    other = None if against is None else OtherPlan(*against, timeline_of(against[1]))
    return plan_page(plan, timeline_of(plan), comparison, other)


def card_of(plan: Plan) -> str:
    """Return the plan in short as a part of an HTML page, such as a notebook."""
    return plan_card(plan, timeline_of(plan))


def picture_of(plan: Plan) -> str:
    """Return the timeline of one step as SVG."""
    return timeline_svg(plan, timeline_of(plan))


def trace_of(plan: Plan) -> bytes:
    """Return the timeline of one step as Chrome JSON, for Perfetto."""
    return trace(plan, timeline_of(plan))


def step_text_of(plan: Plan, draw: DrawTable = plain_table) -> str:
    """Return one step for people: when ranks wait, and which actions decide how long it takes."""
    timeline = timeline_of(plan)
    # The path is found in the timeline that is printed beside it: simulated once, used twice.
    path = critical_path(problem_of_plan(plan), timeline)
    return step_text(plan, timeline, path, draw, _in_a_row_ns(plan, timeline))


def step_figures_of(plan: Plan) -> dict[str, Any]:
    """Return one step as figures for JSON: when ranks wait, and which actions decide."""
    timeline = timeline_of(plan)
    path = critical_path(problem_of_plan(plan), timeline)
    return step_figures(plan, timeline, path, _in_a_row_ns(plan, timeline))


def _in_a_row_ns(plan: Plan, timeline: Timeline) -> int | None:
    """Return what a step takes among many with post-validation, None without."""
    return step_in_a_row_ns(plan.schedule, timeline) if plan.options.post_validation else None
