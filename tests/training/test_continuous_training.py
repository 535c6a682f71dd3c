"""Training that never empties the pipeline, against a plain loop with delayed gradients."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from pipecompile import pipecompile
from pipecompile.frontend.target import Target
from pipecompile.training.pipeline import Pipeline
from tests.delayed_gradients import OPTIMIZERS, Batches, DelayedGradients
from tests.distributed.training_jobs import mixture

EXACT = 1e-12
RULES = {"pipedream": 1, "pipedream-vertical-sync": 1, "pipedream-2bw": 4}


def batches_of(samples: int, count: int = 20) -> Batches:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 11, (samples, 6), generator=generator) for _ in range(count)]
    return [(each, each.roll(1, 1)) for each in tokens]


def pipeline_of(target: Target, k: int, schedule: str, microbatches: int, **options: Any) -> Pipeline:
    return pipecompile(
        copy.deepcopy(target.model),
        target.call.args[0],
        k=k,
        microbatches=microbatches,
        schedule=schedule,
        loss_fn=target.loss_fn,
        **{"costs": "flops", "self_check": False, **options},
    )


def distance(
    pipeline: Pipeline, wanted: dict[str, torch.Tensor], *, buffers: bool = True
) -> float:
    named = [*pipeline.named_parameters(), *(pipeline.named_buffers() if buffers else ())]
    own: dict[str, torch.Tensor] = dict(named)
    assert own.keys() == wanted.keys()
    return max(
        ((own[name] - value).abs().max() / (1 + value.abs().max())).item()
        for name, value in wanted.items()
    )


@cache
def oracle_of(microbatches: int) -> tuple[Target, DelayedGradients]:
    """The mixture for microbatches of 2 samples, and the unsplit model; each is captured once."""
    target = mixture(2 * microbatches)
    return target, DelayedGradients(target, pipeline_of(target, 2, "1f1b", microbatches).plan)


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("schedule", RULES)
def test_every_rule_is_its_recurrence(schedule: str, k: int) -> None:
    target, oracle = oracle_of(RULES[schedule])
    batches = batches_of(2 * RULES[schedule])
    pipeline = pipeline_of(target, k, schedule, RULES[schedule])
    for name, optimizer in OPTIMIZERS.items():
        pipeline.load_state_dict(target.model.state_dict())
        pipeline.steps = 0
        losses = [loss.item() for loss in pipeline.train(batches, optimizer)]
        wanted, state = oracle.train(pipeline.plan, batches, optimizer)
        assert losses == pytest.approx(wanted, rel=EXACT), name
        assert distance(pipeline, state) <= EXACT, name
    _, synchronous = oracle.train(pipeline.plan, batches, optimizer, schedule="1f1b")
    assert distance(pipeline, synchronous) > 1e-3
