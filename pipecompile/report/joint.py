"""How a plan was chosen for given devices: the bound, what was ruled out, and the best settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.plan import Plan
from pipecompile.ir.setting import JointSearch, SettingResult, SettingStatus
from pipecompile.ir.size import size_text
from pipecompile.report.tables import DrawTable, plain_table
from pipecompile.report.units import gap_text

__all__ = ["joint_text", "settings_rows", "settings_table", "word_columns"]

_STATUSES: dict[SettingStatus, str] = {
    "planned": "planned",
    "bound": "cannot be shorter",
    "memory": "cannot fit their memory",
    "no cut": "had no cut that was found to fit",
    "refused": "are not possible",
    "not tried": "not tried",
}


def joint_text(plan: Plan, joint: JointSearch) -> Iterator[str]:
    """Yield how good the plan is at most, by the costs of its search, and what came of the
    settings.
    """
    bound, gap = time_with_unit(joint.bound_ns, plan.time_unit), gap_text(joint.gap)
    # The first of the best is the plan's own.
    kinds = joint.best[0].setting.kinds if joint.best else ""
    ranks = f", ranks are {kinds}" if kinds else ""
    what = (
        f"devices    {joint.devices}{ranks}" if joint.devices else "chosen     what was left open"
    )
    yield f"{what}: no setting has a step below {bound}{_by_nodes(plan, joint)}, gap {gap}"
    counts = ", ".join(
        f"{joint.counts[status]} {text}"
        for status, text in _STATUSES.items()
        if status in joint.counts
    )
    yield f"settings   {joint.settings}: {counts}"


def _by_nodes(plan: Plan, joint: JointSearch) -> str:
    """Return what the search took for the plan's step, if whole stages were measured after it."""
    # Nodes are summed while settings are searched, since none of them has stages yet that could
    # be measured. The plan's stages are measured at the end, and its step is then another one.
    searched = joint.best[0].step_ns if joint.best else None
    if searched is None or searched == plan.prediction.step_ns:
        return ""
    step = time_with_unit(searched, plan.time_unit)
    return f" by the times of nodes, by which this one takes {step}"


def settings_table(plan: Plan, draw: DrawTable = plain_table) -> Iterator[str]:
    """Yield the best settings of a joint search as a table, the plan's first; nothing without."""
    if plan.joint is None or len(plan.joint.best) < 2:
        return
    times = ", by the times of nodes" if _by_nodes(plan, plan.joint) else ""
    yield f"the best settings that were planned{times}, the first one is the plan's"
    rows = settings_rows(plan.joint, plan.time_unit)
    yield from draw(rows, word_columns(rows[0]))


def settings_rows(joint: JointSearch, unit: TimeUnit) -> list[tuple[str, ...]]:
    """Return the cells of the best settings, the header first."""
    kinds = ["kinds"] * any(each.setting.kinds for each in joint.best)
    header = (
        *("replicas", "ranks", "stages", "microbatches", "schedule", "recompute", *kinds),
        *("step", "bound", "bubble", "fullest rank"),
    )
    return [header, *(_cells(result, unit) for result in joint.best)]


def word_columns(header: Sequence[str]) -> list[int]:
    """Return the columns of that table which are no numbers."""
    return [header.index(name) for name in ("schedule", "recompute", "kinds") if name in header]


def _cells(result: SettingResult, unit: TimeUnit) -> tuple[str, ...]:
    setting = result.setting
    numbers = (setting.replicas, setting.ranks, setting.k, setting.microbatches)
    assert result.step_ns is not None
    return (
        *map(str, numbers),
        setting.schedule,
        setting.recompute,
        *[setting.kinds] * bool(setting.kinds),
        time_text(result.step_ns, unit),
        time_text(result.bound_ns, unit),
        "" if result.bubble is None else f"{result.bubble:.1%}",
        "" if result.memory_bytes is None else size_text(result.memory_bytes),
    )
