"""The schedule problem of a plan's stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipecompile.ir.memory import rank_memory
from pipecompile.ir.plan import Link, Plan, Stage
from pipecompile.schedule.problem import Problem, Work

__all__ = ["activation_caps", "problem_of_plan", "problem_of_stages"]


def problem_of_plan(plan: Plan) -> Problem:
    """What the schedule of `plan` answers."""
    placement = plan.schedule.placement
    caps = activation_caps(plan.stages, placement, plan.microbatches, plan.options.memory_bytes)
    return problem_of_stages(plan.stages, plan.link, placement, plan.microbatches, caps)


def problem_of_stages(
    stages: Sequence[Stage],
    link: Link,
    placement: Sequence[int],
    microbatches: int,
    caps: Sequence[int] | None = None,
) -> Problem:
    """Bytes are bounds, as caps are judged on; tensors that stages pass on travel with the boundary between them."""
    away = [left != right for left, right in pairwise(placement)]
    forward = [sum(link.transfer_ns(tensor.bytes) for tensor in stage.outputs) for stage in stages[:-1]]
    backward = [sum(link.transfer_ns(tensor.gradient_bytes) for tensor in stage.inputs) for stage in stages[1:]]
    return Problem(
        placement=tuple(placement),
        microbatches=microbatches,
        work=tuple(_work(stage, is_first=index == 0) for index, stage in enumerate(stages)),
        forward_hops=tuple(hop * apart for hop, apart in zip(forward, away, strict=True)),
        backward_hops=tuple(hop * apart for hop, apart in zip(backward, away, strict=True)),
        # torch's runtime always waits for a message; where no tensor carries a gradient it is empty.
        gradient=(True,) * len(away),
        caps=None if caps is None else tuple(caps),
    )


def _work(stage: Stage, *, is_first: bool) -> Work:
    """The first stage has no gradients of inputs to compute: its I is nothing, its W the whole backward."""
    kept, outputs = stage.footprint.kept.bound, stage.footprint.outputs.bound
    again = stage.recompute != "none"
    splits = stage.backward_input_ns is not None and stage.backward_weight_ns is not None
    return Work(
        forward_ns=stage.forward_ns,
        backward_ns=stage.backward_ns,
        backward_input_ns=0 if is_first else stage.backward_input_ns or 0,
        backward_weight_ns=stage.backward_ns if is_first else stage.backward_weight_ns or 0,
        recompute_ns=stage.recompute_ns,
        kept_bytes=outputs if again else kept,
        recomputed_bytes=kept - outputs if again else 0,
        between_bytes=kept,  # torch keeps everything until the gradients of the weights
        splits=splits,
        recompute=again,
    )


def activation_caps(
    stages: Sequence[Stage], placement: Sequence[int], microbatches: int, memory_bytes: int | None
) -> tuple[int, ...] | None:
    """Per rank what `memory_bytes` leave for activations beside parameters, gradients, buffers and workspace."""
    if memory_bytes is None:
        return None
    caps = []
    for rank in range(max(placement) + 1):
        held = {index: stage.footprint for index, stage in enumerate(stages) if placement[index] == rank}
        caps.append(max(0, memory_bytes - rank_memory(held, (), microbatches=microbatches).total.bound))
    return tuple(caps)
