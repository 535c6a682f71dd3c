"""The limits that a team sets for its plans, in CI for instance. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.errors import InputError
from pipecompile.ir.finding import Finding
from pipecompile.ir.plan import Plan
from pipecompile.ir.size import caps_by_rank, size_text

__all__ = ["check_limits"]


def check_limits(
    plan: Plan,
    *,
    max_imbalance: float | None = None,
    memory_bytes: int | tuple[int, ...] | None = None,
    max_bubble: float | None = None,
    recompute: str | None = None,
) -> list[Finding]:
    """Return one finding for each limit that is given, passed or not; for memory one for each rank.

    `memory_bytes` is the cap of every rank, or one for each: InputError if there are other
    ranks. `recompute` is the policy by which the plan was to be made. `max_bubble` is a share of
    the step: InputError unless it is between 0 and 1.
    """
    findings = []
    if max_imbalance is not None:
        findings.append(_imbalance(plan, max_imbalance))
    if max_bubble is not None:
        findings.append(_bubble(plan, max_bubble))
    if memory_bytes is not None:
        findings.extend(_memory(plan, caps_by_rank(memory_bytes, plan.ranks)))
    if recompute is not None:
        findings.append(_recompute(plan, recompute))
    return findings


def _imbalance(plan: Plan, limit: float) -> Finding:
    loads = plan.prediction.loads_ns
    # Nothing that takes time is perfectly balanced.
    imbalance = max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
    text = f"imbalance {imbalance:.3f} (largest load / mean load)"
    passed = imbalance <= limit
    return Finding(
        code="imbalance",
        message=f"{text} is {'within' if passed else 'over'} {limit}",
        passed=passed,
        value=imbalance,
        limit=limit,
    )


def _bubble(plan: Plan, limit: float) -> Finding:
    if not 0 <= limit <= 1:
        raise InputError(f"the limit of the bubble is {limit}, but a share of the step from 0 to 1")
    bubble = plan.prediction.bubble
    passed = bubble <= limit
    # With equal stages GPipe and 1F1B idle for (k − 1) / (M + k − 1) of a step: for k = 4 that is
    # 43 % with 4 microbatches, and 16 % with 16.
    advice = "" if passed else "; more microbatches make it smaller"
    return Finding(
        code="bubble",
        message=f"bubble {bubble:.1%} is {'within' if passed else 'over'} {limit:.1%}{advice}",
        passed=passed,
        value=bubble,
        limit=limit,
    )


def _memory(plan: Plan, limits: tuple[int, ...]) -> Iterator[Finding]:
    """Yield for each rank whether its bound is within its limit."""
    for rank, (memory, limit) in enumerate(zip(plan.prediction.memory, limits, strict=True)):
        # The bound and not what is expected: who sets a limit wants no rank to run out of memory.
        needed = memory.total.bound
        passed = needed <= limit
        if passed:
            verdict = f"within its cap of {size_text(limit)}"
        else:
            excess = size_text(needed - limit)
            verdict = f"{excess} over its cap of {size_text(limit)}; plan again for that cap"
        yield Finding(
            code="memory",
            message=f"rank {rank} may need {size_text(needed)}, {verdict}",
            passed=passed,
            rank=rank,
            value=needed,
            limit=limit,
        )


def _recompute(plan: Plan, policy: str) -> Finding:
    actual = plan.options.recompute
    passed = actual == policy
    message = f"recompute is {actual!r} in the plan"
    return Finding(
        code="recompute",
        message=message if passed else f"{message}, not {policy!r}; plan again",
        passed=passed,
        value=actual,
        limit=policy,
    )
