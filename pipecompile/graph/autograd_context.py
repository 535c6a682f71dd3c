"""Regions: nodes that ran under `no_grad` or `autocast` inside the model run under the same again, wherever they lie.

The frontend notes on each node the state it ran under (`meta["ambient"]`, None outside any region), and drops the
calls that entered and left the regions. That makes a region cuttable: `EnterRegions` puts the calls back around each
run of nodes of one ambient, in whatever graph the nodes ended up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import fx

__all__ = ["Ambient", "Region", "cast_once", "entered", "leave", "observed"]

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Ambient:
    """The state a node runs under: `grad` mode, and per device type whether autocast is on and to which type.

    Within an outermost autocast region, the one of this `number` in the model, weights are cast once if `cached`.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool = True
    number: int = field(default=0, repr=False)  # which one makes no difference to what a node does

    @property
    def casts(self) -> bool:
        """Whether autocast is on."""
        return any(enabled for _, enabled, _ in self.autocast)


def observed() -> Ambient:
    """The state that this thread is in."""
    casts = (
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in DEVICES
    )
    return Ambient(torch.is_grad_enabled(), tuple(casts), torch.is_autocast_cache_enabled())


class Region:
    """A state that is entered and left by calls, since generated code has no `with`."""

    def __init__(
        self, grad: bool, autocast: tuple[tuple[str, bool, torch.dtype], ...], cached: bool = True
    ) -> None:
        self._stack = ExitStack()
        # A region never turns gradients on: under `evaluate` they stay off.
        self._stack.enter_context(torch.set_grad_enabled(grad and torch.is_grad_enabled()))
        for device, enabled, dtype in autocast:
            if torch.amp.is_autocast_available(device):
                self._stack.enter_context(
                    torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)
                )

    def leave(self) -> None:
        """Back to the state before the region."""
        self._stack.close()


@contextmanager
def entered(ambient: Ambient | None) -> Iterator[None]:
    """Runs the block under `ambient`; None changes nothing."""
    region = None if ambient is None else Region(ambient.grad, ambient.autocast, ambient.cached)
    try:
        yield
    finally:
        if region is not None:
            region.leave()


def leave(region: Region) -> None:
    """Leaves `region`; a function, so that a graph can call it."""
    region.leave()


def cast_once(nodes: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """Autocast casts a weight once in an outermost region: its readers' gradients are summed before they are cast back.

    Stages would cast for themselves and sum in float32. Who reads it as it is, an embedding for example, is free.
    """
    around = observed()
    readers: dict[tuple[int, int], list[fx.Node]] = {}
    for node in nodes:
        ambient = node.meta["ambient"] or around
        if ambient.casts and ambient.cached and ambient.grad:
            for parameter in {id(each) for each in node.meta["casts"]}:
                number = (
                    0 if around.casts else ambient.number
                )  # an autocast around the model is the outermost
                readers.setdefault((number, parameter), []).append(node)
    yield from (members for members in readers.values() if len(members) > 1)
