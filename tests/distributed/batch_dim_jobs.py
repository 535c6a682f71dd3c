"""What workers do in tests of batches in another dimension than 0: each runs on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import InputError
from pipecompile.training.pipeline import Pipeline
from tests.time_major import LENGTH, WIDTH, Recurrent, gap, loop, output_loss

PLANNED, MICROBATCHES = 2, 4


def pipeline_of(ranks: int, **options: Any) -> tuple[Pipeline, Recurrent]:
    """A pipeline over time-major sequences, and a copy of the whole model."""
    torch.manual_seed(0)
    model = Recurrent().double()
    whole = copy.deepcopy(model)
    sample = batch_of(PLANNED * MICROBATCHES, 0)[0]
    options = {"costs": "flops", "self_check": False, "microbatches": MICROBATCHES, **options}
    pipeline = pipecompile(model, sample, ranks=ranks, loss_fn=output_loss, batch_dim=1, **options)
    return pipeline, whole


def batch_of(samples: int, replica: int) -> tuple[Tensor, Tensor]:
    """The batch of a replica, and its target."""
    generator = torch.Generator().manual_seed(100 * samples + replica)
    value, target = torch.randn(2, LENGTH, samples, WIDTH, generator=generator).double()
    return value, target


def steps(ranks: int, replicas: int, options: dict[str, Any]) -> list[float]:
    """How far losses and gradients of steps are from those of the loop over all replicas."""
    pipeline, whole = pipeline_of(ranks, **options)
    found = []
    for samples in (8, 7, 3, 1):
        pipeline.zero_grad()
        loss = pipeline.step(*batch_of(samples, dist.get_rank() // ranks), everywhere=True)
        losses, sums = [], dict[str, Tensor]()
        for replica in range(replicas):
            value, target = batch_of(samples, replica)
            each, own = loop(whole, output_loss, {"value": value}, target, {"value": 1}, PLANNED)
            losses.append(each)
            sums = {name: sums.get(name, 0) + value / replicas for name, value in own.items()}
        gradients = {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}
        found += [gap(loss, torch.stack(losses).mean())]
        found += [gap(gradients, {name: sums[name] for name in gradients})]
    return found


def evaluated(ranks: int, replicas: int) -> list[float]:
    """How far outputs and losses are from the whole model's; [] without the last stage."""
    pipeline, whole = pipeline_of(ranks, schedule="1f1b")
    found = []
    for samples in (1, 7, 13):
        value, target = batch_of(samples, dist.get_rank() // ranks)
        output, loss = pipeline.evaluate(value), pipeline.evaluate(value, target)
        if output is not None:
            parts = [batch_of(samples, replica) for replica in range(replicas)]
            value_of_all, target_of_all = (torch.cat(each, 1) for each in zip(*parts, strict=True))
            found += [gap(output, whole(value))]
            found += [gap(loss, output_loss(whole(value_of_all), target_of_all))]
    return found


def unequal_replicas() -> str:
    """What a rank says if replicas are given 8 and 7 samples."""
    pipeline, _ = pipeline_of(1)
    try:
        pipeline.step(*batch_of(8 - dist.get_rank(), dist.get_rank()))
    except InputError as error:
        return str(error)
    return "nothing"
