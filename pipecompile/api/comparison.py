"""A plan against a run that was recorded of it, for the command line and for programs.

Needs no PyTorch.
"""

from __future__ import annotations

import msgspec

from pipecompile.errors import InputError
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.ir.serialization import fingerprint
from pipecompile.report.run_comparison import (
    RunComparison,
    compare_run,
    compared_steps,
    comparison_figures,
)
from pipecompile.report.run_page import run_page
from pipecompile.report.run_text import comparison_text
from pipecompile.report.trace import trace
from pipecompile.schedule.full_pipeline import simulate_minibatches
from pipecompile.schedule.simulator import simulate_plan

__all__ = ["comparison_figures", "comparison_of", "comparison_text", "run_page", "run_trace"]


def comparison_of(plan: Plan, run: RecordedRun) -> RunComparison:
    """Return what `plan` predicts against what was recorded.

    Raise InputError if the run is of another plan.
    """
    # Before the fingerprints, which would differ too, but say less.
    if run.ranks != plan.ranks:
        raise InputError(
            f"the run is of {run.ranks} ranks, but the plan has {plan.ranks}; give the plan that "
            "was run"
        )
    if run.plan != fingerprint(plan):
        raise InputError(
            f"the run was recorded of another plan (fingerprint {run.plan[:12]}…, this plan's is "
            f"{fingerprint(plan)[:12]}…); give the plan that was run, or record this one"
        )
    if plan.schedule.weight_versions == "synchronous":
        return compare_run(plan, simulate_plan(plan), run)
    # Asynchronous steps overlap, so one of them alone is not what ran: as many minibatches are
    # simulated as were recorded in a row.
    minibatches = compared_steps(plan, run)[0].microbatches // plan.microbatches
    return compare_run(plan, simulate_minibatches(plan, minibatches), run)


def run_trace(comparison: RunComparison) -> bytes:
    """Return the recorded step of median length as Chrome JSON, for Perfetto."""
    # A trace says so where a plan's times are relative units; recorded ones are not.
    plan = msgspec.structs.replace(comparison.plan, time_unit="ns")
    return trace(plan, comparison.typical.timeline())
