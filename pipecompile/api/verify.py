"""Does the pipeline train the model? Steps of both, compared tensor by tensor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.api.capture import capture_target
from pipecompile.api.compile import pipecompile
from pipecompile.api.pipeline import Pipeline
from pipecompile.api.target import LossFunction, Target, sum_of_squares
from pipecompile.errors import InputError
from pipecompile.graph.random_streams import Moment, at
from pipecompile.ir.plan import Plan
from pipecompile.passes.autograd_context import EnterRegions
from pipecompile.passes.contract import apply
from pipecompile.passes.seed import Seed
from pipecompile.runtime import world
from pipecompile.runtime.gradients import scale
from pipecompile.runtime.microbatch import split

__all__ = [
    "HALF_TOLERANCE",
    "Comparison",
    "Difference",
    "Reference",
    "compare",
    "compared",
    "reference_for",
    "verify",
]

ORIGINAL = "the original module"
TOLERANCE = 1e-6  # what the order of a sum over ranks may change, relative to the largest element
HALF_TOLERANCE = (
    2**-5
)  # of the gradients' norm; half precision changes each saved element by up to 2⁻⁸


@dataclass(frozen=True)
class Difference:
    """One tensor of both runs: `relative` is the largest difference over the largest element."""

    kind: str
    name: str
    relative: float

    @property
    def equal(self) -> bool:
        """Bit for bit."""
        return self.relative == 0.0


@dataclass(frozen=True)
class Comparison:
    """A pipelined step beside the unsplit one. `reference` says what the unsplit one was.

    Where the plan saves in half precision gradients are not the same, and need only be near: `distance` is then the
    norm of what all of them differ by over their norm, of the rank that is furthest off.
    """

    reference: str
    losses: tuple[float, float]
    differences: tuple[Difference, ...]
    tied: frozenset[str]  # summed over ranks, in another order than the unsplit sum
    distance: float | None = None

    @property
    def worst(self) -> Difference:
        """The largest difference."""
        return max(self.differences, key=lambda difference: difference.relative)

    @property
    def passed(self) -> bool:
        """All equal bit for bit, but for what is summed over ranks, and for gradients under half precision."""
        exact = [d for d in self.differences if self.distance is None or d.kind != "gradient"]
        equal = all(d.relative <= (TOLERANCE if d.name in self.tied else 0.0) for d in exact)
        return (
            equal and self.losses[0] == self.losses[1] and (self.distance or 0.0) <= HALF_TOLERANCE
        )


class Reference:
    """The unsplit model's training step, by the semantics of a step: microbatch by microbatch, summed, divided."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, run: Any, description: str) -> None:
        self.model = model
        self.description = description
        self._loss_fn = loss_fn
        self._run = run

    def step(self, target: Target, microbatches: int, *, seed: int = 0, step: int = 0) -> Tensor:
        """Leaves gradients on `model`, which starts without any; returns the mean loss."""
        self.model.zero_grad(set_to_none=True)
        rows = split((target.call.args, target.call.kwargs), microbatches)
        losses = []
        for index, ((args, kwargs), wanted) in enumerate(
            zip(rows, split(target.targets, microbatches), strict=True)
        ):
            loss = self._loss_fn(self._run(Moment(seed, step, index), args, kwargs), wanted)
            loss.backward()
            losses.append(loss.detach())
        scale(self.model.parameters(), microbatches)
        return torch.stack(losses).mean()


