"""Losses that keep what nobody can put back, that write to their targets, or that take other
arguments.
"""

from __future__ import annotations

import copy
import io
import itertools
import multiprocessing
import queue
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipecompile import InputError, pipecompile
from pipecompile.frontend.callable_state import can_be_restored

X, Y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0)).unbind()
MICROBATCHES = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def looped(loss: Callable[[Tensor, Any], Tensor], parts: int = MICROBATCHES) -> float:
    """The loss of the module itself in a loop over microbatches."""
    own, targets = model(), Y.clone().chunk(parts)
    losses = [loss(own(x), y) for x, y in zip(X.chunk(parts), targets, strict=True)]
    return float(torch.stack(losses).mean())


def of_list() -> Callable[[], float]:
    calls = list[int]()
    return lambda: (calls.append(1), float(len(calls)))[1]


def of_generator() -> Callable[[], float]:
    def numbers() -> Iterator[float]:
        yield from map(float, itertools.count(1))

    running = numbers()
    return lambda: next(running)


def of_cycle() -> Callable[[], float]:
    cycle = itertools.cycle([1.0, 2.0, 3.0])
    return lambda: next(cycle)


def of_shared_memory() -> Callable[[], float]:
    shared = multiprocessing.Value("d", 0.0)

    def counted() -> float:
        shared.value += 1
        return float(shared.value)

    return counted


def of_queue() -> Callable[[], float]:
    waiting = queue.Queue[int]()
    return lambda: (waiting.put(1), float(waiting.qsize()))[1]


def of_text() -> Callable[[], float]:
    log = io.StringIO()
    return lambda: (log.write("x"), float(log.tell()))[1]


KEEPERS = [of_list, of_generator, of_cycle, of_shared_memory, of_queue, of_text]


@pytest.mark.parametrize("has_sample", [False, True])
@pytest.mark.parametrize("keeper", KEEPERS)
def test_only_steps_call_a_loss_that_nobody_can_put_back(keeper: Any, has_sample: bool) -> None:
    def loss_of(factor: Callable[[], float]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda output, target: functional.mse_loss(output, target) * factor()

    pipeline = pipecompile(
        *(model(), X),
        k=2,
        microbatches=MICROBATCHES,
        costs="flops",
        loss_fn=loss_of(keeper()),
        sample_target=Y if has_sample else None,
    )
    assert float(pipeline.step(X, Y)) == pytest.approx(looped(loss_of(keeper())), rel=1e-6)


class Trainer:
    """Holds an iterator, of which its loss knows nothing, and prints."""

    def __init__(self) -> None:
        self.loader, self.calls = iter([1, 2, 3]), 0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        print(self.calls, file=sys.stdout)
        return functional.mse_loss(output, target, reduction="sum")

    def moving(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) * next(self.loader)


def test_what_a_loss_may_move_on_is_what_its_code_names() -> None:
    trainer = Trainer()
    assert can_be_restored(trainer.loss)
    assert not can_be_restored(trainer.moving)
    assert can_be_restored(functional.mse_loss)
    assert all(not can_be_restored(keeper()) for keeper in KEEPERS[1:])


def relabelled(output: Tensor, target: Tensor) -> Tensor:
    target[target > 1] = 0
    return functional.mse_loss(output, target)


def test_a_loss_that_writes_to_its_target_is_refused_where_others_wait_for_it() -> None:
    """Microbatches of a target lie in one tensor, whose writes autograd counts together."""
    pipeline = pipecompile(
        *(model(), X), k=2, microbatches=4, costs="flops", schedule="gpipe", loss_fn=relabelled
    )
    with pytest.raises(InputError, match=r"or a loss that writes to its target, .* a copy of it"):
        pipeline.step(X, Y.clone())


def test_a_target_that_is_the_input_may_not_be_written_to() -> None:
    pipeline = pipecompile(*(model(), X), k=2, microbatches=2, costs="flops", loss_fn=relabelled)
    given = X.clone()
    with pytest.raises(InputError, match="or a loss that writes to its target"):
        pipeline.step(given, given)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_loss_may_write_to_its_target(schedule: str) -> None:
    own = model()
    pipeline = pipecompile(
        *(own, X), k=2, microbatches=4, costs="flops", schedule=schedule, loss_fn=relabelled
    )
    given, twin = Y.clone(), copy.deepcopy(own)
    loss = float(pipeline.step(X, given))
    assert loss == pytest.approx(looped(relabelled, 4), rel=1e-6)
    for x, y in zip(X.chunk(4), Y.clone().chunk(4), strict=True):
        (relabelled(twin(x), y) / 4).backward()
    for parameter, wanted in zip(own.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)
    assert torch.equal(given, Y.where(Y <= 1, 0))


def doubles_target(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target.mul_(2))


def doubles_output(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.mul_(2), target)


@pytest.mark.parametrize("has_sample", [False, True])
@pytest.mark.parametrize("loss", [doubles_target, doubles_output])
def test_tries_of_a_loss_write_to_copies(loss: Any, has_sample: bool) -> None:
    sample, given = Y.clone(), Y.clone()
    pipeline = pipecompile(
        *(model(), X),
        k=2,
        microbatches=MICROBATCHES,
        costs="flops",
        loss_fn=loss,
        sample_target=sample if has_sample else None,
    )
    assert torch.equal(sample, Y)
    assert float(pipeline.step(X, given)) == pytest.approx(looped(loss), rel=1e-6)


@pytest.mark.parametrize("target", [None, Y])
@pytest.mark.parametrize(
    "loss", [lambda output: output.sum(), lambda output, *, target: output.sum()]
)
def test_a_loss_of_other_arguments_is_told_what_it_is_given(loss: Any, target: Any) -> None:
    pipeline = pipecompile(model(), X, k=2, microbatches=2, costs="flops", loss_fn=loss)
    with pytest.raises(InputError, match=r"takes other arguments than \(output, target\) .*_: …"):
        pipeline.step(X, target)
