"""What workers do in tests of training that never empties the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pipecompile.errors import InputError
from pipecompile.training.pipeline import Pipeline
from tests.delayed_gradients import OPTIMIZERS, DelayedGradients
from tests.distributed.training_jobs import MICROBATCH, mixture, run_of
from tests.training.test_continuous_training import batches_of, distance, halving


def from_the_beginning(pipeline: Pipeline, samples: int) -> Iterator[tuple[str, Any]]:
    """Yield each optimizer with its name, for a run of the mixture with its first weights."""
    initial = {name: value.clone() for name, value in pipeline.state_dict().items()}
    for name, optimizer in OPTIMIZERS.items():
        pipeline.load_state_dict({**mixture(samples).model.state_dict(), **initial})
        pipeline.steps = 0
        yield name, optimizer


def trained(
    ranks: int,
    replicas: int,
    schedule: str,
    microbatches: int,
    *,
    max_norm: float | None = None,
    halves: bool = False,
) -> dict[str, tuple[float, float, float]]:
    """How far losses and weights are from those of the recurrence, by optimizer, and how far the
    weights are from those of a plain one. With `halves` every third update halves the rate.
    """
    run = run_of(ranks, replicas, schedule=schedule, microbatches=microbatches)
    samples = MICROBATCH * microbatches * replicas
    batches, plan = batches_of(samples, 20), run.pipeline.plan
    oracle = DelayedGradients(mixture(samples), plan)
    scheduler, rate = (halving, _halved) if halves else (None, _kept)
    found = {}
    for name, optimizer in from_the_beginning(run.pipeline, samples):
        own = ((run.part(x), run.part(y)) for x, y in batches)
        losses = list(run.pipeline.train(own, optimizer, scheduler, max_norm=max_norm))
        wanted, state = oracle.train(
            plan, batches, optimizer, replicas=replicas, max_norm=max_norm, rate=rate
        )
        _, plain = oracle.train(plan, batches, optimizer, replicas=replicas)
        found[name] = (
            _loss_distance(losses, wanted),
            _own_distance(run.pipeline, state),
            _own_distance(run.pipeline, plain),
        )
    return found


def stepped(ranks: int, replicas: int, schedule: str, microbatches: int) -> tuple[bool, bool]:
    """Whether losses and weights of minibatches that are given one by one, with a drain on the
    way, are those of all that are given at once.
    """
    options: Any = {"schedule": schedule, "microbatches": microbatches}
    run, other = (run_of(ranks, replicas, **options) for _ in range(2))
    samples = MICROBATCH * microbatches * replicas
    batches = [(run.part(x), run.part(y)) for x, y in batches_of(samples, 8)]
    optimizer = OPTIMIZERS["momentum"]
    wanted = list(run.pipeline.train(batches, optimizer))
    rest = other.pipeline.train(optimizer=optimizer)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(other.pipeline.step(*batch))
        if number == 4:
            other.pipeline.drain()
    there = [loss for loss in [*losses, *rest] if loss is not None]
    expected = [loss for loss in wanted if loss is not None]
    pairs = zip(there, expected, strict=True)
    return all(torch.equal(*pair) for pair in pairs), _is_same(run.pipeline, other.pipeline)


def given_other_data(schedule: str, minibatch: int) -> list[str]:
    """What a rank says if the last one is given other targets from `minibatch` on: at once, and of
    what follows.
    """
    microbatches = 2
    pipeline = run_of(2, 1, schedule=schedule, microbatches=microbatches).pipeline
    batches = batches_of(MICROBATCH * microbatches, 3)
    if dist.get_rank():
        batches = [(x, y + (number >= minibatch)) for number, (x, y) in enumerate(batches)]
    acts: list[Callable[[], object]] = [
        lambda: list(pipeline.train(batches, OPTIMIZERS["sgd"])),
        lambda: pipeline.evaluate(batches[0][0]),
        lambda: list(pipeline.train(batches, OPTIMIZERS["sgd"])),
    ]
    said = []
    for act in acts:
        try:
            act()
            said.append("")
        except InputError as error:
            said.append(str(error))
    dist.destroy_process_group()
    return said


def resumed(
    schedule: str, microbatches: int, folder: str, on: tuple[int, ...] = (1, 1)
) -> tuple[int, bool, bool]:
    """Train with a drain, an evaluation and a checkpoint on the way, and from that checkpoint, with
    the stages `on` so many ranks each.

    Returns how many minibatches the checkpoint has, and whether either ends bit for bit where an
    undisturbed run does.
    """
    batches = batches_of(MICROBATCH * microbatches, 8)
    optimizer = OPTIMIZERS["momentum"]
    options: Any = {"schedule": schedule, "microbatches": microbatches}
    if max(on) > 1:
        options["stage_replicas"] = on
    through, disturbed, again = (run_of(sum(on), 1, **options).pipeline for _ in range(3))
    list(through.train(batches, optimizer))
    losses = disturbed.train(batches, optimizer)
    for _ in range(3):
        next(losses)
    disturbed.evaluate(batches[0][0])
    disturbed.checkpoint().save(folder)
    done = disturbed.steps
    list(losses)
    rest = iter(batches)
    losses = again.train(rest, optimizer)
    again.checkpoint().load(folder)
    for _ in range(again.steps):
        next(rest)
    list(losses)
    return done, _is_same(disturbed, through), _is_same(again, through)


def _halved(update: int) -> float:
    return 0.5 ** (update // 3)


def _kept(_: int) -> float:
    return 1.0


def _is_same(one: Pipeline, other: Pipeline) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def _loss_distance(losses: list[Any], wanted: list[float]) -> float:
    assert len(losses) == len(wanted)
    pairs = zip(losses, wanted, strict=True)
    return max((abs(own.item() - other) for own, other in pairs if own is not None), default=0.0)


def _own_distance(pipeline: Pipeline, state: dict[str, torch.Tensor]) -> float:
    """The distance of what this rank holds; replicas have running averages of their own data."""
    own = {name for name, _ in pipeline.named_parameters()}
    return distance(pipeline, {name: state[name] for name in own}, buffers=False)
