"""Autograd contexts: the gradient mode and autocast under which nodes ran inside the model.

The frontend notes on each node the context that it ran under (`meta["autograd_context"]`, None if
it is that of the caller) and records no calls that enter or leave a context:

    the model                      meta["autograd_context"]      a stage after `EnterContexts`

    x = first(x)                   None                          x = first(x)
    with torch.no_grad():                                        c = EnteredContext(False, …)
        y = second(x)              AutogradContext(grad=False)   y = second(x)
                                                                 leave_context(c)
    z = x * y                      None                          z = x * y

A cut may therefore lie inside a `with` block: each stage enters the contexts of its own nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._C import _len_torch_function_stack

__all__ = [
    "Autocast",
    "AutogradContext",
    "EnteredContext",
    "current_autocast",
    "current_context",
    "default_device_type",
    "entered_contexts_left",
    "leave_context",
    "run_under",
    "shared_cast_readers",
]

DEVICES = ("cpu", "cuda")
Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""Per device type: its name, whether autocast is on there, and the type that it casts to."""


@dataclass(frozen=True, slots=True)
class AutogradContext:
    """What a node runs under: the gradient mode and, per device type, autocast.

    `caches_casts` tells whether weights are cast once within an outermost autocast region.
    `region_number` counts these regions in the model. It does not change what a node computes and
    is no part of the text of a context, by which nodes of equal cost are found.
    """

    grad: bool
    autocast: Autocast
    caches_casts: bool = True
    region_number: int = field(default=0, repr=False)

    @property
    def is_autocast(self) -> bool:
        """Whether autocast is on for a device."""
        return any(enabled for _, enabled, _ in self.autocast)


def current_autocast() -> tuple[Autocast, bool]:
    """Return autocast as it is in this thread, and whether it casts weights once."""
    autocast = tuple(
        [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in DEVICES
        ]
    )
    return autocast, torch.is_autocast_cache_enabled()


def default_device_type() -> str:
    """Return the type of torch's default device in this thread."""
    # One that is set is a mode. torch itself imports, filters and makes a tensor to say so.
    return torch.get_default_device().type if _len_torch_function_stack() else "cpu"


def current_context() -> AutogradContext:
    """Return the context that this thread is in."""
    return AutogradContext(torch.is_grad_enabled(), *current_autocast())


class _Entered(threading.local):
    """The contexts that were entered in this thread and not left."""

    def __init__(self) -> None:
        self.contexts: list[EnteredContext] = []


_HERE = _Entered()


class EnteredContext:
    """A context that is entered by a call and left by another, since a graph has no `with`."""

    def __init__(self, grad: bool, autocast: Autocast, caches_casts: bool = True) -> None:
        self._stack = ExitStack()
        _HERE.contexts.append(self)
        self._stack.callback(_HERE.contexts.remove, self)
        # A context never turns gradients on: under `evaluate` they stay off.
        self._stack.enter_context(torch.set_grad_enabled(grad and torch.is_grad_enabled()))
        for device, enabled, dtype in autocast:
            # A plan that was made on a machine with GPUs may run on one without.
            if torch.amp.is_autocast_available(device):
                self._stack.enter_context(
                    torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=caches_casts)
                )

    def leave(self) -> None:
        """Return to the context before this one."""
        # In the opposite order: autocast ends before the gradient mode is put back, as `with`
        # blocks that lie in each other end.
        self._stack.close()


@contextmanager
def entered_contexts_left() -> Iterator[None]:
    """Leave what the block has entered and not left: a graph that fails does not reach the call
    that leaves a context.
    """
    before = len(_HERE.contexts)
    try:
        yield
    finally:
        for entered in reversed(_HERE.contexts[before:]):
            entered.leave()


@contextmanager
def run_under(context: AutogradContext | None) -> Iterator[None]:
    """Run the block under `context`; None changes nothing."""
    if context is None:
        yield
        return
    entered = EnteredContext(context.grad, context.autocast, context.caches_casts)
    try:
        yield
    finally:
        entered.leave()


def leave_context(entered: EnteredContext) -> None:
    """Leave `entered`. It is a function, so that a graph can call it."""
    entered.leave()


def shared_cast_readers(nodes: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield the nodes that read one cast of a parameter, for each cast with several readers.

    Within an outermost region, autocast casts a weight w once, to w', for all of its readers:

        w ── cast ── w' ─┬─ reader 1        grad(w) = cast back(grad₁(w') + grad₂(w'))
                         └─ reader 2

    The gradients are summed in bfloat16 before they are cast back. Two stages would each cast for
    themselves, and their gradients would be summed in float32, which rounds differently. Nodes that
    read the parameter without a cast, an embedding for example, are not among the readers.
    """
    # None on a node is the context of the caller, which is the one that this call is made in.
    outside = current_context()
    readers: dict[tuple[int, int], list[fx.Node]] = {}
    for node in nodes:
        context = node.meta["autograd_context"] or outside
        if not (context.is_autocast and context.caches_casts and context.grad):
            continue
        # An autocast around the whole model is the outermost region of all nodes.
        region = 0 if outside.is_autocast else context.region_number
        # A node that casts a weight twice is one reader.
        for parameter in {id(parameter) for parameter in node.meta["cast_parameters"]}:
            readers.setdefault((region, parameter), []).append(node)
    yield from (members for members in readers.values() if len(members) > 1)
