"""Which gradients the stage behind a boundary does not compute, so that nobody receives zeros, and
how the others lie in memory.

A parameter without a gradient is one that the optimizer leaves alone; with a gradient of zeros its
weight would decay, and momentum would move it. A tensor at a boundary has no gradient if nothing
that leads to the loss reads it. A sender tells that with each message of its first step, and from
then on such tensors are left out:

    first step    d loss/d h, zeros, states (order, missing)   for h and an unused d
    later steps   d loss/d h

A gradient may be contiguous in another order of dimensions than its tensor. It travels in that, and
the receiver sees it as it lay: a sum over it, such as the gradient of a bias, is rounded by that.

If the messages of the first step differ, it depends on data, and all steps have zeros and states.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.graph.layout import dense_order, rounds_by_layout

__all__ = ["MISSING", "GradientStates", "in_order", "seen_in_order", "state_of"]

MISSING = -1
States = tuple[int, ...]
"""For each tensor at a boundary `MISSING`, or the order of dimensions in which its gradient is
contiguous, as one number.
"""
BASE = 16
"""The number has a digit for each dimension: (0, 2, 1) is 0 + 2 · 16 + 1 · 256."""
MOST_DIMENSIONS = 15


def state_of(gradient: Tensor | None) -> int:
    """Return what a message tells of a gradient."""
    if gradient is None:
        return MISSING
    dimensions = gradient.dim()
    # Others are received contiguous: kernels of a GPU lay out what they compute as they like.
    is_kept = dimensions <= MOST_DIMENSIONS and rounds_by_layout(gradient)
    order = dense_order(gradient) if is_kept else range(min(dimensions, MOST_DIMENSIONS))
    return sum(dimension * BASE**place for place, dimension in enumerate(order))


def in_order(gradient: Tensor, state: int) -> Tensor:
    """Return a gradient with its dimensions as a message in this state has them."""
    return gradient.permute(_order(state, gradient.dim()))


def seen_in_order(received: Tensor, state: int) -> Tensor:
    """Return the gradient that a message has brought, whose shape `received` has, as it lay where
    it was sent: the same tensor with other strides.
    """
    strides, step = [0] * received.dim(), 1
    for dimension in reversed(_order(state, received.dim())):
        strides[dimension] = step
        step *= received.shape[dimension]
    # In place: a view would hold its base, and autograd adds in place only to what nobody holds.
    return received.as_strided_(received.shape, strides)


def _order(state: int, dimensions: int) -> list[int]:
    if dimensions > MOST_DIMENSIONS:
        return list(range(dimensions))
    return [state // BASE**place % BASE for place in range(dimensions)]


class GradientStates:
    """What messages of gradients leave out, and how the others lie, by boundary.

    Sender and receiver see the same messages, and so know the same if they have ended the same
    `steps`.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._known: dict[Hashable, States] = {}
        self._seen: dict[Hashable, set[States]] = {}

    def known(self, boundary: Hashable) -> States | None:
        """Return the states that are settled; None while each message carries them."""
        return self._known.get(boundary)

    def note(self, boundary: Hashable, states: States) -> None:
        """Take in what a message has told."""
        self._seen.setdefault(boundary, set()).add(states)

    def begin_step(self) -> None:
        """Forget what a step before this one has told, which may have failed."""
        self._seen.clear()

    def end_step(self) -> None:
        """From the next step on leave out what was missing in every message of the first one."""
        # Also if it has seen none: ranks compare how many steps they have ended.
        self.steps += 1
        for boundary, seen in self._seen.items():
            # If messages differ it depends on data: they go on sending zeros.
            # Of a boundary with h and an unused d all microbatches told (order, MISSING): d is
            # left out from now on. Both ends have seen the same messages, so both decide this
            # without another one.
            if boundary not in self._known and len(seen) == 1:
                (self._known[boundary],) = seen
        self._seen.clear()

    def forget(self) -> None:
        """Begin anew, since another rank has not ended the same steps."""
        self.steps = 0
        self._known.clear()

    def check(self, boundary: Hashable, stage: int, states: States) -> None:
        """Raise InputError if a message before `stage` misses others than those that are left out
        or sent, or has one in another order, and no message carries its state any more.
        """
        known = self._known.get(boundary, states)
        for index, (was, now) in enumerate(zip(known, states, strict=True)):
            if was == now:
                continue
            words = {MISSING: "missing"}
            before, after = (words.get(each, "there") for each in (was, now))
            if before == after:
                before, after = "in one order of dimensions in memory", "in another one"
            raise InputError(
                f"the gradient of tensor {index} before stage {stage} was {before} in the first "
                f"step, and is {after} now: a module or the loss branches on data, and the rank "
                "before cannot know what to wait for; let all branches give the same tensors a "
                "gradient alike (one of zeros by adding 0 * x)"
            )
