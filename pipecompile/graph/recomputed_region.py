"""Regions of a stage that keep only what they read: what their nodes save for the backward is computed again there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from pipecompile.errors import InputError
from pipecompile.graph import autograd_context as ambient
from pipecompile.graph.propagation import swapped
from pipecompile.graph.random_streams import at, now

__all__ = ["Recomputed", "compute", "enter", "has_regions"]


_second: ContextVar[bool] = ContextVar(
    "pipecompile_second", default=False
)  # whether a region is computed again


class Recomputed:
    """Calls the body of a region through `torch.utils.checkpoint`.

    It is a function that a graph calls and no module of it: parameters and leaf modules come as arguments, so they stay
    the stage's, under their names. The first arguments are `buffers` tensors that the body writes to, then as many
    modules as `writers` that write to buffers of their own: the second run works on copies of these, made before the
    first. `random` tells whether nodes of the body draw: the second run does so at the same moment.
    """

    def __init__(
        self, name: str, body: fx.GraphModule, *, buffers: int, writers: int, random: bool
    ) -> None:
        self.__name__ = name  # fx names nodes and globals of its code by it
        self.body = body
        self.buffers = buffers
        self.writers = writers
        self.random = random

    def __call__(self, *values: Any) -> Any:
        """The tuple that the body returns."""
        if not torch.is_grad_enabled():
            return self.compute(values)
        runs = _Runs(self, values)
        # Our seeds decide every number that is drawn: torch need not keep the generators' state.
        return checkpoint(
            runs, *values[self.buffers :], use_reentrant=False, preserve_rng_state=False
        )

    def compute(self, values: Sequence[Any]) -> Any:
        """One run of the body."""
        return compute(self.body, values)


class _Runs:
    """The two runs of a region for one microbatch: in the forward, and in the backward on copies made before that.

    Within a region that is computed again there is only the first: torch goes back through the graph of the forward.
    Buffers are not among checkpoint's arguments, which may not be written to before the backward.
    """

    def __init__(self, region: Recomputed, values: Sequence[Any]) -> None:
        self._region = region
        self._buffers = values[: region.buffers]
        self._writers = nn.ModuleList(values[region.buffers : region.buffers + region.writers])
        self._before = (
            None if _second.get() else _copied([*self._buffers, *self._writers.buffers()])
        )
        self._moment = now() if region.random else None
        self._versions = _versions(values)
        self._first = True

    def __call__(self, *values: Any) -> Any:
        if self._first:
            self._first = False
            return self._region.compute((*self._buffers, *values))
        # Parameters that come by themselves are watched by autograd, which would not see those within modules.
        if _versions(values) != self._versions:
            raise InputError(
                f"{self._region.__name__} is computed again in the backward, but its parameters were written to since "
                "the forward; let the optimizer step after the whole step, not in a hook"
            )
        return self._again(values)

    def _again(self, values: Sequence[Any]) -> Any:
        before, self._before = self._before, None  # which this run writes to
        assert before is not None, "a region is computed again once"
        count = len(self._buffers)
        # By position: within a region that is computed again itself, others are in the modules now than were before.
        own = self._writers.buffers()
        twins = {id(buffer): copy for buffer, copy in zip(own, before[count:], strict=True)}
        with ExitStack() as stack:
            stack.callback(_second.reset, _second.set(True))
            stack.enter_context(swapped(self._writers, twins))
            if self._moment is not None:
                stack.enter_context(at(self._moment, _cuda_devices(values)))
            return self._region.compute((*before[:count], *values))


def compute(body: fx.GraphModule, values: Sequence[Any]) -> Any:
    """One run of a body. It may end early, by an exception of torch's: what it entered is left then too."""
    with ExitStack() as entered:
        return body.forward(entered, *values)


def _versions(values: Sequence[Any]) -> list[int]:
    """How often each parameter of the modules was written to."""
    return [
        p._version for value in values if isinstance(value, nn.Module) for p in value.parameters()
    ]


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies; one of a tensor that is there twice."""
    copies = {id(tensor): tensor.detach().clone() for tensor in tensors}
    return [copies[id(tensor)] for tensor in tensors]


def _cuda_devices(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(
        sorted(
            {v.device.index for v in values if isinstance(v, Tensor) and v.device.type == "cuda"}
        )
    )


def enter(
    entered: ExitStack,
    grad: bool,
    autocast: tuple[tuple[str, bool, torch.dtype], ...],
    cached: bool,
) -> ambient.Region:
    """Enters a region of the model, to be left with `entered` at the latest."""
    region = ambient.Region(grad, autocast, cached)
    entered.callback(region.leave)
    return region


def has_regions(module: nn.Module) -> bool:
    """Whether a stage has nodes that are computed again in its backward."""
    return isinstance(module, fx.GraphModule) and any(
        isinstance(n.target, Recomputed) for n in module.graph.nodes
    )
