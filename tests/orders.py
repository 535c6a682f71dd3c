"""Pipelines under any schedule: hand-made orders, and named schedules on any placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from pipecompile.api.options import options_for
from pipecompile.api.plan import make_plan
from pipecompile.api.verification import Comparison, compare, reference_for
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.ir.serialization import decode, encode
from pipecompile.runtime import world
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.placement import place
from pipecompile.schedule.stages import problem_of_stages
from pipecompile.schedule.transfers import add_transfers
from pipecompile.training.pipeline import Pipeline

__all__ = ["BACKWARDS", "PipelineOrder", "compared", "pipeline_under"]

CUTS: dict[tuple[str, int, int], Plan] = {}
BACKWARDS = ("whole", "halves", "late", "mixed", "behind")


@dataclass(frozen=True)
class PipelineOrder:
    """A schedule on the placement `shape`.

    `name` is that of a schedule or, in a hand-made order, how backwards run (one of BACKWARDS).
    """

    name: str
    ranks: int
    stages_per_rank: int = 1
    shape: str = "linear"
    recompute: bool = False
    but_last: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def __str__(self) -> str:
        where = (
            f"{self.ranks}x{self.stages_per_rank} {self.shape}"
            if self.stages_per_rank > 1
            else f"{self.ranks}"
        )
        return f"{self.name} {where}{' recompute' * self.recompute}{' but last' * self.but_last}"

    def schedule(self, microbatches: int) -> Schedule:
        """Return its compute actions."""
        placement = place(self.shape, self.ranks, self.stages_per_rank)
        recomputes = [self.recompute and stage < self.stages - 1 for stage in range(self.stages)]
        if self.name not in BACKWARDS:
            return generate(
                self.name, placement, microbatches, recomputes, except_last=self.but_last
            )
        rows = [
            _row(
                [s for s, where in enumerate(placement) if where == rank],
                microbatches,
                self.name,
                recomputes,
            )
            for rank in range(self.ranks)
        ]
        return Schedule.of(self.name, microbatches, placement, rows)


def _row(
    stages: Sequence[int], microbatches: int, backwards: str, recomputes: Sequence[bool]
) -> list[Action]:
    """Return all forwards, then the backwards of the last stage, of the one before it and so on."""
    every = range(microbatches)
    forwards = [Action(stage, Kind.FORWARD, microbatch) for stage in stages for microbatch in every]
    actions = [
        a
        for stage in stages[::-1]
        for a in _backwards(stage, microbatches, backwards, recomputes[stage])
    ]
    late = [a for a in actions if a.kind is Kind.BACKWARD_WEIGHT] if backwards == "late" else []
    return [*forwards, *(a for a in actions if a not in late), *late]


def _backwards(stage: int, microbatches: int, backwards: str, recomputes: bool) -> Iterator[Action]:
    """Yield the backwards of a stage.

    `behind`: a weight backward waits for the input backward of the next microbatch. `mixed`: every
    second backward is whole.
    """
    waiting: list[Action] = []
    for microbatch in range(microbatches):
        if recomputes:
            yield Action(stage, Kind.RECOMPUTE, microbatch)
        if backwards == "whole" or (backwards == "mixed" and microbatch % 2):
            yield Action(stage, Kind.BACKWARD, microbatch)
            continue
        yield Action(stage, Kind.BACKWARD_INPUT, microbatch)
        waiting.append(Action(stage, Kind.BACKWARD_WEIGHT, microbatch))
        if backwards != "behind" or len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def pipeline_under(order: PipelineOrder, target: Target, microbatches: int = 4) -> Pipeline:
    """Return the pipeline under `order`, even if no planner would make that plan."""
    options = options_for(target, k=order.stages, microbatches=microbatches, costs="flops")
    captured = capture_target(target, options, verify=False)
    plan = world.share_from_first(lambda: encode(_under(_cut(target, options, captured), order)))
    return Pipeline(decode(plan, Plan, origin="rank 0"), captured, target)


def _cut(target: Target, options: Options, captured: Captured) -> Plan:
    """Return the plan of the stages, which is the same for every order with as many of them."""
    key = captured.digest, options.k, options.microbatches
    if key not in CUTS:
        CUTS[key] = make_plan(target, options, captured)
    return CUTS[key]


def _under(plan: Plan, order: PipelineOrder) -> Plan:
    compute = order.schedule(plan.microbatches)
    problem = problem_of_stages(plan.stages, plan.links, compute.placement, plan.microbatches)
    policy = ("except-last" if order.but_last else "stage") if order.recompute else "none"
    *before, last = plan.stages
    stages = [*(msgspec.structs.replace(stage, recompute=policy) for stage in before), last]
    return msgspec.structs.replace(
        plan,
        options=msgspec.structs.replace(plan.options, schedule=order.name),
        ranks=order.ranks,
        stages_per_rank=order.stages_per_rank,
        stages=tuple(stages),
        schedule=add_transfers(problem, compute),
        prediction=msgspec.structs.replace(
            plan.prediction, memory=plan.prediction.memory[: order.ranks]
        ),
    )


def compared(order: PipelineOrder, target: Target, microbatches: int = 4) -> Comparison:
    """Return the comparison of a step under `order` with one of the unsplit model."""
    pipeline = pipeline_under(order, target, microbatches)
    reference = reference_for(target, pipeline.plan)
    wanted: Tensor = reference.step(target, microbatches)
    loss = pipeline.step(target.call, target.targets)
    gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
    buffers = dict(reference.model.named_buffers())
    return compare(pipeline, (wanted.item(), loss), gradients, buffers, reference.description)
