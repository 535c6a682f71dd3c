"""What workers do in tests of several shapes: each function runs on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.api.compilation import pipecompile
from pipecompile.api.verification import Reference, reference_for
from pipecompile.errors import InputError
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.training.pipeline import Pipeline
from tests.shaped_models import CausalModel, ImageModel, samples_of, token_loss
from tests.unequal_batches import gradients_of, largest_difference, sizes_of, unsplit_step

SIZES = {16: 2, 8: 4}
"""The samples of a microbatch by the length of its sequences."""
MICROBATCHES = 4
STEPS = ((8, 16), (16, 8), (7, 16), (13, 8), (8, 16))


def pipeline_of(ranks: int, **options: Any) -> tuple[Pipeline, CausalModel]:
    """A pipeline for both lengths, and a copy of the whole model."""
    torch.manual_seed(0)
    model = CausalModel().double()
    first, other = (samples_of(MICROBATCHES * size, length)[0] for length, size in SIZES.items())
    options = {"costs": "flops", "microbatches": MICROBATCHES, "self_check": False, **options}
    whole = copy.deepcopy(model)
    # With a third one, in which no step is taken, the further lengths share a capture.
    shapes = [other, samples_of(MICROBATCHES * 3, 12)[0]]
    pipeline = pipecompile(model, first, ranks=ranks, loss_fn=token_loss, shapes=shapes, **options)
    return pipeline, whole


def ways_of_captures() -> list[str]:
    """How each of three shapes was captured, proven by rank 0 and without proof by rank 1."""
    pipeline, _ = pipeline_of(2, self_check=True)
    return [program.captured.method for program in pipeline._programs.declared]


def part_of(samples: int, length: int, replica: int) -> tuple[Tensor, Tensor]:
    """The batch of a replica."""
    return samples_of(samples, length, replica)


def unsplit(references: dict[int, Reference], samples: int, length: int, replicas: int) -> Tensor:
    """Leave the undivided gradients of a step of all replicas; return its mean loss."""
    losses = [
        unsplit_step(
            lambda key, rows: references[length]._run(key, (rows,), {}),
            token_loss,
            *part_of(samples, length, replica),
            SIZES[length],
            step=STEPS.index((samples, length)),
            first=replica * len(sizes_of(samples, SIZES[length])),
        )
        for replica in range(replicas)
    ]
    return torch.stack(losses).mean()


def steps_of_both_shapes(ranks: int, replicas: int, options: dict[str, Any]) -> list[float]:
    """How far gradients and losses of steps, and of two that accumulate, are from the unsplit
    model's.
    """
    pipeline, whole = pipeline_of(ranks, **options)
    references = {}
    for length, size in SIZES.items():
        call = arguments_of(whole, samples_of(size * MICROBATCHES, length)[0])
        references[length] = reference_for(Target(whole, call, token_loss), pipeline.plan)
    replica, found, sums = dist.get_rank() // ranks, [], dict[str, Tensor]()
    for number, (samples, length) in enumerate(STEPS):
        model = references[length].model
        model.zero_grad()
        pipeline.steps = STEPS.index((samples, length))
        loss = unsplit(references, samples, length, replicas)
        wanted = gradients_of(model, samples / SIZES[length] * replicas)
        if number < 3:
            pipeline.zero_grad()
        if number >= 2:  # the last three are summed
            sums = {name: sums.get(name, 0) + value for name, value in wanted.items()}
            wanted = sums
        batch = part_of(samples, length, replica)
        own = pipeline.step(*batch, accumulate=number in (2, 3), everywhere=True)
        found.append(abs(own.item() - loss.item()))
        if number not in (2, 3):
            gradients = {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}
            found.append(largest_difference(gradients, wanted))
    return found


def evaluated(ranks: int) -> list[float]:
    """How far outputs and losses are from the unsplit model's; [] without the last stage."""
    pipeline, whole = pipeline_of(ranks)
    whole.eval()
    found = []
    for samples, length in ((11, 16), (1, 8), (23, 8), (8, 16)):
        ids, targets = samples_of(samples, length)
        output, loss = pipeline.evaluate(ids), pipeline.evaluate(ids, targets)
        if output is not None:
            found.append((output - whole(ids)).abs().max().item())
            found.append(abs(loss.item() - token_loss(whole(ids), targets).item()))
    return found


def different_shapes(ranks: int, replicas: int) -> list[str]:
    """What is said when one process steps, or evaluates, with another shape than the others."""
    pipeline, _ = pipeline_of(ranks)
    for length, size in SIZES.items():  # both are known from now on
        pipeline.step(*samples_of(size * MICROBATCHES, length))
        pipeline.evaluate(samples_of(size * MICROBATCHES, length)[0])
    is_other = dist.get_rank() >= ranks if replicas > 1 else dist.get_rank() == 1
    length = 8 if is_other else 16
    batch = samples_of(SIZES[length] * MICROBATCHES, length)
    said = []
    calls = [lambda: pipeline.evaluate(batch[0])] * (replicas == 1) + [
        lambda: pipeline.step(*batch)
    ]
    for call in calls:
        try:
            call()
        except InputError as error:
            said.append(str(error))
    return said


def from_the_meta_device() -> float:
    """On rank 0, how far gradients are from the unsplit model's where no rank has had the model."""
    with torch.device("meta"):
        model = ImageModel().double()
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randn(samples, 3, *size, generator=generator).double()
        for samples, size in ((8, (12, 16)), (16, (8, 8)))
    ]
    labels = torch.arange(16) % 5
    pipeline = pipecompile(
        *(model, batches[0]),
        k=2,
        microbatches=4,
        costs="flops",
        loss_fn=torch.nn.functional.cross_entropy,
        shapes=batches[1:],
        seed=3,
    )
    state, worst = pipeline.full_state_dict(), 0.0
    twin = ImageModel().double()
    for batch in batches:
        pipeline.zero_grad()
        twin.zero_grad()
        targets = labels[: len(batch)]
        pipeline.step(batch, targets)
        if state is not None:
            twin.load_state_dict(state)
            loss_fn, size = torch.nn.functional.cross_entropy, len(batch) // 4
            unsplit_step(lambda _, rows: twin(rows), loss_fn, batch, targets, size)
            own = {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}
            worst = max(worst, largest_difference(own, gradients_of(twin, 4)))
    return worst
