"""Recomputed regions: parts of a stage that keep only their inputs for the backward.

Code generation puts a `RecomputedRegion` into the graph of a stage in the place of its nodes:

    forward    inputs ──▶ first run of the body ──▶ results        saves inputs and buffer copies
    backward   inputs ──▶ second run, on the copies ──▶ its saved tensors ──▶ gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from pipecompile.errors import InputError
from pipecompile.graph.autograd_context import Autocast, EnteredContext
from pipecompile.graph.model_state import swapped_state
from pipecompile.graph.random_streams import current_stream_key, use_stream

__all__ = ["RecomputedRegion", "enter_context", "has_recomputed_regions", "run_body"]


_is_recomputing: ContextVar[bool] = ContextVar("pipecompile_is_recomputing", default=False)


class RecomputedRegion:
    """A function that calls the body of a region through `torch.utils.checkpoint`.

    A graph calls it as a function and not as a module, and its parameters and leaf modules come as
    arguments. So they stay the stage's own, under their names. The arguments are, in this order:

        `buffers` tensors that the body writes to
        `writers` modules that write to buffers of their own
        all others

    The second run works on copies of the buffers, made before the first run. `random` tells whether
    nodes of the body draw random numbers; the second run then draws from the same streams.
    """

    def __init__(
        self, name: str, body: fx.GraphModule, *, buffers: int, writers: int, random: bool
    ) -> None:
        self.__name__ = name  # fx names the node and the global of its code by it
        self.body = body
        self.buffers = buffers
        self.writers = writers
        self.random = random

    def __call__(self, *values: Any) -> Any:
        """Return the tuple that the body returns."""
        # Without gradients there is no backward, and so nothing to recompute.
        if not torch.is_grad_enabled():
            return self.compute(values)
        # One object for both runs of a microbatch; the next microbatch's forward makes another,
        # with copies of buffers as it found them.
        runs = _RegionRuns(self, values)
        # `reseed` decides every number that is drawn, so torch need not keep generator states. An
        # early stop ends the second run with the last tensor that is saved, and torch's rrelu saves
        # its noise before it fills it.
        return checkpoint(
            runs,
            *values[self.buffers :],
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=not self.random,
        )

    def compute(self, values: Sequence[Any]) -> Any:
        """Run the body once and return its tuple."""
        return run_body(self.body, values)


class _RegionRuns:
    """The two runs of a region for one microbatch: in the forward and in the backward.

    Within a region that is being recomputed itself there is only the first run: torch goes back
    through the graph of that run. Buffers are not among the arguments of `checkpoint`, since these
    may not be written to before the backward.
    """

    def __init__(self, region: RecomputedRegion, values: Sequence[Any]) -> None:
        self._region = region
        self._buffers = values[: region.buffers]
        self._writers = nn.ModuleList(values[region.buffers : region.buffers + region.writers])
        self._copies: list[Tensor] | None = None
        if not _is_recomputing.get():
            self._copies = _copied([*self._buffers, *self._writers.buffers()])
        self._stream_key = current_stream_key() if region.random else None
        self._versions = _parameter_versions(values)
        # `checkpoint` calls this object in the forward and again in the backward.
        self._is_first = True

    def __call__(self, *values: Any) -> Any:
        if self._is_first:
            self._is_first = False
            return self._region.compute((*self._buffers, *values))
        # Autograd checks the versions of parameters that are arguments, but not of those that lie
        # in modules.
        if _parameter_versions(values) != self._versions:
            raise InputError(
                f"{self._region.__name__} is recomputed in the backward, but its parameters were "
                "written to since the forward; let the optimizer step after the whole step, not "
                "in a hook"
            )
        return self._recompute(values)

    def _recompute(self, values: Sequence[Any]) -> Any:
        """Run the body a second time, on the copies of the buffers that it writes to."""
        copies, self._copies = self._copies, None
        assert copies is not None, "a region is recomputed once"
        count = len(self._buffers)
        # Copies are matched by position. Within a region that is recomputed itself, the modules
        # hold other buffers now than when the copies were made.
        buffers = self._writers.buffers()
        replacement = {
            id(buffer): copy for buffer, copy in zip(buffers, copies[count:], strict=True)
        }
        with ExitStack() as stack:
            stack.callback(_is_recomputing.reset, _is_recomputing.set(True))
            stack.enter_context(swapped_state(self._writers, replacement))
            if self._stream_key is not None:
                stack.enter_context(use_stream(self._stream_key, _cuda_devices(values)))
            return self._region.compute((*copies[:count], *values))


def run_body(body: fx.GraphModule, values: Sequence[Any]) -> Any:
    """Run a body once.

    Torch may end the run early by an exception, once all tensors that the backward needs are there.
    The autograd contexts that the body entered are left then too.
    """
    with ExitStack() as entered:
        return body.forward(entered, *values)


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _parameter_versions(values: Sequence[Any]) -> list[int]:
    """Return the versions of the parameters of the modules among `values`."""
    modules = filter(_is_module, values)
    return [parameter._version for module in modules for parameter in module.parameters()]


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors; a tensor that is there twice has one copy."""
    copies = {id(tensor): tensor.detach().clone() for tensor in tensors}
    return [copies[id(tensor)] for tensor in tensors]


def _cuda_devices(values: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of the CUDA devices that tensors among `values` are on."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return tuple(sorted({t.device.index for t in tensors if t.device.type == "cuda"}))


def enter_context(
    entered: ExitStack, grad: bool, autocast: Autocast, caches_casts: bool
) -> EnteredContext:
    """Enter an autograd context that is left with `entered`, unless it is left before."""
    context = EnteredContext(grad, autocast, caches_casts)
    entered.callback(context.leave)
    return context


def has_recomputed_regions(module: nn.Module) -> bool:
    """Return whether a stage has a region that its backward recomputes."""
    return isinstance(module, fx.GraphModule) and any(
        isinstance(node.target, RecomputedRegion) for node in module.graph.nodes
    )
