"""Running averages of batch norms, updated once a step with the statistics of the minibatch.

This is GPipe's rule (Huang et al., "GPipe", 2019, section 2.2). The api runs a training step in a
block of `MinibatchStatistics`, for plans with `batch_norm="minibatch"`.

The statistics of parts are merged by the formula of Chan, Golub and LeVeque ("Updating formulae and
a pairwise algorithm for computing sample variances", 1979), for any number of parts at once. n is
the number of elements, M2 the sum of their squared distances from the mean:

    n    = Σ nᵢ
    mean = Σ nᵢ meanᵢ / n
    M2   = Σ M2ᵢ + Σ nᵢ (meanᵢ − mean)²

The parts are first the microbatches of this process, then its replicas. All batch norms of the
process are merged together, as the columns of one table, in float64:

                    norm 0          norm 1
    microbatch 0    c0  c1  c2      c0  c1
    microbatch 1    c0  c1  c2      c0  c1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.graph.batch_statistics import (
    BatchNormCall,
    MicrobatchStatistics,
    RunningAverages,
    StepStatistics,
    record_statistics,
)
from pipecompile.graph.random_streams import StreamKey
from pipecompile.runtime.deadline import Deadline

__all__ = ["MinibatchStatistics", "minibatch_statistics"]


class MinibatchStatistics:
    """What the batch norms of this process recorded for the next update of their averages.

    `group` are the replicas: the ranks that run the same stages on other data. All of them must
    update together, since they merge their statistics then. Where no batch norm is deferred,
    nothing is recorded, and without a group nothing happens.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._put_aside = StepStatistics()

    @contextmanager
    def of_step(
        self, *, accumulate: bool = False, deadline: Deadline | None = None
    ) -> Iterator[None]:
        """Record the training step in the block, and update the averages at its end, for which
        replicas wait until the `deadline`.

        With `accumulate` its statistics are put aside, for the step that ends the minibatch. A step
        that fails leaves the averages, and what was put aside, as they were.
        """
        with record_statistics() as step:
            yield
        self._put_aside.add_all(step)
        if accumulate:
            return
        minibatch, self._put_aside = self._put_aside, StepStatistics()
        calls = list(minibatch.recorded)
        if self._group is not None:
            (deadline or Deadline()).wait_for(self._group)
            calls = _common_calls(minibatch, self._group)
        if calls:
            with torch.no_grad():
                _commit(minibatch, calls, self._group)

    def clear(self) -> None:
        """Drop the statistics that steps have put aside."""
        self._put_aside = StepStatistics()


def minibatch_statistics(
    group: dist.ProcessGroup | None = None,
) -> AbstractContextManager[None]:
    """Update running averages once, at the end of the block, which is one training step."""
    return MinibatchStatistics(group).of_step()


def _common_calls(step: StepStatistics, group: dist.ProcessGroup) -> list[BatchNormCall]:
    """Return the calls that were recorded, in the same order on every replica.

    InputError, on every replica, if they did not all record the same ones.
    """
    by_replica: list[list[BatchNormCall]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(by_replica, list(step.recorded), group=group)
    for replica, calls in enumerate(by_replica):
        different = set(calls) ^ set(by_replica[0])
        if different:
            raise InputError(
                f"{min(different).node} normalised a batch on only one of replicas 0 and "
                f"{replica}, so their running averages would differ; let a module that branches on "
                "data call its batch norms in every minibatch"
            )
    # The columns of the table have no names: all replicas must have them in one order.
    return by_replica[0]


def _commit(
    step: StepStatistics, calls: Sequence[BatchNormCall], group: dist.ProcessGroup | None
) -> None:
    """Merge what was recorded, and update the running averages with it."""
    merged = _Moments.of_microbatches([step.recorded[call] for call in calls]).merged()
    if group is not None:
        merged = merged.gathered(group).merged()
    ordered = [step.averages[call] for call in calls]
    widths = [averages.mean.numel() for averages in ordered]
    means = merged.mean.split(widths)
    # Unbiased, as torch's own averages are, although a batch is normalised with the biased one.
    variances = (merged.m2 / (merged.count - 1)).split(widths)
    # In the order of the calls, because a module that is called twice is updated twice.
    for averages, mean, variance in zip(ordered, means, variances, strict=True):
        _update(averages, mean, variance)


def _update(averages: RunningAverages, mean: Tensor, variance: Tensor) -> None:
    """Update the averages by one batch with this mean and unbiased variance."""
    if averages.batches is not None:
        averages.batches.add_(1)
    for average, value in ((averages.mean, mean), (averages.variance, variance)):
        average.lerp_(value.to(average.dtype), _weight(averages, average))


def _weight(averages: RunningAverages, average: Tensor) -> Tensor | float:
    """Return the weight of the newest batch in an average."""
    if averages.momentum is not None:
        return averages.momentum
    assert averages.batches is not None, "a cumulative average counts its batches"
    # It stays on the device: a number would make the host wait for it.
    return averages.batches.to(average.dtype).reciprocal()


@dataclass(frozen=True)
class _Moments:
    """Number of elements, mean and M2 in float64: of shape (parts, channels), or (channels)."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    @staticmethod
    def of_microbatches(recorded: Sequence[dict[StreamKey, MicrobatchStatistics]]) -> _Moments:
        """Return the table of all microbatches, in their order, from the records of each call."""
        keys = {key for by_key in recorded for key in by_key}
        rows = [
            [_at(by_key, key) for by_key in recorded]
            for key in sorted(keys, key=lambda key: (key.step, key.microbatch))
        ]
        mean = torch.stack([torch.cat([part.mean for part in row]) for row in rows]).double()
        variance = torch.stack([torch.cat([part.variance for part in row]) for row in rows])
        counts = torch.tensor([[part.count for part in row] for row in rows], dtype=torch.float64)
        widths = torch.tensor([part.mean.numel() for part in rows[0]])
        count = counts.repeat_interleave(widths, dim=1).to(mean.device)
        # A microbatch in which a module left out its batch norm has a count of 0 there.
        return _Moments(count, mean, variance.double() * (count - 1).clamp(min=0))

    def merged(self) -> _Moments:
        """Return the moments of all parts together; parts without elements do not count."""
        # Elements 0, 2 in one part and 4, 6 in another: n = 2 and 2, means 1 and 5, M2 = 2 and 2.
        # Together n = 4, mean 3, and M2 = 2 + 2 + 2 · (1 − 3)² + 2 · (5 − 3)² = 20, as 9 + 1 + 1
        # + 9.
        count = self.count.sum(dim=0)
        mean = (self.count * self.mean).sum(dim=0) / count
        m2 = self.m2.sum(dim=0) + (self.count * (self.mean - mean).square()).sum(dim=0)
        return _Moments(count, mean, m2)

    def gathered(self, group: dist.ProcessGroup) -> _Moments:
        """Return the moments of all ranks of `group` as parts, the same on each rank."""
        own = torch.stack([self.count, self.mean, self.m2])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        # Gathered and not reduced: each replica merges the same parts in the same order, so
        # averages that were equal bit for bit stay so.
        dist.all_gather(parts, own, group=group)
        return _Moments(*torch.stack(parts, dim=1))


def _at(by_key: dict[StreamKey, MicrobatchStatistics], key: StreamKey) -> MicrobatchStatistics:
    """Return the statistics of a microbatch; of no element if there are none."""
    if key in by_key:
        return by_key[key]
    other = next(iter(by_key.values()))
    return MicrobatchStatistics(0, torch.zeros_like(other.mean), torch.zeros_like(other.variance))
