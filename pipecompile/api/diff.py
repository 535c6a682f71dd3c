"""What differs between two plans, for the command line and for programs.

Needs no PyTorch.
"""

from __future__ import annotations

from pipecompile.ir.plan import Plan
from pipecompile.report.plan_diff import ComparedPlans, PlanDiff, compare_plans
from pipecompile.report.plan_diff_text import diff_headline, diff_markdown, diff_text

__all__ = ["ComparedPlans", "diff", "diff_headline", "diff_markdown", "diff_text"]


def diff(old: Plan, new: Plan) -> PlanDiff:
    """Return what differs between two plans: a change for each thing, what matters first.

    A change has a `kind`, says `where` it is, and has the values `before` and `after`. Nothing that
    is equal is listed, and nothing that only follows from what is. Plans of other sizes or models
    are compared as far as that makes sense, which the `notes` tell.
    """
    return compare_plans(old, new)
