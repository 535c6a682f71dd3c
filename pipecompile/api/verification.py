"""Does the pipeline train the model? One step of each, compared tensor by tensor."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import InputError
from pipecompile.frontend.deterministic_kernels import deterministic_kernels
from pipecompile.frontend.loss_reduction import (
    LossReduction,
    check_total_weight,
    total_weight,
)
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import LossFunction, Target, sum_of_squares
from pipecompile.frontend.target_capture import capture_target
from pipecompile.graph.attention_path import training_attention
from pipecompile.graph.batch_statistics import DeferredBatchNorm, record_forward
from pipecompile.graph.model_state import copied_model
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.random_streams import StreamKey, use_stream
from pipecompile.ir.plan import Plan
from pipecompile.passes.autograd_context import EnterContexts
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.seed import Seed
from pipecompile.runtime import world
from pipecompile.runtime.batch_statistics import minibatch_statistics
from pipecompile.runtime.gradients import divide_gradients
from pipecompile.runtime.place import running_replicas
from pipecompile.training.pipeline import Pipeline

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
UNDER_SEEDS = "the unsplit graph under the same seeds"
AS_GIVEN = "modules in the modes that they have"
EVAL = "modules in eval mode, where nothing is drawn"
# What the order of a sum over ranks may change, relative to the largest element.
TOLERANCE = 1e-6
# Of the gradients' norm. Half precision changes each saved element by up to 2⁻⁸ of it (bfloat16).
HALF_TOLERANCE = 2**-5


@dataclass(frozen=True)
class Difference:
    """One tensor of both runs. `relative` is the largest difference over the largest element."""

    kind: str
    name: str
    relative: float

    @property
    def equal(self) -> bool:
        """Bit for bit."""
        return self.relative == 0.0


@dataclass(frozen=True)
class Comparison:
    """A pipelined step beside the unsplit one. `reference` says what the unsplit one was, `mode`
    how modules ran.

    `losses` are the unsplit one and the pipeline's, None for inference, where outputs are compared.
    `tied` are gradients that are summed over ranks, in another order than the unsplit sum: of tied
    parameters, and of stages on several ranks. Where the plan saves in half precision, gradients
    need only be near: `distance` is then the norm of their difference divided by their norm, of the
    rank where it is largest.
    """

    reference: str
    losses: tuple[float, float] | None
    differences: tuple[Difference, ...]
    tied: frozenset[str]
    distance: float | None = None
    mode: str = AS_GIVEN

    @property
    def worst(self) -> Difference:
        """The largest difference."""
        return max(self.differences, key=lambda difference: difference.relative)

    @property
    def passed(self) -> bool:
        """Whether all is equal bit for bit, except sums over ranks, and gradients under half
        precision.
        """
        has_exact_gradients = self.distance is None
        for difference in self.differences:
            tolerance = TOLERANCE if difference.name in self.tied else 0.0
            is_exact = has_exact_gradients or difference.kind != "gradient"
            if is_exact and difference.relative > tolerance:
                return False
        is_near = (self.distance or 0.0) <= HALF_TOLERANCE
        has_same_loss = self.losses is None or self.losses[0] == self.losses[1]
        return is_near and has_same_loss


class Reference:
    """The unsplit model's training step as a step is defined: microbatch by microbatch, summed,
    then divided by M, or what the reduction of the loss says instead.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, run: Any, description: str) -> None:
        self.model = model
        self.description = description
        self._loss_fn = loss_fn
        self._run = run

    def output(self, key: StreamKey, call: Arguments) -> Any:
        """Return the output of one microbatch, whose random nodes draw from `key`."""
        return self._run(key, call.args, call.kwargs)

    def step(
        self,
        target: Target,
        microbatches: int,
        *,
        seed: int = 0,
        step: int = 0,
        replicas: int = 1,
    ) -> Tensor:
        """Run one step, which as many `replicas` run on the same minibatch; gradients are left on
        `model`, whose old ones are dropped. Returns the loss.
        """
        self.model.zero_grad(set_to_none=True)
        rows = target.microbatches(microbatches)
        losses, extras = [], []
        with minibatch_statistics():
            pairs = zip(rows, target.cut_targets(microbatches), strict=True)
            for index, (call, wanted) in enumerate(pairs):
                output = self.output(StreamKey(seed, step, index), call)
                loss, extra = _loss_and_extra(self._loss_fn(output, wanted))
                loss.backward()
                losses.append(loss.detach())
                extras.append(extra)
        return self._reduced(target.loss_reduction, torch.stack(losses), extras, replicas)

    def _reduced(
        self, reduction: LossReduction, losses: Tensor, extras: Sequence[Any], replicas: int
    ) -> Tensor:
        """Divide the gradients; return the loss of the step."""
        parameters = self.model.parameters()
        if reduction == "mean":
            divide_gradients(parameters, len(losses))
            return losses.mean()
        if reduction == "sum":
            divide_gradients(parameters, 1 / replicas)
            return losses.sum() * replicas
        weight = total_weight([extra.weight for extra in extras]).item()
        check_total_weight(weight)
        divide_gradients(parameters, weight)
        return (losses.double().sum() / weight).to(losses.dtype)


