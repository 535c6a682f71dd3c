"""Pipelines under any schedule: hand-made orders that no planner would choose, and named ones on any placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from pipecompile.api.capture import Captured, capture_target
from pipecompile.api.options import options_for
from pipecompile.api.pipeline import Pipeline
from pipecompile.api.planning import make_plan
from pipecompile.api.target import Target
from pipecompile.api.verify import Comparison, compare, reference_for
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.ir.serialization import decode, encode
from pipecompile.runtime import world
from pipecompile.schedule.named import generate
from pipecompile.schedule.placement import place
from pipecompile.schedule.stages import problem_of_stages
from pipecompile.schedule.transfers import add_transfers

__all__ = ["BACKWARDS", "Order", "compared", "pipeline_under"]

CUTS: dict[tuple[str, int, int], Plan] = {}
BACKWARDS = ("whole", "halves", "late", "mixed", "behind")


@dataclass(frozen=True)
class Order:
    """A schedule on `shape`: its name, or how backwards are done in a hand-made order (one of BACKWARDS)."""

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
        """Its compute actions."""
        placement = place(self.shape, self.ranks, self.stages_per_rank)
        again = [self.recompute and stage < self.stages - 1 for stage in range(self.stages)]
        if self.name not in BACKWARDS:
            return generate(self.name, placement, microbatches, again, except_last=self.but_last)
        rows = [
            _row(
                [s for s, where in enumerate(placement) if where == rank],
                microbatches,
                self.name,
                again,
            )
            for rank in range(self.ranks)
        ]
        return Schedule.of(self.name, microbatches, placement, rows)


def _row(
    stages: Sequence[int], microbatches: int, backwards: str, again: Sequence[bool]
) -> list[Action]:
    """All forwards, then the backwards of the last stage, and so on."""
    every = range(microbatches)
    forwards = [Action(stage, Kind.FORWARD, microbatch) for stage in stages for microbatch in every]
    found = [
        a
        for stage in stages[::-1]
        for a in _backwards(stage, microbatches, backwards, again[stage])
    ]
    late = [a for a in found if a.kind is Kind.BACKWARD_WEIGHT] if backwards == "late" else []
    return [*forwards, *(a for a in found if a not in late), *late]


def _backwards(stage: int, microbatches: int, backwards: str, again: bool) -> Iterator[Action]:
    """`behind`: a weight half waits for the next microbatch's input half; `mixed`: every second backward is whole."""
    waiting: list[Action] = []
    for microbatch in range(microbatches):
        if again:
            yield Action(stage, Kind.RECOMPUTE, microbatch)
        if backwards == "whole" or (backwards == "mixed" and microbatch % 2):
            yield Action(stage, Kind.BACKWARD, microbatch)
            continue
        yield Action(stage, Kind.BACKWARD_INPUT, microbatch)
        waiting.append(Action(stage, Kind.BACKWARD_WEIGHT, microbatch))
        if backwards != "behind" or len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def pipeline_under(order: Order, target: Target, microbatches: int = 4) -> Pipeline:
    """The target in `order.stages` stages under `order`, whether or not a planner would make that plan."""
    options = options_for(target, k=order.stages, microbatches=microbatches, costs="flops")
    captured = capture_target(target, options, verify=False)
    made = world.share_from_first(lambda: encode(_under(_cut(target, options, captured), order)))
    return Pipeline(decode(made, Plan, origin="rank 0"), captured, target)


def _cut(target: Target, options: Options, captured: Captured) -> Plan:
    """The planned stages: the same for every order of as many."""
    key = captured.digest, options.k, options.microbatches
    if key not in CUTS:
        CUTS[key] = make_plan(target, options, captured)
    return CUTS[key]


def _under(plan: Plan, order: Order) -> Plan:
    compute = order.schedule(plan.microbatches)
    problem = problem_of_stages(plan.stages, plan.links, compute.placement, plan.microbatches)
    again = ("except-last" if order.but_last else "stage") if order.recompute else "none"
    *before, last = plan.stages
    stages = [*(msgspec.structs.replace(stage, recompute=again) for stage in before), last]
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


def compared(order: Order, target: Target, microbatches: int = 4) -> Comparison:
    """A step under `order` beside the unsplit model's."""
    pipeline = pipeline_under(order, target, microbatches)
    reference = reference_for(target, pipeline.plan)
    wanted: Tensor = reference.step(target, microbatches)
    loss = pipeline.step(target.call, target.targets)
    gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
    buffers = dict(reference.model.named_buffers())
    return compare(pipeline, (wanted.item(), loss), gradients, buffers, reference.description)
