"""What ranks do in tests of delays; each function runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.ir.schedule import Action
from pipecompile.runtime.rank_step import RankStep
from pipecompile.schedule.named_orders import required_placement
from tests.delayed_gradients import OPTIMIZERS
from tests.device import DEVICE
from tests.distributed.training_jobs import MICROBATCH, run_of
from tests.training.test_continuous_training import batches_of

LONGEST = 0.002  # seconds that an action is late


def delayed_steps(ranks: int, schedule: str, steps: int) -> float:
    """How far gradients are from the unsplit model's in the worst of so many steps, in which each
    action of a rank, be it a computation or a message, begins late by a random time.
    """
    shape, number = required_placement(schedule)
    on_each = number or (2 if shape == "loop" else 1)
    run = run_of(ranks, 1, schedule=schedule, stages_per_rank=on_each)
    random = Random(dist.get_rank())
    worst = 0.0
    with patch.object(RankStep, "_perform", _late(RankStep._perform, random)):
        for step in range(steps):
            # Other tokens in each step, so that what an earlier one has left gives other gradients.
            run = replace(run, whole=_minibatch(run.whole, step))
            run.pipeline.zero_grad()
            run.unsplit_step()
            run.step()
            worst = max(worst, run.distance())
    return worst


def delayed_minibatches(on: tuple[int, ...], schedule: str, microbatches: int, count: int) -> bool:
    """Whether a run without end leaves the same weights, bit for bit, if every action is late; the
    stages are `on` so many ranks each.
    """
    batches = batches_of(MICROBATCH * microbatches, count)
    options: Any = {"schedule": schedule, "microbatches": microbatches}
    if max(on) > 1:
        options["stage_replicas"] = on
    punctual, late = (run_of(sum(on), 1, **options).pipeline for _ in range(2))
    random = Random(dist.get_rank())
    losses = list(punctual.train(batches, OPTIMIZERS["momentum"]))
    with patch.object(RankStep, "_perform", _late(RankStep._perform, random)):
        assert list(late.train(batches, OPTIMIZERS["momentum"])) == losses
    pairs = zip(punctual.parameters(), late.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _late(
    perform: Callable[[RankStep, Action], None], random: Random
) -> Callable[[RankStep, Action], None]:
    def late(rank_step: RankStep, action: Action) -> None:
        time.sleep(random.uniform(0, LONGEST))
        perform(rank_step, action)

    return late


def _minibatch(whole: Target, seed: int) -> Target:
    shape = whole.call.args[0].shape
    tokens = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return replace(whole, call=arguments_of(whole.model, tokens), targets=tokens.roll(1, 1))
