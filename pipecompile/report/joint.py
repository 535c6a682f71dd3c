"""How a plan was chosen for given devices: the bound, what was ruled out, and the best settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby
from textwrap import wrap

from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.plan import Plan
from pipecompile.ir.setting import JointSearch, OtherSettings, SettingResult, SettingStatus
from pipecompile.ir.size import size_text
from pipecompile.report.tables import DrawTable, plain_table
from pipecompile.report.units import gap_text

__all__ = [
    "STATUS_TEXTS",
    "joint_text",
    "others_table",
    "settings_rows",
    "settings_table",
    "word_columns",
]

_MOST_NAMES = 3  # of schedules in a row of the others
_WIDTH = 98  # of a line of the head, which is indented by two

STATUS_TEXTS: Mapping[SettingStatus, str] = {
    "planned": "planned",
    "bound": "cannot be shorter",
    "memory": "cannot fit their memory",
    "no cut": "had no cut that was found to fit",
    "refused": "are not possible",
    "unlikely": "not likely to be better",
    "not tried": "not reached",
}


def joint_text(plan: Plan, joint: JointSearch) -> Iterator[str]:
    """Yield how good the plan is at most, by the costs of its search, and the outcome of
    the settings.
    """
    bound, gap = time_with_unit(joint.bound_ns, plan.time_unit), gap_text(joint.gap)
    # The first of the best is the plan's own.
    kinds = joint.best[0].setting.kinds if joint.best else ""
    ranks = f", ranks are {kinds}" if kinds else ""
    if isinstance(plan.options.memory_bytes, tuple) and not kinds:
        ranks = f", with {plan.ranks} ranks as there are caps"
    what = (
        f"devices    {joint.devices}{ranks}" if joint.devices else "chosen     what was left open"
    )
    yield f"{what}: no setting has a step below {bound}{_by_nodes(plan, joint)}, gap {gap}"
    counts = ", ".join(
        f"{joint.counts[status]} {text}"
        for status, text in STATUS_TEXTS.items()
        if status in joint.counts
    )
    yield from wrap(f"settings   {joint.settings}: {counts}", _WIDTH, subsequent_indent=" " * 11)


def _by_nodes(plan: Plan, joint: JointSearch) -> str:
    """Return what the search took for the plan's step, if whole stages were measured after it."""
    # Nodes are summed while settings are searched, since none of them has stages yet that could
    # be measured. The plan's stages are measured at the end, and its step is then another one.
    searched = joint.best[0].step_ns if joint.best else None
    if searched is None or searched == plan.prediction.step_ns:
        return ""
    step = time_with_unit(searched, plan.time_unit)
    return f" by the times of nodes, by which this one takes {step}"


def _times_text(plan: Plan, joint: JointSearch) -> str:
    return ", by the times of nodes" if _by_nodes(plan, joint) else ""


def settings_table(plan: Plan, draw: DrawTable = plain_table) -> Iterator[str]:
    """Yield the best settings of a joint search as a table, the plan's first; nothing where there
    was no other setting.
    """
    if plan.joint is None or plan.joint.settings == 1 or not plan.joint.best:
        return
    times, is_alone = _times_text(plan, plan.joint), len(plan.joint.best) == 1
    which = "setting that was" if is_alone else "best settings that were"
    first = "" if is_alone else ", the first one is the plan's"
    yield f"the {which} planned{times}{first}"
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


def others_table(plan: Plan, draw: DrawTable = plain_table) -> Iterator[str]:
    """Yield the outcome of the settings that are not listed, those of as many replicas together;
    nothing where all are. The plan's file names each.
    """
    if plan.joint is None or not plan.joint.others:
        return
    others, times = plan.joint.others, _times_text(plan, plan.joint)
    yield f"the other settings: none has a step below the bound in its row{times}"
    schedules, policies = {each.schedule for each in others}, {each.recompute for each in others}
    header = ("settings", "replicas", "ranks", "microbatches", "schedule", "recompute", "bound")
    rows: list[tuple[str, ...]] = [("outcome", *header)]
    for status, text in STATUS_TEXTS.items():
        own = sorted((each for each in others if each.status == status), key=_replicas)
        for _, group in groupby(own, key=_replicas):
            cells = _others_cells(list(group), schedules, policies, plan.time_unit)
            rows.append((text, *cells))
    yield from draw(rows, {0, 5, 6})


def _replicas(settings: OtherSettings) -> int:
    return settings.replicas


def _others_cells(
    group: Sequence[OtherSettings], schedules: Set[str], policies: Set[str], unit: TimeUnit
) -> tuple[str, ...]:
    """Return what settings with equally many replicas have; `schedules` and `policies` are those of
    all others.
    """
    numbers = sorted({number for each in group for number in each.microbatches})
    bound = min(min(each.bounds_ns) for each in group)
    return (
        str(sum(len(each.microbatches) for each in group)),
        str(group[0].replicas),
        str(group[0].ranks),
        f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 2 else " and ".join(map(str, numbers)),
        _names({each.schedule for each in group}, schedules),
        _names({each.recompute for each in group}, policies),
        time_text(bound, unit) if bound else "",
    )


def _names(own: Set[str], known: Set[str]) -> str:
    """Return own names, or if these are many all but the others, or how many they are."""
    missing = known - own
    if not missing and len(known) > 1:
        return "all"
    if len(own) <= _MOST_NAMES:
        return "/".join(sorted(own))
    rest = "/".join(sorted(missing))
    return f"all but {rest}" if len(missing) <= _MOST_NAMES else f"{len(own)} of them"
