"""What workers do in tests of updates that are validated later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile.runtime.early_update import EarlyUpdate
from pipecompile.runtime.rank_step import RankStep
from pipecompile.training.minibatch_step import MinibatchStep
from pipecompile.training.pipeline import Pipeline
from tests.distributed.training_jobs import MICROBATCH, Run, run_of
from tests.training.test_continuous_training import batches_of

STEPS, PLANTED = 20, (5, 6, 13)
MAX_NORM = 3.9  # between the norms of the mixture's gradients
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=0.01
    ),
}


class Validated(NamedTuple):
    """A run with post-validation beside one without: whether they end alike, bit for bit, how many
    updates stood and how many did not, and the sum of the weights.
    """

    is_same: bool
    stood: int
    rolled_back: int
    total: float


def validated(
    ranks: int, replicas: int, optimizer: str, *, schedule: str, planted: float | None, **rule: Any
) -> Validated:
    """Train with and without post-validation; with `planted`, the gradients of the second rank have
    it in some steps.
    """
    runs = []
    for post_validation in (False, True):
        run = run_of(
            ranks, replicas, schedule=schedule, microbatches=4, post_validation=post_validation
        )
        with _planting(planted), _counted() as verdicts:
            runs.append((_trained(run, optimizer, **rule), verdicts))
    (wanted, none), (own, verdicts) = runs
    assert not none
    pairs = zip(own, wanted, strict=True)
    is_same = all(torch.equal(left, right) for left, right in pairs)
    total = sum(float(value.double().sum()) for value in own)
    return Validated(is_same, verdicts.count(True), verdicts.count(False), total)


def _trained(run: Run, optimizer: str, **rule: Any) -> list[Tensor]:
    """The losses, parameters, buffers and optimizer state of a run."""
    batches = batches_of(MICROBATCH * 4 * run.replicas, STEPS)
    own = ((run.part(x), run.part(y)) for x, y in batches)
    losses = list(run.pipeline.train(own, OPTIMIZERS[optimizer], _halved, **rule))
    state = [
        slot
        for each in run.pipeline._training.optimizers
        for slots in each.state.values()
        for slot in slots.values()
        if isinstance(slot, Tensor)
    ]
    named = [*run.pipeline.named_parameters(), *run.pipeline.named_buffers()]
    values = [*(loss for loss in losses if loss is not None), *(v for _, v in named), *state]
    return [value.detach().clone() for value in values]


def _halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)


@contextmanager
def _counted() -> Iterator[list[bool]]:
    """What each validation said."""
    verdicts: list[bool] = []
    validate = EarlyUpdate.validate

    def counted(update: EarlyUpdate, wait: Any) -> bool:
        verdicts.append(validate(update, wait))
        return verdicts[-1]

    with patch.object(EarlyUpdate, "validate", counted):
        yield verdicts


@contextmanager
def _planting(value: float | None) -> Iterator[None]:
    """Put `value` into a gradient of the second rank in some steps."""
    train = MinibatchStep._train

    def planting(step: MinibatchStep, ready: Any, *args: Any) -> Any:
        result = train(step, ready, *args)
        if value is not None and dist.get_rank() == 1 and ready.minibatch.step in PLANTED:
            gradients = [p.grad for p in ready.program.parameters if p.grad is not None]
            gradients[0].view(-1)[0] = value
        return result

    with patch.object(MinibatchStep, "_train", planting):
        yield


def disturbed(folder: str) -> list[bool]:
    """Whether a run that is drained, evaluated, saved and stepped by hand on the way ends where an
    undisturbed one does, and so one that goes on from its checkpoint.
    """
    through, own, again = (
        run_of(2, 1, schedule="zb-h1", post_validation=True).pipeline for _ in range(3)
    )
    batches, rule = batches_of(MICROBATCH * 4, 10), {"max_norm": MAX_NORM}
    list(through.train(batches, OPTIMIZERS["adamw"], _halved, **rule))
    losses = own.train(batches, OPTIMIZERS["adamw"], _halved, **rule)
    for _ in range(3):
        next(losses)
    own.drain()
    own.evaluate(batches[0][0])
    next(losses)
    own.checkpoint().save(folder)
    next(losses)
    own.step(*batches[0])  # its gradients are dropped by the next step of the run
    own.steps -= 1
    list(losses)
    losses = again.train(batches[4:], OPTIMIZERS["adamw"], _halved, **rule)
    next(losses)  # whose update is not validated
    again.checkpoint().load(folder)
    rest = again.train(batches[4:], OPTIMIZERS["adamw"], _halved, **rule)
    again.checkpoint().load(folder)
    list(rest)
    return [_same_weights(each, through) for each in (own, again)]


def recorded() -> tuple[bool, list[bool]]:
    """Whether torch's runtime, which performs rows as a whole, ends where our own does; and of each
    recorded step of the latter whether every action of the row is there once and in order.
    """
    own, torchs = (
        run_of(2, 1, schedule="zb-h1", post_validation=True, engine=engine).pipeline
        for engine in ("own", "torch")
    )
    batches = batches_of(MICROBATCH * 4, 6)
    with own.record() as run, _counted() as verdicts:
        list(own.train(batches, OPTIMIZERS["adamw"], max_norm=MAX_NORM))
    assert False in verdicts
    list(torchs.train(batches, OPTIMIZERS["adamw"], max_norm=MAX_NORM))
    rows = own.plan.schedule.actions
    steps = [] if dist.get_rank() else run.run.steps
    found = [
        [action.action for action in rank.actions] == list(row)
        for step in steps
        for rank, row in zip(step.ranks, rows, strict=True)
    ]
    return _same_weights(own, torchs), found


def _same_weights(one: Pipeline, other: Pipeline) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def leads(store_folder: str, *, post_validation: bool) -> bool:
    """Whether the first rank begins the next step before the last one has done the step before: in
    step 5 the last rank waits for that before it says what its norm is.
    """
    run = run_of(2, 1, schedule="1f1b", post_validation=post_validation, step_timeout=20)
    store = dist.FileStore(store_folder, 2)
    store.set_timeout(timedelta(seconds=30))
    begin_norm, forward = Pipeline._begin_norm, RankStep._forward
    waited = []

    def late_norm(pipeline: Pipeline, *args: Any) -> Any:
        if dist.get_rank() == 1 and pipeline.steps == 5:
            store.wait(["forward of the next step"])
            waited.append(True)
        return begin_norm(pipeline, *args)

    def telling_forward(step: RankStep, *args: Any) -> None:
        forward(step, *args)
        if dist.get_rank() == 0 and run.pipeline.steps == 5:
            store.set("forward of the next step", "done")

    batches = batches_of(MICROBATCH * 4, 7)
    with (
        patch.object(Pipeline, "_begin_norm", late_norm),
        patch.object(RankStep, "_forward", telling_forward),
    ):
        losses = list(run.pipeline.train(batches, OPTIMIZERS["adamw"], max_norm=1e9))
    return len(losses) == 7 and waited == [True] * dist.get_rank()
