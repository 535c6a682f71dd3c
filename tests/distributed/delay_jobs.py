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
from pipecompile.runtime.in_flight import MinibatchesInFlight
from pipecompile.runtime.rank_step import RankStep
from pipecompile.schedule.named_orders import required_placement
from tests.delayed_gradients import OPTIMIZERS
from tests.device import DEVICE
from tests.distributed.training_jobs import MICROBATCH, run_of
from tests.training.test_continuous_training import batches_of

LONGEST = 0.002  # seconds that an action is late


def delayed_steps(ranks: int, schedule: str, steps: int, replicas: int) -> float:
    """How far gradients are from the unsplit model's in the worst of so many steps, in which each
    action of a rank, be it a computation, a message or a sum, begins late by a random time.
    """
    shape, number = required_placement(schedule)
    on_each = number or (2 if shape == "loop" else 1)
    run = run_of(ranks, replicas, schedule=schedule, stages_per_rank=on_each)
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


def delayed_minibatches(
    on: tuple[int, ...], schedule: str, microbatches: int, count: int, replicas: int
) -> bool:
    """Whether a run without end leaves the same weights, bit for bit, if every action is late; the
    stages are `on` so many ranks each, in so many replicas of the pipeline.
    """
    options: Any = {"schedule": schedule, "microbatches": microbatches}
    if max(on) > 1:
        options["stage_replicas"] = on
    runs = [run_of(sum(on), replicas, **options) for _ in range(2)]
    punctual, late = (run.pipeline for run in runs)
    whole = batches_of(MICROBATCH * microbatches * replicas, count)
    batches = [(runs[0].part(x), runs[0].part(y)) for x, y in whole]
    random = Random(dist.get_rank())
    losses = list(punctual.train(batches, OPTIMIZERS["momentum"]))
    with (
        patch.object(RankStep, "_perform", _late(RankStep._perform, random)),
        patch.object(
            MinibatchesInFlight,
            "_update_weights",
            _late(MinibatchesInFlight._update_weights, random),
        ),
    ):
        assert list(late.train(batches, OPTIMIZERS["momentum"])) == losses
    pairs = zip(punctual.parameters(), late.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _late(perform: Callable[[Any, Action], None], random: Random) -> Callable[[Any, Action], None]:
    def late(performer: Any, action: Action) -> None:
        time.sleep(random.uniform(0, LONGEST))
        perform(performer, action)

    return late


def _minibatch(whole: Target, seed: int) -> Target:
    shape = whole.call.args[0].shape
    tokens = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return replace(whole, call=arguments_of(whole.model, tokens), targets=tokens.roll(1, 1))
