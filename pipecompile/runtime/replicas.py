"""Replicas: pipelines that train the same model on different data, and the sums of their gradients.

Ranks form a mesh of replicas × pipeline. With two pipelines of two ranks:

                 rank of the pipeline
                    0     1
    replica 0       0     1          pipeline of global ranks 0 and 1
    replica 1       2     3
                    │     └── ranks 1 and 3 hold the same stages: they sum gradients
                    └──────── so do 0 and 2

A gradient is summed over replicas as soon as its stage has no more backwards, while the rank still
runs other actions. Large gradients are summed where they are, small ones together in buckets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pipecompile.memory_model.replicas import buckets
from pipecompile.runtime.communication_hook import CommunicationHook, HookedBuckets
from pipecompile.runtime.deadline import Deadline
from pipecompile.runtime.sharded_stages import ShardedStages
from pipecompile.runtime.shards import local_part, settle_gradient

__all__ = ["ReplicaSums", "mean_over_replicas"]


def mean_over_replicas(
    loss: Tensor, samples: int, group: dist.ProcessGroup, deadline: Deadline
) -> Tensor:
    """Return the mean over the samples of all replicas; `loss` is that over `samples` of this one.

    In float64, so that a number of samples is exact whatever the type of the loss.
    """
    wide = torch.promote_types(loss.dtype, torch.float64)  # a metric may be complex
    total = torch.stack([loss.to(wide) * samples, loss.new_tensor(samples, dtype=wide)])
    deadline.all_reduce(total, group)
    return (total[0] / total[1]).to(loss.dtype)


class ReplicaSums:
    """Sums of one step's gradients over the ranks of `group`, which hold the same stages; None if
    that is this one only.

    `parameters` are those of each stage that no other stage of the model reads; they are summed
    when their stage is complete. `late` ones are summed at the end, by `finish`. Those that FSDP2
    manages are in neither: `sharded` sums them. A user's `hook` sums in its own way.
    """

    def __init__(
        self,
        parameters: Mapping[int, Sequence[Tensor]],
        late: Collection[Tensor],
        group: dist.ProcessGroup | None,
        deadline: Deadline,
        sharded: ShardedStages | None = None,
        hook: CommunicationHook | None = None,
    ) -> None:
        self._deadline = deadline
        self._parameters = parameters
        self._late = late
        self._group = group
        self._sharded = sharded
        self._works: list[dist.Work] = []
        self._buckets: list[tuple[Tensor, list[Tensor]]] = []
        self._missing: list[tuple[Tensor, Sequence[Tensor], list[bool]]] = []
        self._hooked = None
        self._first_bucket: dict[int | None, int] = {}
        if hook is not None and group is not None:
            # Numbers must not depend on the order in which stages end, because a hook keeps state
            # by number, such as PowerSGD's errors. Stages with 2 and 1 buckets and one that is
            # late begin at 0, 2, 3.
            counts = [len(_runs(_trained(each))) for each in (*parameters.values(), late)]
            first = accumulate(counts, initial=0)
            self._first_bucket = dict(zip((*parameters, None), first, strict=False))
            self._hooked = HookedBuckets(hook, sum(counts), dist.get_world_size(group))

    def start(self, stage: int) -> None:
        """Begin to sum the gradients of `stage`."""
        if self._sharded is not None:
            self._sharded.reduce(stage)
        self._sum(self._parameters[stage], stage)

    def finish(self) -> None:
        """Sum what is late, and wait until every gradient is the sum over replicas."""
        self._sum(self._late, None)
        if self._hooked is not None:
            self._hooked.wait()
        while self._works:
            self._deadline.wait(self._works.pop())
        while self._buckets:
            flat, gradients = self._buckets.pop()
            # Copied back, because optimizers and users hold the gradients themselves.
            parts = _unflatten_dense_tensors(flat, gradients)
            torch._foreach_copy_(gradients, list(parts))
        self._drop_missing()

    def _sum(self, parameters: Collection[Tensor], stage: int | None) -> None:
        """Begin to sum the gradients of a stage, or with None those that are late."""
        for parameter in parameters:
            settle_gradient(parameter)
        if self._group is None:
            return
        trained = _trained(parameters)
        if not trained:
            return
        if self._hooked is not None:
            self._hooked.wait()
        self._tell_missing(trained)
        gradients = [local_part(p.grad) for p in trained if p.grad is not None]
        for number, run in enumerate(_runs(gradients), self._first_bucket.get(stage, 0)):
            bucket = [gradients[index] for index in run]
            if self._hooked is not None:
                self._hooked.give(number, [trained[index] for index in run], bucket)
                continue
            # In place if it can be: a flat copy of a large gradient would take its size again.
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._start(bucket[0])
            else:
                flat = _flatten_dense_tensors(bucket)
                self._buckets.append((flat, bucket))
                self._start(flat)

    def _tell_missing(self, parameters: Sequence[Tensor]) -> None:
        """Put zeros where a gradient is missing: a branch on data may have led to one elsewhere."""
        missing = [parameter.grad is None for parameter in parameters]
        # Filled on the device: a copy would wait for it.
        counts = torch.zeros(len(missing), dtype=torch.float32, device=parameters[0].device)
        for index, parameter in enumerate(parameters):
            if missing[index]:
                parameter.grad = torch.zeros_like(parameter)
                counts[index] = 1
        # All replicas must start the same exchanges. With the zeros even one that has no gradient
        # at all does; the counts tell afterwards whether anybody had one.
        self._missing.append((counts, parameters, missing))
        self._start(counts)

    def _drop_missing(self) -> None:
        """Drop gradients that are missing on all replicas."""
        while self._missing:
            counts, parameters, missing = self._missing.pop()
            if not any(missing):  # most often: then nothing need be read from a GPU
                continue
            replicas = dist.get_world_size(self._group)
            for parameter, count in zip(parameters, counts.tolist(), strict=True):
                if count == replicas:
                    parameter.grad = None

    def _start(self, tensor: Tensor) -> None:
        self._works.append(self._deadline.start_all_reduce(tensor, self._group))


def _trained(parameters: Collection[Tensor]) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _runs(tensors: Sequence[Tensor]) -> list[range]:
    """Return which of these gradients, or of those of these parameters, are summed together."""
    return list(buckets([each.nbytes for each in tensors], [each.dtype for each in tensors]))
