"""A user's communication hook: it makes the mean of gradients over replicas in its own way.

It has the signature of the hooks of DistributedDataParallel, so those of torch work here (torch.
distributed.algorithms.ddp_comm_hooks: bf16_compress_hook, powerSGD_hook):

    hook(state, bucket) ─▶ future of a flat tensor, the mean of bucket.buffer() over replicas

One bucket is given after the other. A hook may exchange something more when its first exchange is
done, on a thread of its own: replicas would else mix up what belongs to which bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pipecompile.errors import InputError

__all__ = ["CommunicationHook", "GradientBucket", "HookedBuckets"]


class CommunicationHook(NamedTuple):
    """The hook, and what it is given first."""

    state: Any
    function: Callable[[Any, Any], torch.futures.Future[Any]]


class GradientBucket:
    """What a hook is given, with the methods of torch's GradBucket.

    `gradients` lie one after the other in the flat `buffer`; `index` is the same in every step.
    """

    def __init__(
        self, index: int, buffer: Tensor, parameters: Sequence[Tensor], *, is_last: bool
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients as one vector."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Let `tensor`, which has the size of the buffer, take its place."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return the gradients: views of the buffer in the shapes of the parameters."""
        return list(_unflatten_dense_tensors(self._buffer, self._parameters))

    def parameters(self) -> list[Tensor]:
        """Return the parameters."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether no other bucket follows in this step."""
        return self._is_last


class HookedBuckets:
    """The buckets of one step on their way through a `hook`, of `count` in all."""

    def __init__(self, hook: CommunicationHook, count: int, replicas: int) -> None:
        self._hook = hook
        self._count = count
        self._replicas = replicas
        self._given = 0
        self._last: tuple[torch.futures.Future[Any], Sequence[Tensor]] | None = None

    def give(self, index: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Begin to sum these gradients."""
        # One at a time: hooks such as PowerSGD's begin a second exchange when their first one is
        # done, on a thread. Two of them at once could begin these in different orders on two
        # replicas.
        self.wait()
        self._given += 1
        single = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0].view(-1) if single else _flatten_dense_tensors(gradients)
        is_last = self._given == self._count
        bucket = GradientBucket(index, flat, parameters, is_last=is_last)
        try:
            future = self._hook.function(self._hook.state, bucket)
        except Exception as error:
            raise InputError(
                f"the communication hook failed: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(future, torch._C.Future):
            raise InputError(
                f"the communication hook returned {type(future).__name__}, but it returns a future "
                "of the bucket's mean over replicas, as `dist.all_reduce(…, async_op=True)"
                ".get_future()`"
            )
        self._last = future, gradients

    def wait(self) -> None:
        """Wait until the last bucket has come back; its gradients are then sums over replicas."""
        if self._last is None:
            return
        (future, gradients), self._last = self._last, None
        value = future.wait()
        mean = value if isinstance(value, Tensor) else value[0]
        # Copied back, because optimizers and users hold the gradients themselves.
        for gradient, part in zip(
            gradients, _unflatten_dense_tensors(mean.view(-1), gradients), strict=True
        ):
            # A hook returns a mean, and all other gradients are sums by now, which the step
            # divides together.
            gradient.copy_(part).mul_(self._replicas)
