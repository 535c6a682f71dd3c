"""The limits that a team sets for its plans, in CI for instance. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.errors import InputError
from pipecompile.ir.duration import time_text
from pipecompile.ir.finding import Code, Finding
from pipecompile.ir.imbalance import imbalance_of
from pipecompile.ir.plan import Plan
from pipecompile.ir.size import caps_by_rank, size_text
from pipecompile.ir.stage import Stage

__all__ = ["check_limits"]


def check_limits(
    plan: Plan,
    *,
    max_step_ns: int | None = None,
    max_imbalance: float | None = None,
    memory_bytes: int | tuple[int, ...] | None = None,
    max_bubble: float | None = None,
    max_relayed_bytes: int | None = None,
    recompute: str | None = None,
) -> list[Finding]:
    """Return one finding for each limit that is given, passed or not; for memory one for each rank.

    `max_step_ns` is for the predicted step: InputError if the plan's times are no seconds.
    `memory_bytes` is the cap of every rank, or one for each: InputError if there are other
    ranks. `recompute` is the policy by which the plan was to be made. `max_bubble` is a share of
    the step: InputError unless it is between 0 and 1. `max_relayed_bytes` is what stages pass on
    for each other, for one microbatch.
    """
    findings = []
    if max_step_ns is not None:
        findings.append(_step(plan, max_step_ns))
    if max_imbalance is not None:
        findings.append(_imbalance(plan, max_imbalance))
    if max_bubble is not None:
        findings.append(_bubble(plan, max_bubble))
    if memory_bytes is not None:
        findings.extend(_memory(plan, caps_by_rank(memory_bytes, plan.ranks)))
    if max_relayed_bytes is not None:
        findings.append(_relayed(plan, max_relayed_bytes))
    if recompute is not None:
        findings.append(_recompute(plan, recompute))
    return findings


def _step(plan: Plan, limit: int) -> Finding:
    if plan.time_unit == "relative":
        raise InputError(
            f"the limit of the step is {time_text(limit)}, but times by {plan.options.costs} are "
            "relative units; limit the bubble, or plan with costs in seconds, as roofline:h100"
        )
    step = plan.prediction.step_ns
    # To one decimal the two may read alike.
    excess = f" by {time_text(step - limit)}"
    return _at_most("step", f"step {time_text(step)} is", step, limit, time_text(limit), excess)


def _imbalance(plan: Plan, limit: float) -> Finding:
    imbalance = imbalance_of(plan.prediction.loads_ns)
    text = f"imbalance {imbalance:.3f} (largest load / mean load) is"
    return _at_most("imbalance", text, imbalance, limit, f"{limit}")


def _bubble(plan: Plan, limit: float) -> Finding:
    if not 0 <= limit <= 1:
        raise InputError(f"the limit of the bubble is {limit}, but a share of the step from 0 to 1")
    bubble = plan.prediction.bubble
    # With equal stages GPipe and 1F1B idle for (k − 1) / (M + k − 1) of a step: for k = 4 that is
    # 43 % with 4 microbatches, and 16 % with 16.
    advice = "; more microbatches make it smaller"
    return _at_most("bubble", f"bubble {bubble:.1%} is", bubble, limit, f"{limit:.1%}", advice)


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


def _relayed(plan: Plan, limit: int) -> Finding:
    relayed = sum(map(_relayed_bytes, plan.stages))
    text = f"stages relay {size_text(relayed)} for a microbatch,"
    return _at_most("relayed", text, relayed, limit, size_text(limit))


def _relayed_bytes(stage: Stage) -> int:
    """Return what a stage passes on for others: the values, and their gradients on the way back."""
    # What it receives and sends on under the same name was made by an earlier stage:
    #     stage 0 ── x ──► stage 1 ── x ──► stage 2, which reads it
    # If x has 4 MiB and a gradient of as much, stage 1 relays 8 MiB for a microbatch: x on the
    # way there, and its gradient on the way back.
    received = {tensor.name for tensor in stage.inputs}
    passed_on = (tensor for tensor in stage.outputs if tensor.name in received)
    return sum(tensor.bytes + tensor.gradient_bytes for tensor in passed_on)


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


def _at_most(
    code: Code, text: str, value: float, limit: float, limit_text: str, excess: str = ""
) -> Finding:
    """Return the finding that a value is within its limit, or over it: then `excess` ends it."""
    # At the limit is within it: `--max-bubble 0%` is passed by a pipeline of one stage.
    passed = value <= limit
    verdict = f"within {limit_text}" if passed else f"over {limit_text}{excess}"
    return Finding(code=code, message=f"{text} {verdict}", passed=passed, value=value, limit=limit)
