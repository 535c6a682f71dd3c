"""A small GPT-2 trained on the project's own pages, on the ranks that torchrun starts:

    torchrun --nproc-per-node 4 -m examples.pretrain --stages 2 --losses losses --checkpoint saved

Half of the steps are followed by a checkpoint. With `--kill 2` rank 2 is then killed, some steps
later; with `--resume` the run goes on from the checkpoint, whatever the number of stages. Beside
it stands the same training as a plain PyTorch loop: `train_unsplit`. `examples.train` runs both.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from examples.corpus import VOCABULARY, corpus, minibatch
from examples.models import token_loss
from pipecompile import Pipeline, pipecompile

BATCH, LENGTH, MICROBATCHES = 32, 64, 4
LAYERS, WIDTH, HEADS = 4, 128, 4
HIGHEST_RATE, LARGEST_NORM = 1e-3, 1.0
PRECISION = torch.bfloat16
STEPS_TO_THE_KILL = 5

Losses = dict[int, float]
"""By the number of a step its loss."""


class Run(NamedTuple):
    """What the ranks of a run are told on their command line.

    `losses` is the file to which rank 0 adds a line after every step, and `kill` the rank that is
    killed, if any.
    """

    stages: int
    steps: int
    losses: Path
    checkpoint: Path
    resume: bool
    kill: int | None


# -- what both kinds of training have in common


def gpt2(*, length: int = LENGTH, width: int = WIDTH, seed: int = 0) -> nn.Module:
    """Return a GPT-2 with random weights, the same in every process with the same seed.

    Without dropout, for which the plain loop would draw other numbers.
    """
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_embd=width,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def optimizer_of(
    parameters: Iterable[nn.Parameter], steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return AdamW and its rates: a warm-up in the first tenth of the steps, then a cosine."""
    optimizer = torch.optim.AdamW(parameters, lr=HIGHEST_RATE)
    warm_up = max(steps // 10, 1)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))

    return optimizer, LambdaLR(optimizer, factor)


def train_unsplit(steps: int, *, reverse: bool = False) -> Losses:
    """Train the unsplit model in a plain loop; return the losses.

    With `reverse` the gradients of microbatches are summed in the reverse order.
    """
    model, tokens = gpt2(), corpus()
    optimizer, scheduler = optimizer_of(model.parameters(), steps)
    losses = {}
    for step in range(steps):
        batch, target = minibatch(tokens, step, size=BATCH, length=LENGTH)
        parts = list(zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True))
        optimizer.zero_grad()
        losses[step] = sum(
            _forward_and_backward(model, *part) for part in (parts[::-1] if reverse else parts)
        )
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        scheduler.step()
    return losses


def _forward_and_backward(model: nn.Module, batch: Tensor, target: Tensor) -> float:
    with torch.autocast("cpu", PRECISION):
        loss = token_loss(model(batch), target) / MICROBATCHES
    loss.backward()
    return loss.item()


# -- on ranks


def train_rank(run: Run) -> None:
    """Train as one rank of the process group, with as many replicas as there is room for."""
    pipeline, share = pipeline_of(run.stages)
    optimizer, scheduler = optimizer_of(pipeline.parameters(), run.steps)
    checkpoint = pipeline.checkpoint(optimizer, scheduler, data=0)
    if run.resume:
        checkpoint.load(run.checkpoint)
    while checkpoint.data < run.steps:
        step = checkpoint.data
        if dist.get_rank() == run.kill and step == run.steps // 2 + STEPS_TO_THE_KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = pipeline.step(*share.minibatch(step), everywhere=True)
        pipeline.clip_grad_norm_(LARGEST_NORM)
        optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            with run.losses.open("a") as file:
                print(step, loss.item(), file=file)
        checkpoint.data += 1
        if checkpoint.data == run.steps // 2:
            checkpoint.save(run.checkpoint)


class Share(NamedTuple):
    """The part of the data that goes to one of several replicas."""

    tokens: Tensor
    replica: int
    replicas: int

    def minibatch(self, position: int) -> tuple[Tensor, Tensor]:
        """Return this replica's part of a minibatch, and its targets."""
        batch, target = minibatch(self.tokens, position, size=BATCH, length=LENGTH)
        return batch.chunk(self.replicas)[self.replica], target.chunk(self.replicas)[self.replica]


def pipeline_of(stages: int, costs: str = "flops") -> tuple[Pipeline, Share]:
    """Return the pipeline of this rank, planned by `costs`, and its share of the data."""
    share = Share(corpus(), dist.get_rank() // stages, dist.get_world_size() // stages)
    batch, target = share.minibatch(0)
    pipeline = pipecompile(
        gpt2(),
        batch,
        k=stages,
        microbatches=MICROBATCHES // share.replicas,
        loss_fn=token_loss,
        sample_target=target,
        costs=costs,
        autocast=PRECISION,
        step_timeout=60,
    )
    return pipeline, share


def main() -> None:
    """Be one of the ranks that torchrun starts."""
    parser = argparse.ArgumentParser(prog="examples.pretrain", description=__doc__)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill", type=int)
    run = Run(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_rank(run)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
