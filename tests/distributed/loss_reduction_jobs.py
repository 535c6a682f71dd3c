"""What workers do in tests of reductions of the loss; each function runs on every rank."""

from __future__ import annotations

import copy
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile import InputError, Pipeline, pipecompile
from pipecompile.api.verification import verify
from pipecompile.frontend.loss_reduction import LossReduction
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.runtime.shards import whole
from pipecompile.training.step_loss import StepLoss
from tests.distributed.fault_jobs import TIMEOUT, Seen, seen_in
from tests.distributed.parallel_jobs import FeedForward, layers, megatron, mesh_of
from tests.padded_batches import LOSSES, language_model, padded, unsplit_loss
from tests.unequal_batches import gradients_of, largest_difference

MICROBATCHES, MICROBATCH = 3, 2


class Run:
    """A pipeline on this rank, and the unsplit model."""

    def __init__(
        self,
        ranks: int,
        replicas: int,
        reduction: LossReduction,
        loss_fn: Any = None,
        **options: Any,
    ) -> None:
        self.model = language_model()
        self.reduction, self.replicas = reduction, replicas
        self.replica = dist.get_rank() // (dist.get_world_size() // replicas)
        tokens, _ = padded(MICROBATCHES * MICROBATCH, 0)
        self.pipeline: Pipeline = pipecompile(
            copy.deepcopy(self.model),
            tokens,
            ranks=ranks,
            microbatches=MICROBATCHES,
            costs="flops",
            self_check=False,
            loss_fn=loss_fn or LOSSES[reduction],
            loss_reduction=reduction,
            **options,
        )

    def parts(self, samples: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """A batch for each replica; that of the last one has padding only, if there are several."""
        parts = [padded(samples, seed + each, first_row=4) for each in range(self.replicas)]
        for _, labels in parts[1:][-1:]:
            labels.fill_(-100)
        return parts

    def step(self, samples: int, seed: int, **options: Any) -> tuple[Any, Tensor]:
        """A step of the pipeline on its replica's part, and of the unsplit model on all of them:
        both losses.
        """
        parts = self.parts(samples, seed)
        loss = self.pipeline.step(*parts[self.replica], everywhere=True, **options)
        return loss, self.unsplit(parts)

    def unsplit(self, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The loss of the unsplit model on all parts at once."""
        tokens, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        return unsplit_loss(self.model, self.reduction, tokens, labels)

    def distance(self, scale: float = 1.0) -> float:
        """The largest difference of a gradient of this rank, which a scaler has scaled."""
        named = self.pipeline.named_parameters()
        own = {name: whole(p.grad) / scale for name, p in named if p.grad is not None}
        assert own
        return largest_difference(own, gradients_of(self.model))


def apart(loss: Any, wanted: Tensor) -> float:
    """How far a loss or norm is, relative to the one that it should be."""
    return abs(loss.item() / wanted.item() - 1)


def steps(
    ranks: int, replicas: int, reduction: LossReduction, options: dict[str, Any]
) -> list[float]:
    """How far losses and gradients are from those of the unsplit model on the whole minibatch: of
    batches with and without a remainder, of clipping, of a scaler, and of accumulated steps.
    """
    run = Run(ranks, replicas, reduction, **options)
    found = []
    for seed, samples in enumerate((6, 5, 1)):
        run.pipeline.zero_grad()
        run.model.zero_grad()
        loss, wanted = run.step(samples, seed)
        wanted.backward()
        norm = torch.nn.utils.get_total_norm(gradients_of(run.model).values())
        found += [apart(loss, wanted), run.distance()]
        found += [apart(run.pipeline.clip_grad_norm_(1e3), norm)]

    run.pipeline.zero_grad()
    run.model.zero_grad()
    _, wanted = run.step(5, 7, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    wanted.backward()
    found.append(run.distance(scale=8.0))
    return [*found, _accumulated(run)]


def _accumulated(run: Run) -> float:
    """How far gradients are that three steps of several sizes make up."""
    run.pipeline.zero_grad()
    run.model.zero_grad()
    sizes = (6, 6, 6) if run.reduction == "mean" else (5, 6, 2)
    parts = []
    for index, samples in enumerate(sizes):
        loss, wanted = run.step(samples, 20 + index, accumulate=index < 2)
        assert apart(loss, wanted) <= 1e-12
        parts += run.parts(samples, 20 + index)
    if run.reduction == "mean":  # the sum of the means of steps, as of backwards
        (len(sizes) * run.unsplit(parts)).backward()
    else:
        run.unsplit(parts).backward()
    return run.distance()


def evaluated(ranks: int, replicas: int, reduction: LossReduction) -> list[float]:
    """How far losses of evaluations are, where replicas have unequally many samples."""
    run = Run(ranks, replicas, reduction)
    found = []
    for samples in (1, 6, 13):
        parts = [padded(samples + each, each, first_row=3) for each in range(replicas)]
        loss = run.pipeline.evaluate(*parts[run.replica])
        if loss is not None:
            found.append(apart(loss, run.unsplit(parts)))
    return found


def refused(weight: float, culprit: int) -> tuple[str, bool, float]:
    """What a rank says of a weight that one of two replicas gives, whether it has gradients then,
    and the distance of those of the next step.
    """
    given = {"weight": 1.0}

    def loss_fn(logits: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
        loss, tokens = LOSSES["weighted"](logits, labels)
        is_here = culprit in (-1, dist.get_rank() // 2)
        return loss, tokens * given["weight"] if is_here else tokens

    run = Run(2, 2, "weighted", loss_fn)
    given["weight"] = weight
    text = ""
    try:
        run.pipeline.step(*run.parts(6, 0)[run.replica])
    except InputError as error:
        text = str(error)
    has_gradients = any(p.grad is not None for p in run.pipeline.parameters())
    given["weight"] = 1.0
    _, wanted = run.step(6, 1)
    wanted.backward()
    return text, has_gradients, run.distance()


def other_reductions() -> str:
    """What a rank says if ranks were compiled with other reductions."""
    reduction: LossReduction = "weighted" if dist.get_rank() else "mean"
    run = Run(2, 1, reduction)
    try:
        run.step(6, 0)
    except InputError as error:
        return str(error)
    return ""


def late_for_weights() -> Seen:
    """What rank 0 sees if rank 1 comes too late to the exchange of weights."""
    run = Run(2, 1, "weighted", step_timeout=TIMEOUT)
    run.step(6, 0)
    divisor = StepLoss.divisor

    def late(*args: Any, **options: Any) -> float:
        if dist.get_rank():
            time.sleep(TIMEOUT + 1)
        return divisor(*args, **options)

    with patch.object(StepLoss, "divisor", late):
        return seen_in(lambda: run.step(6, 1))


def divided() -> tuple[float, float]:
    """How far loss and gradients are where two ranks divide the work on the same data."""

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        chosen = target[:, 0] > 0
        return (output - target)[chosen].square().mean(), int(chosen.sum())

    target = layers(FeedForward, 15)
    target.model.eval()  # it has dropout, which draws from other streams here
    (rows,), wanted = target.call.args, target.targets
    pipeline = pipecompile(
        copy.deepcopy(target.model),
        torch.cat([rows, rows[:1]]),
        ranks=2,
        microbatches=4,
        costs="flops",
        self_check=False,
        loss_fn=loss_fn,
        loss_reduction="weighted",
        mesh=mesh_of(pp=2, tp=2),
        parallelize=megatron,
    )
    got = pipeline.step(rows, wanted, everywhere=True)
    loss, _ = loss_fn(target.model(rows), wanted)
    loss.backward()
    own = {name: whole(p.grad) for name, p in pipeline.named_parameters() if p.grad is not None}
    return apart(got, loss), largest_difference(own, gradients_of(target.model))


def verified(reduction: LossReduction) -> bool:
    """Whether two replicas of two ranks pass the comparison with the unsplit model."""
    model, (tokens, labels) = language_model(), padded(6, 9)
    target = Target(
        model, arguments_of(model, tokens), LOSSES[reduction], labels, loss_reduction=reduction
    )
    _, (comparison,) = verify(target, ranks=2, microbatches=3)
    return comparison.passed
