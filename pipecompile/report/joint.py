"""How a plan was chosen for given devices: the bound, what was ruled out, and the best settings."""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.plan import Plan
from pipecompile.ir.setting import JointSearch, SettingResult, SettingStatus
from pipecompile.ir.size import size_text
from pipecompile.report.tables import DrawTable, plain_table
from pipecompile.report.units import gap_text

__all__ = ["joint_text", "settings_rows", "settings_table"]

_STATUSES: dict[SettingStatus, str] = {
    "planned": "planned",
    "bound": "cannot be shorter",
    "memory": "cannot fit their memory",
    "no cut": "had no cut that was found to fit",
    "refused": "are not possible",
    "not tried": "not tried",
}


def joint_text(joint: JointSearch, unit: TimeUnit = "ns") -> Iterator[str]:
    """Yield how good the plan is at most, and what came of the settings."""
    bound, gap = time_with_unit(joint.bound_ns, unit), gap_text(joint.gap)
    yield f"devices    {joint.devices}: no setting has a step below {bound}, gap {gap}"
    counts = ", ".join(
        f"{joint.counts[status]} {text}"
        for status, text in _STATUSES.items()
        if status in joint.counts
    )
    yield f"settings   {joint.settings}: {counts}"


def settings_table(plan: Plan, draw: DrawTable = plain_table) -> Iterator[str]:
    """Yield the best settings of a joint search as a table, the plan's first; nothing without."""
    if plan.joint is None or len(plan.joint.best) < 2:
        return
    yield "the best settings that were planned, the first one is the plan's"
    yield from draw(settings_rows(plan.joint, plan.time_unit), (4, 5))


def settings_rows(joint: JointSearch, unit: TimeUnit) -> list[tuple[str, ...]]:
    """Return the cells of the best settings, the header first."""
    header = (
        *("replicas", "ranks", "stages", "microbatches", "schedule", "recompute"),
        *("step", "bound", "bubble", "fullest rank"),
    )
    return [header, *(_cells(result, unit) for result in joint.best)]


def _cells(result: SettingResult, unit: TimeUnit) -> tuple[str, ...]:
    setting = result.setting
    numbers = (setting.replicas, setting.ranks, setting.k, setting.microbatches)
    assert result.step_ns is not None
    return (
        *map(str, numbers),
        setting.schedule,
        setting.recompute,
        time_text(result.step_ns, unit),
        time_text(result.bound_ns, unit),
        "" if result.bubble is None else f"{result.bubble:.1%}",
        "" if result.memory_bytes is None else size_text(result.memory_bytes),
    )
