"""What a check says of a plan in a file: is it sound, within limits and, given a model, current?

Needs no PyTorch without a model.
"""

from __future__ import annotations

from typing import Any

from pipecompile.api.factory import Factory
from pipecompile.api.limits import check_limits
from pipecompile.api.soundness import findings as faults_of
from pipecompile.errors import InputError
from pipecompile.ir.finding import Finding
from pipecompile.ir.plan import Plan
from pipecompile.report.findings_text import findings_headline, findings_markdown, findings_text

__all__ = ["check_plan", "findings_headline", "findings_markdown", "findings_text"]


def check_plan(
    plan: Plan,
    factory: Factory | None = None,
    *,
    memory_bytes: int | tuple[int, ...] | None = None,
    drift: float | None = None,
    **limits: Any,
) -> list[Finding]:
    """Return all that was checked, passed or not: one run of CI shows all there is.

    `limits` are those of `check_limits`; without `memory_bytes` a plan's own caps are shown. With
    `factory` the plan is compared with its model, whose times may differ by `drift`, a share.
    """
    if drift is not None and factory is None:
        raise InputError("a drift is that of a model's costs; name the TARGET behind the plan")
    # What a plan says is checked before what a team wants of it, and both before PyTorch is
    # imported, but none ends the list: all that is wrong is in one run of CI.
    faults = faults_of(plan)
    # A plan that breaks its own caps has a fault that says so.
    own_caps = None if faults else plan.options.memory_bytes
    caps = own_caps if memory_bytes is None else memory_bytes
    sound = Finding(
        code="schedule", passed=True, message="sound: schedule, stages and prediction agree"
    )
    checks = [*(faults or [sound]), *check_limits(plan, memory_bytes=caps, **limits)]
    return checks if factory is None else [*checks, *_currency(plan, factory, drift)]


def _currency(plan: Plan, factory: Factory, drift: float | None) -> list[Finding]:
    # Only now is PyTorch imported.
    from pipecompile.api.staleness import staleness
    from pipecompile.api.target import planned_target, target_of

    target = planned_target(target_of(factory), plan)
    return staleness(plan, target, name=factory.text, drift=drift)
