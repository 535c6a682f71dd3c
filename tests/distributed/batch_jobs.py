"""What workers do in tests of batches of any size: each function runs on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.errors import InputError
from tests.distributed.materialisation_jobs import Tied, on_meta, tokens_of
from tests.distributed.training_jobs import MICROBATCH, Run, run_of, token_loss
from tests.unequal_batches import gradients_of, largest_difference, sizes_of, unsplit_step

SIZES = (16, 15, 3, 9, 16)
"""The samples of each step: whole, with a remainder, only a remainder."""


def unsplit_sum(run: Run, samples: int) -> Tensor:
    """Leave the undivided gradients of the same step of all replicas on the unsplit model; return
    its mean loss.
    """
    losses = []
    for replica in range(run.replicas):
        loss = unsplit_step(
            lambda key, rows: run.reference._run(key, (rows,), {}),
            token_loss,
            *rows_of(run, samples, replica),
            MICROBATCH,
            step=run.pipeline.steps,
            first=replica * len(sizes_of(samples, MICROBATCH)),
        )
        losses.append(loss)
    return torch.stack(losses).mean()


def rows_of(run: Run, samples: int, replica: int) -> tuple[Tensor, Tensor]:
    """The first samples of a replica's part."""
    tokens, targets = run.whole.call.args[0], run.whole.targets
    return (
        tokens.chunk(run.replicas)[replica][:samples],
        targets.chunk(run.replicas)[replica][:samples],
    )


def distance(run: Run, divisor: float) -> float:
    """The largest difference of a gradient of this rank."""
    wanted = {name: value / divisor for name, value in run.unsplit_gradients().items()}
    own = {name: p.grad for name, p in run.pipeline.named_parameters() if p.grad is not None}
    return largest_difference(own, wanted)


def steps_of_every_size(ranks: int, replicas: int, options: dict[str, Any]) -> list[float]:
    """How far gradients and the loss of each step are from those of the unsplit model."""
    run = run_of(ranks, replicas, **options)
    found = []
    for samples in SIZES:
        run.pipeline.zero_grad()
        run.reference.model.zero_grad()
        wanted = unsplit_sum(run, samples)
        loss = run.pipeline.step(*rows_of(run, samples, run.replica), everywhere=True)
        found += [
            distance(run, samples / MICROBATCH * replicas),
            abs(loss.item() - wanted.item()),
        ]
    return found


def given_to_the_outer_ranks(ranks: int) -> tuple[list[float], str, str]:
    """How far gradients are where the ranks of the middle stages are given no batch, or one another
    time; and what a rank says of a smaller batch, and of none at all.
    """
    run = run_of(ranks, 1, schedule="1f1b")
    rank, far = dist.get_rank(), []
    for given in ({0, ranks - 1}, {0, 1, ranks - 1}):
        run.pipeline.zero_grad()
        run.reference.model.zero_grad()
        unsplit_sum(run, 16)
        rows = rows_of(run, 16, 0) if rank in given else (None, None)
        run.pipeline.step(*rows)
        far.append(distance(run, 16 / MICROBATCH))
    smaller = rows_of(run, 9, 0) if rank in (0, ranks - 1) else (None, None)
    said = [_refusal(run, *smaller), _refusal(run, None, None)]
    return far, said[0], said[1]


def _refusal(run: Run, tokens: Tensor | None, targets: Tensor | None) -> str:
    try:
        run.pipeline.step(tokens, targets)
    except InputError as error:
        return str(error)
    return ""


def accumulated(ranks: int, replicas: int) -> float:
    """The distance of gradients summed over batches of several sizes."""
    run = run_of(ranks, replicas, schedule="1f1b")
    wanted: dict[str, Tensor] = {}
    for step, samples in enumerate(SIZES[:3]):
        run.pipeline.steps = step
        run.reference.model.zero_grad()
        unsplit_sum(run, samples)
        for name, gradient in run.unsplit_gradients().items():
            mean = gradient / (samples / MICROBATCH * replicas)
            wanted[name] = wanted.get(name, torch.zeros_like(mean)) + mean
    run.pipeline.steps = 0
    for number, samples in enumerate(SIZES[:3]):
        run.pipeline.step(*rows_of(run, samples, run.replica), accumulate=number < 2)
    return run.distance(wanted)


def evaluated(ranks: int, replicas: int) -> list[float]:
    """How far outputs and losses are from the unsplit model's, for batches of many sizes."""
    run = run_of(ranks, replicas, schedule="1f1b")
    # The first replica's model is the one that all begin with.
    model = copy.deepcopy(run.whole.model).eval()
    found = []
    for samples in (1, 7, 16, 23):
        generator = torch.Generator().manual_seed(samples)
        tokens = [
            torch.randint(0, 11, (samples + replica, 6), generator=generator)
            for replica in range(replicas)
        ]
        own = tokens[run.replica]
        logits = model(own)
        wanted = token_loss(model(torch.cat(tokens)), torch.cat(tokens)).item()
        output = run.pipeline.evaluate(own)
        loss = run.pipeline.evaluate(own, own)
        assert (output is None) == (loss is None)
        if output is not None:
            found.append((output - logits).abs().max().item())
            found.append(abs(loss.item() - wanted))
    return found


def unequal_replicas(ranks: int, replicas: int) -> tuple[str, bool, float]:
    """What a rank says if replicas are given 16 and 13 samples, whether it has gradients then, and
    the distance of those of the next step.
    """
    run = run_of(ranks, replicas, schedule="1f1b")
    try:
        run.pipeline.step(*rows_of(run, 16 - 3 * run.replica, run.replica))
    except InputError as error:
        text = str(error)
    has_gradients = any(p.grad is not None for p in run.pipeline.parameters())
    unsplit_sum(run, 16)
    run.pipeline.step(*rows_of(run, 16, run.replica))
    return text, has_gradients, distance(run, 16 / MICROBATCH * replicas)


def from_the_meta_device() -> float:
    """On rank 0, how far gradients are from the unsplit model's where no rank has had the model."""
    pipeline = on_meta(Tied, seed=3)
    model = Tied().double()
    state = pipeline.full_state_dict()
    tokens = tokens_of(15)
    pipeline.step(tokens, tokens)
    pipeline.evaluate(tokens)
    if state is None:
        return 0.0
    model.load_state_dict(state)
    unsplit_step(lambda _, rows: model(rows), token_loss, tokens, tokens, MICROBATCH)
    own = {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}
    return largest_difference(own, gradients_of(model, 15 / MICROBATCH))


def recorded() -> list[int]:
    """The bytes that rank 0 sends forward in a step of 4, 4, 4 and 3 samples; [] elsewhere."""
    run = run_of(2, 1, schedule="1f1b")
    with run.pipeline.record() as recorder:
        run.pipeline.step(*rows_of(run, 15, 0))
    if dist.get_rank():
        return []
    actions = recorder.run.steps[0].ranks[0].actions
    return [action.bytes for action in actions if "SEND_F" in action.action]
