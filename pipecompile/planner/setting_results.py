"""The outcome of settings: results in order, and words if none has a plan. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from msgspec.structs import asdict, replace

from pipecompile.ir.plan import Plan
from pipecompile.ir.setting import (
    JointSearch,
    OtherSettings,
    Setting,
    SettingResult,
    SettingStatus,
)
from pipecompile.planner.finished_plans import Answer

__all__ = ["in_order", "joint_search_of", "planned", "why_none"]


def planned(setting: Setting, bound: int, plan: Plan) -> SettingResult:
    """Return what is known of a setting with a plan."""
    return SettingResult(
        setting=setting,
        status="planned",
        bound_ns=bound,
        step_ns=plan.prediction.step_ns,
        memory_bytes=max(rank.total.bound for rank in plan.prediction.memory),
        bubble=plan.prediction.bubble,
    )


def in_order(results: Iterable[SettingResult]) -> list[SettingResult]:
    """Return results by their steps, the shortest first, of equal ones that which holds least."""
    return sorted(results, key=_order)


def _order(result: SettingResult) -> tuple[float, int, int]:
    step = inf if result.step_ns is None else result.step_ns
    return step, result.memory_bytes or 0, result.bound_ns


def _listed(results: Iterable[SettingResult], chosen: Setting, top: int) -> Iterator[SettingResult]:
    """Yield what a plan lists of results in their order: that of its setting, so many of the
    shortest in all, and of the rest those that hold less than all before them.

    So all of the Pareto front of step and memory is among them.
    """
    best = [each for each in results if each.step_ns is not None]
    # The sort is stable: the chosen one comes first, and the
    # others stay in the order of their steps.
    best.sort(key=lambda each: each.setting != chosen)
    least = inf
    for place, result in enumerate(best):
        assert result.memory_bytes is not None
        # Results come by their steps, so whatever holds less
        # than all before it is on the Pareto front.
        if place < top or result.memory_bytes < least:
            yield result
        least = min(least, result.memory_bytes)


def _others(results: Iterable[SettingResult]) -> Iterator[OtherSettings]:
    """Yield results that are not listed, those of settings that differ in microbatches alone as
    one; in the order of the settings' words and numbers.
    """
    alike: dict[tuple[SettingStatus, str, Setting], dict[int, int]] = {}
    for result in results:
        setting = result.setting
        key = result.status, result.reason, replace(setting, microbatches=1)
        alike.setdefault(key, {})[setting.microbatches] = result.bound_ns
    for (status, reason, setting), bounds in sorted(alike.items(), key=_words):
        numbers = sorted(bounds)
        fields = {
            **asdict(setting),
            "microbatches": tuple(numbers),
            "bounds_ns": tuple(bounds[number] for number in numbers),
        }
        yield OtherSettings(status=status, reason=reason, **fields)


def _words(entry: tuple[tuple[SettingStatus, str, Setting], object]) -> tuple[str, int, str]:
    status, reason, setting = entry[0]
    return status, setting.replicas, f"{setting} {reason}"


def joint_search_of(
    results: Sequence[SettingResult], answer: Answer, devices: str, top: int
) -> JointSearch:
    """Return what a search found, with the results of all its settings in order."""
    step = answer.plan.prediction.step_ns
    possible = (each.bound_ns for each in results if each.status not in ("memory", "refused"))
    bound = min(step, *possible)
    best = tuple(_listed(results, answer.setting, top))
    return JointSearch(
        devices=devices,
        settings=len(results),
        bound_ns=bound,
        gap=(step - bound) / step if step else 0.0,
        counts=dict(sorted(_counts(results).items())),
        best=best,
        others=tuple(_others(each for each in results if each not in best)),
        robustness=answer.robustness,
    )


def _counts(results: Iterable[SettingResult]) -> Counter[SettingStatus]:
    return Counter(result.status for result in results)


def why_none(devices: str, results: Sequence[SettingResult]) -> str:
    """Return why no setting has a plan, each reason with the number of settings, and an example."""
    texts: dict[SettingStatus, str] = {
        "memory": "cannot fit their memory",
        "no cut": "had no cut that was found to fit",
        "refused": "are not possible",
        "unlikely": "are not likely to fit",
        "not tried": "were not tried",
    }
    counts, parts = _counts(results), []
    for status, text in texts.items():
        if status not in counts:
            continue
        reasons = (each for each in results if each.status == status and each.reason)
        first = next(reasons, None)
        example = f" (such as {first.setting}: {first.reason})" if first is not None else ""
        parts.append(f"{counts[status]} {text}{example}")
    return (
        f"no plan was found for {devices} among {len(results)} settings: {'; '.join(parts)}. Give "
        f"{'more effort or time, ' * ('not tried' in counts)}more devices, more memory or a "
        "smaller batch, or fix fewer options"
    )
