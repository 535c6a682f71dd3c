"""The verdict of `verify`, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipecompile.api.verification import HALF_TOLERANCE, Comparison
from pipecompile.ir.plan import Plan
from pipecompile.ir.plurals import counted

__all__ = ["figures", "text"]

# A reader sees two losses that differ and would take that for a failure.
WHY_TWO = (
    "the model draws random numbers, for dropout for instance, so it is compared in two modes: "
    "the losses of the two",
    "differ, and within each the loss of the pipeline must be that of the unsplit model",
)


def figures(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the losses of each comparison, and how near all tensors are."""
    passed = all(comparison.passed for comparison in comparisons)
    return {"passed": passed, "comparisons": list(map(_comparison, comparisons))}


def text(target: str, plan: Plan, comparisons: Sequence[Comparison]) -> str:
    """Return what was run, each comparison, why there are two, and the verdict."""
    tied = sum(len(parameter.stages) > 1 for parameter in plan.parameters)
    lines = [
        f"{target}: {counted(plan.k, 'stage')}, {plan.schedule.name}, "
        f"{counted(plan.microbatches, 'microbatch')}, "
        f"{counted(len(plan.routes), 'relayed tensor')}, {tied} tied over stages",
        *(WHY_TWO if len(comparisons) > 1 else ()),
        *(line for comparison in comparisons for line in _lines(comparison)),
        _verdict(comparisons),
    ]
    return "\n".join(lines)


def _verdict(comparisons: Sequence[Comparison]) -> str:
    passed = all(comparison.passed for comparison in comparisons)
    distances = [
        comparison.distance for comparison in comparisons if comparison.distance is not None
    ]
    if not distances:
        return "equal" if passed else "DIFFERENT"
    difference = (
        f"gradients differ by {max(distances):.2%} of their norm, {HALF_TOLERANCE:.1%} allowed"
    )
    return f"{'not exact' if passed else 'DIFFERENT'}, as saved in half precision: {difference}"


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "reference": comparison.reference,
        "mode": comparison.mode,
        "loss": comparison.losses and comparison.losses[1],
        "loss_unsplit": comparison.losses and comparison.losses[0],
        "tensors": len(comparison.differences),
        "bit_equal": sum(difference.equal for difference in comparison.differences),
        "worst": {"name": comparison.worst.name, "relative": comparison.worst.relative},
        "distance": comparison.distance,
        "passed": comparison.passed,
    }


def _lines(comparison: Comparison) -> list[str]:
    """Return the figures of one comparison, and each tensor that is not bit-equal."""
    lines = [f"against {comparison.reference}, {comparison.mode}"]
    if comparison.losses is not None:
        unsplit, own = comparison.losses
        lines = [f"{lines[0]}: loss {own:.9g}, unsplit {unsplit:.9g}"]
    for kind in ("gradient", "buffer", "output"):
        rows = [difference for difference in comparison.differences if difference.kind == kind]
        equal = sum(difference.equal for difference in rows)
        if rows:
            lines.append(f"  {kind}s: {equal} of {len(rows)} equal bit for bit")
    for difference in comparison.differences:
        if not difference.equal:
            # The gradient of a tied parameter is summed over ranks, in another order than in the
            # unsplit model, so its last bits may differ. Anything else is a defect.
            cause = "summed over ranks" if difference.name in comparison.tied else "NOT EXPLAINED"
            halved = comparison.distance is not None and difference.kind == "gradient"
            cause = "saved in half precision" if halved else cause
            lines.append(
                f"  {difference.kind} {difference.name}: {difference.relative:.1e} relative "
                f"({cause})"
            )
    return lines
