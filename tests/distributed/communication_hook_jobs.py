"""What workers do in tests of communication hooks: two replicas of a pipeline of two ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from pipecompile import InputError, pipecompile
from pipecompile.runtime.communication_hook import GradientBucket
from pipecompile.training.pipeline import Pipeline
from tests.distributed.training_jobs import run_of

MICROBATCHES, REPLICAS = 4, 2


class Recording:
    """A hook around another one that keeps what this replica gives of each parameter."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook
        self.given: dict[Tensor, Tensor] = {}
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, state: Any, bucket: GradientBucket) -> Any:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self.given[parameter] = gradient.clone()
        self.calls.append((bucket.index(), bucket.is_last()))
        return self._hook(state, bucket)

    def of_replicas(self, parameter: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """What each replica has given of a parameter."""
        given = [torch.empty_like(parameter) for _ in range(REPLICAS)]
        dist.all_gather(given, self.given[parameter], group=group)
        return given


def plain() -> float:
    """How far gradients by torch's plain hook are from those of the unsplit model."""
    run = run_of(2, REPLICAS, schedule="zb-h1")
    run.pipeline.register_comm_hook(run.pipeline.replica_group, default_hooks.allreduce_hook)
    run.unsplit_step()
    run.step()
    return run.distance()


def compressed() -> tuple[bool, float]:
    """Whether gradients by torch's bfloat16 hook are what the replicas' own come to, and how far
    they are from those of the unsplit model.
    """
    run = run_of(2, REPLICAS, schedule="1f1b")
    group, hook = run.pipeline.replica_group, Recording(default_hooks.bf16_compress_hook)
    assert group is not None
    run.pipeline.register_comm_hook(group, hook)
    run.unsplit_step()
    run.step()
    are_same = []
    for parameter in dict.fromkeys(run.pipeline.parameters()):
        halves = [each.bfloat16() / REPLICAS for each in hook.of_replicas(parameter, group)]
        wanted = (halves[0] + halves[1]).double() / MICROBATCHES
        assert parameter.grad is not None
        are_same.append(torch.equal(parameter.grad, wanted))
    return all(are_same), run.distance()


def matrices() -> Pipeline:
    """Four matrices on four stages, two of them on each rank."""
    torch.manual_seed(0)
    widths = [(24, 20), (20, 28), (28, 16), (16, 12)]
    layers = [nn.Linear(*pair, bias=False) for pair in widths]
    return pipecompile(
        nn.Sequential(*layers).double(),
        torch.zeros(8, 24, dtype=torch.float64),
        ranks=2,
        microbatches=MICROBATCHES,
        schedule="interleaved-1f1b",
        costs="flops",
        self_check=False,
        loss_fn=nn.functional.mse_loss,
    )


def low_rank(steps: int) -> list[float]:
    """How far gradients by torch's PowerSGD are from those of a naive one, in each step."""
    pipeline = matrices()
    group, hook = pipeline.replica_group, Recording(powerSGD_hook)
    assert group is not None
    state = PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2, random_seed=3)
    pipeline.register_comm_hook(state, hook)
    naive, distances = NaivePowerSGD(start=2, seed=3), []
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)  # the same in a pipeline
    for step in range(steps):
        pipeline.zero_grad()
        hook.given.clear()
        x, y = (
            torch.randn(8, width, generator=generator, dtype=torch.float64) for width in (24, 12)
        )
        pipeline.step(x, y)
        worst = 0.0
        for parameter in hook.given:  # in the order of the calls
            given = hook.of_replicas(parameter, group)
            wanted = naive.mean(parameter, given, step) / MICROBATCHES
            assert parameter.grad is not None
            worst = max(worst, (parameter.grad - wanted).abs().max().item())
        distances.append(worst)
    by_step = [hook.calls[index : index + 2] for index in range(0, len(hook.calls), 2)]
    assert all([last for _, last in calls] == [False, True] for calls in by_step)
    assert all(calls == by_step[0] for calls in by_step)
    assert {index for index, _ in by_step[0]} == {0, 1}
    return distances


class NaivePowerSGD:
    """PowerSGD of rank 1 with error feedback and warm start (Vogels et al. 2019, algorithm 2), of
    all replicas at once.
    """

    def __init__(self, start: int, seed: int) -> None:
        self._start = start
        self._random = numpy.random.RandomState(seed)
        self._directions: dict[Tensor, Tensor] = {}
        self._errors: dict[Tensor, list[Tensor]] = defaultdict(lambda: [torch.zeros(())] * REPLICAS)

    def mean(self, parameter: Tensor, given: list[Tensor], step: int) -> Tensor:
        """The mean of what replicas give of a parameter, as a matrix of rank 1."""
        if step < self._start:
            return sum(given[1:], given[0]) / REPLICAS
        own = [g + error for g, error in zip(given, self._errors[parameter], strict=True)]
        mean = sum(own[1:], own[0]) / REPLICAS
        if parameter not in self._directions:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._random.randint(1_000_000_000))
                self._directions[parameter] = torch.randn(mean.shape[1], dtype=mean.dtype)
        direction = mean @ nn.functional.normalize(self._directions[parameter], dim=0)
        direction = nn.functional.normalize(direction, dim=0)
        self._directions[parameter] = mean.T @ direction
        approximated = torch.outer(direction, self._directions[parameter])
        self._errors[parameter] = [each - approximated for each in own]
        return approximated


def refused() -> None:
    """What cannot be summed by a hook says why."""
    pipeline = matrices()
    with pytest.raises(InputError, match=r"give the group of the replicas: pipeline.register_comm"):
        pipeline.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(InputError, match="the communication hook is a str; give a function"):
        pipeline.register_comm_hook(pipeline.replica_group, "bf16")  # type: ignore[arg-type]
    pipeline.register_comm_hook(pipeline.replica_group, default_hooks.allreduce_hook)
    with pytest.raises(InputError, match="a communication hook is registered already"):
        pipeline.register_comm_hook(pipeline.replica_group, default_hooks.bf16_compress_hook)