def _loss_and_extra(returned: Any) -> tuple[Tensor, Any]:
    """Return a loss, and what came with it."""
    return returned if isinstance(returned, tuple) else (returned, None)


def reference_for(target: Target, plan: Plan) -> Reference:
    """Return a copy of the unsplit model to compare with.

    It is the original module, unless that draws random numbers: the pipeline draws them from seeds
    of its own, for each node and microbatch, so the reference is then the model's whole graph under
    these seeds.
    """
    twin = replace(_copied(target), costs=None, autocast=None)
    model = twin.model
    captured = capture_target(twin, plan.options, verify=False)
    if not any(node.meta["random"] for node in captured.module.graph.nodes):

        def run_model(key: StreamKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _forward(plan, key, model, *args, **kwargs)

        return Reference(twin.model_with_loss, twin.trained_by, run_model, ORIGINAL)
    graph = captured.module
    apply_passes(graph.graph, [Seed(), EnterContexts()])
    graph.recompile()

    def run(key: StreamKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with use_stream(key):
            call = type(captured.sample)(args, kwargs)
            tensors = captured.capture.inputs.flatten(call)
            return captured.capture.outputs.unflatten(_forward(plan, key, graph, *tensors))

    return Reference(twin.model_with_loss, twin.trained_by, run, UNDER_SEEDS)


def _copied(target: Target) -> Target:
    """Return the target with a copy of the model, and of a loss that is a module."""
    if not isinstance(target.loss_fn, nn.Module):
        return replace(target, model=copied_model(target.model))
    # Together, since they may share constants.
    model, loss_fn = copied_model(nn.ModuleList([target.model, target.loss_fn]))
    return replace(target, model=model, loss_fn=loss_fn)


def _forward(plan: Plan, key: StreamKey, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run an unsplit module on a microbatch; it updates running averages when the plan does."""
    if plan.options.batch_norm == "microbatch":
        return module(*args, **kwargs)
    with record_forward(key):
        return DeferredBatchNorm(operator.call, "the model")(module, *args, **kwargs)


def compare(
    pipeline: Pipeline,
    losses: tuple[float, Tensor | None],
    gradients: Mapping[str, Tensor | None],
    buffers: Mapping[str, Tensor],
    description: str,
) -> Comparison:
    """Compare the step that `pipeline` just took with the unsplit one's loss, and its gradients and
    buffers by name.

    `losses` are the unsplit one and this process's, None if the last stage is elsewhere. With
    several processes each compares its part, and all get the whole.
    """
    found = [
        *(_difference("gradient", n, p.grad, gradients[n]) for n, p in pipeline.named_parameters()),
        *(
            _difference("buffer", n, b, buffers[n])
            for n, b in pipeline.named_buffers()
            if n in buffers
        ),
    ]
    several, ranks = world.size() > 1, pipeline.plan.schedule.stage_ranks
    tied = {
        p.name
        for p in pipeline.plan.parameters
        # One process takes the microbatches of such stages in another order too.
        if p.trainable and ((several and len(p.stages) > 1) or len(ranks[p.owner]) > 1)
    }
    halved = any(
        "half" in run.encodings for stage in pipeline.plan.stages for run in stage.encoded_runs
    )
    unsplit, own = losses
    pair = (unsplit, unsplit if own is None else own.item())
    distance = _distance(pipeline, gradients) if halved else None
    return _gathered(Comparison(description, pair, tuple(found), frozenset(tied), distance))


def compare_outputs(pipeline: Pipeline, target: Target) -> Comparison:
    """Compare what `pipeline`, which has not evaluated anything yet, returns for each planned
    microbatch with the output of the unsplit model in eval mode.
    """
    evaluated = replace(target, model=copied_model(target.model).eval())
    reference, found = reference_for(evaluated, pipeline.plan), list[Difference]()
    for index, call in enumerate(target.microbatches(pipeline.plan.microbatches)):
        # Evaluations are numbered backwards from -1, and each has its only microbatch as its first.
        key = StreamKey(pipeline.seed, -index - 1, 0)
        with training_attention():
            wanted = tensor_leaves(reference.output(key, call))
            output = pipeline.evaluate(call)
        # Only ranks with the last stage have outputs.
        got = wanted[:0] if output is None else tensor_leaves(output)
        for number, (own, other) in enumerate(zip(got, wanted, strict=False)):
            name = f"{number} of microbatch {index}"
            found.append(_difference("output", name, own.detach(), other.detach()))
        if output is not None and len(got) != len(wanted):
            found.append(Difference("output", f"tensors of microbatch {index}", float("inf")))
    return _gathered(Comparison(reference.description, None, tuple(found), frozenset(), mode=EVAL))


def _distance(pipeline: Pipeline, wanted: Mapping[str, Tensor | None]) -> float:
    """Return the distance of all gradients of this process, as one vector, divided by its norm.

    It is infinite if one is missing.
    """
    apart = size = 0.0
    for name, parameter in pipeline.named_parameters():
        got, other = parameter.grad, wanted[name]
        if (got is None) != (other is None):
            return float("inf")
        if got is not None and other is not None:
            # In float64: sums of millions of squares would lose digits in float32.
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
    """Return the plan, and a seeded step of the pipeline compared with the unsplit model's; for
    inference what it returns for each microbatch.

    A model that draws random numbers is compared twice: in its own modes with its graph under the
    same seeds, and in eval mode with the original module. The two losses differ, because dropout
    changes the output. Costs are "flops" unless given, because the plan only has to be one of many
    that must all train the same. Without a loss and without a `loss` output, the loss is a fixed
    sum of squares. Under torchrun each rank compares its own part, and every rank returns all of
    them. Replicas draw other numbers than one run over their common minibatch, so such a model is
    then compared in eval mode only.
    """
    options = {"costs": "flops", **options}
    target.check_values("verify")
    target = replace(target, loss_fn=_loss_for(target))
    # Copied before the first step, which updates buffers, and on each rank only its own.
    untouched = _copied(target)
    for each in (untouched.model, untouched.loss_fn):
        if isinstance(each, nn.Module):
            each.eval()
    plan, first = compared(target, **options)
    if first.reference == ORIGINAL or plan.options.is_inference:
        return plan, [first]
    # What was left open is not chosen again.
    chosen = ("microbatches", "schedule", "recompute")
    options |= {name: getattr(plan.options, name) for name in chosen}
    _, second = compared(untouched, **options)
    in_eval = replace(second, mode=EVAL)
    return plan, [in_eval] if _running_replicas(plan) > 1 else [first, in_eval]


def _running_replicas(plan: Plan) -> int:
    return max(1, running_replicas(plan.ranks, None))


def _loss_for(target: Target) -> LossFunction | None:
    if target.loss_fn is not None:
        return target.loss_fn
    # A copy, and the generators are restored: a forward updates buffers and draws numbers, which
    # the steps that are compared must not see.
    probe = copied_model(target.model)
    with torch.no_grad(), torch.random.fork_rng():
        output = probe(*target.call.args, **target.call.kwargs)
    try:
        target.trained_by(output, None)
    except InputError:
        return sum_of_squares
    return None


def compared(target: Target, **options: Any) -> tuple[Plan, Comparison]:
    """Return the plan, and a seeded step of the pipeline compared with the unsplit model's, in the
    model's modes; of a plan for inference its outputs, in eval mode.
    """
    pipeline = pipecompile(
        target.model,
        target.call,
        loss_fn=target.loss_fn,
        sample_target=target.targets,
        target_batch_dims=target.target_batch_dims,
        loss_reduction=target.loss_reduction,
        **options,
    )
    if pipeline.plan.options.is_inference:
        return pipeline.plan, compare_outputs(pipeline, target)
    reference = reference_for(target, pipeline.plan)
    plan, replicas = pipeline.plan, _running_replicas(pipeline.plan)
    with deterministic_kernels():
        wanted = reference.step(target, plan.microbatches, seed=pipeline.seed, replicas=replicas)
        # The step adds to gradients that are there, such as those of the user's last step.
        for parameter in target.model_with_loss.parameters():
            parameter.grad = None
        loss, _ = _loss_and_extra(pipeline.step(target.call, target.targets))
    gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
    buffers = dict(reference.model.named_buffers())
    comparison = compare(pipeline, (wanted.item(), loss), gradients, buffers, reference.description)
    return plan, comparison


def _gathered(own: Comparison) -> Comparison:
    """Return the comparisons of all ranks as one comparison."""
    parts = world.gather(own)
    # Only ranks with the last stage have a loss of the pipeline; the others repeat the unsplit one.
    pairs = [part.losses for part in parts if part.losses is not None]
    losses = next((pair for pair in pairs if pair[0] != pair[1]), own.losses)
    distance = None if own.distance is None else max(part.distance or 0.0 for part in parts)
    differences = tuple(difference for part in parts for difference in part.differences)
    return replace(own, losses=losses, distance=distance, differences=differences)