def reference_for(target: Target, plan: Plan) -> Reference:
    """The unsplit model to compare with, on a copy of it.

    It is the original module, unless it draws random numbers: then it is its whole graph under the same seeds.
    """
    model = copy.deepcopy(target.model)
    twin = Target(model, target.call, target.loss_fn, target.targets)
    captured = capture_target(twin, plan.options, verify=False)
    if not any(node.meta["random"] for node in captured.module.graph.nodes):
        return Reference(model, twin.trained_by, lambda _, a, k: model(*a, **k), ORIGINAL)
    graph = captured.module
    apply(graph.graph, [Seed(), EnterRegions()])
    graph.recompile()

    def run(moment: Moment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with at(moment):
            call = type(captured.sample)(args, kwargs)
            return captured.capture.outputs.unflatten(graph(*captured.capture.inputs.flatten(call)))

    return Reference(model, twin.trained_by, run, "the unsplit graph under the same seeds")


def compare(
    pipeline: Pipeline,
    losses: tuple[float, Tensor | None],
    gradients: Mapping[str, Tensor | None],
    buffers: Mapping[str, Tensor],
    description: str,
) -> Comparison:
    """A step that `pipeline` just took beside the unsplit one's loss, gradients and buffers, by name.

    `losses` are the unsplit one and this process's, None where the last stage is elsewhere. In several processes
    each compares its part, and all get the whole.
    """
    found = [
        *(_difference("gradient", n, p.grad, gradients[n]) for n, p in pipeline.named_parameters()),
        *(
            _difference("buffer", n, b, buffers[n])
            for n, b in pipeline.named_buffers()
            if n in buffers
        ),
    ]
    several = world.size() > 1
    tied = {
        p.name for p in pipeline.plan.parameters if several and p.trainable and len(p.stages) > 1
    }
    halved = any("half" in run.policies for stage in pipeline.plan.stages for run in stage.saving)
    unsplit, own = losses
    pair = (unsplit, unsplit if own is None else own.item())
    distance = _distance(pipeline, gradients) if halved else None
    return _gathered(Comparison(description, pair, tuple(found), frozenset(tied), distance))


def _distance(pipeline: Pipeline, wanted: Mapping[str, Tensor | None]) -> float:
    """Of all gradients of this process as one vector; infinite where one is missing."""
    apart = size = 0.0
    for name, parameter in pipeline.named_parameters():
        got, other = parameter.grad, wanted[name]
        if (got is None) != (other is None):
            return float("inf")
        if got is not None and other is not None:
            apart += (got.double() - other.double()).square().sum().item()
            size += other.double().square().sum().item()
    return (apart / size) ** 0.5 if size else float(apart > 0)


def _difference(kind: str, name: str, got: Tensor | None, wanted: Tensor | None) -> Difference:
    if got is None or wanted is None:
        return Difference(kind, name, 0.0 if got is wanted else float("inf"))
    if torch.equal(got, wanted):
        return Difference(kind, name, 0.0)
    gap, size = (
        (got.double() - wanted.double()).abs().max().item(),
        wanted.double().abs().max().item(),
    )
    return Difference(kind, name, gap / size if size else float("inf"))


def verify(target: Target, **options: Any) -> tuple[Plan, list[Comparison]]:
    """A seeded step of the pipeline beside the unsplit model's: as the model is, and, if that is random, in eval mode.

    Without a loss and without a `loss` output, the loss is a fixed sum of squares. Under torchrun each rank compares
    its own part, and every rank returns all of them.
    """
    target.check_values("verify")
    target = replace(target, loss_fn=_loss_for(target))
    # A copy from before the first step: that updates buffers, on each rank only its own.
    untouched = replace(target, model=copy.deepcopy(target.model).eval())
    plan, first = compared(target, **options)
    if first.reference == ORIGINAL:
        return plan, [first]
    return plan, [first, compared(untouched, **options)[1]]


def _loss_for(target: Target) -> LossFunction | None:
    if target.loss_fn is not None:
        return target.loss_fn
    probe = copy.deepcopy(target.model)
    with torch.no_grad(), torch.random.fork_rng():
        output = probe(*target.call.args, **target.call.kwargs)
    try:
        target.trained_by(output, None)
    except InputError:
        return sum_of_squares
    return None


def compared(target: Target, **options: Any) -> tuple[Plan, Comparison]:
    """A seeded step of the pipeline beside the unsplit model's, in the modes that the model is in."""
    pipeline = pipecompile(
        target.model, target.call, loss_fn=target.loss_fn, sample_target=target.targets, **options
    )
    reference = reference_for(target, pipeline.plan)
    wanted = reference.step(target, pipeline.plan.microbatches, seed=pipeline.seed)
    for parameter in target.model.parameters():
        parameter.grad = None
    loss = pipeline.step(target.call, target.targets)
    gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
    buffers = dict(reference.model.named_buffers())
    comparison = compare(pipeline, (wanted.item(), loss), gradients, buffers, reference.description)
    return pipeline.plan, comparison


def _gathered(own: Comparison) -> Comparison:
    """The comparisons of all ranks as one."""
    parts = world.gathered(own)
    losses = next((part.losses for part in parts if part.losses[0] != part.losses[1]), own.losses)
    distance = None if own.distance is None else max(part.distance or 0.0 for part in parts)
    differences = tuple(difference for part in parts for difference in part.differences)
    return replace(own, losses=losses, distance=distance, differences=differences)
