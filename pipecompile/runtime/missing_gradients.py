"""Which gradients the stage behind a boundary does not compute, so that nobody receives zeros.

A parameter without a gradient is one that the optimizer leaves alone; with a gradient of zeros its
weight would decay, and momentum would move it. A tensor at a boundary has no gradient if nothing
that leads to the loss reads it. A sender tells that with each message of its first step, and from
then on such tensors are left out:

    first step    d loss/d h, zeros, flags (has, missing)      for h and an unused d
    later steps   d loss/d h

If the messages of the first step differ, it depends on data, and all steps have zeros and flags.
"""

from __future__ import annotations

from collections.abc import Hashable

from pipecompile.errors import InputError

__all__ = ["MissingGradients"]

Flags = tuple[bool, ...]
"""For each tensor at a boundary, whether its gradient is missing."""


class MissingGradients:
    """What messages of gradients leave out, by boundary.

    Sender and receiver see the same messages, and so know the same if they have ended the same
    `steps`.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._known: dict[Hashable, Flags] = {}
        self._seen: dict[Hashable, set[Flags]] = {}

    def known(self, boundary: Hashable) -> Flags | None:
        """Return which gradients are left out; None if each message tells what is missing."""
        return self._known.get(boundary)

    def note(self, boundary: Hashable, flags: Flags) -> None:
        """Take in what a message has told."""
        self._seen.setdefault(boundary, set()).add(flags)

    def begin_step(self) -> None:
        """Forget what a step before this one has told, which may have failed."""
        self._seen.clear()

    def end_step(self) -> None:
        """From the next step on leave out what was missing in every message of the first one."""
        # Also if it has seen none: ranks compare how many steps they have ended.
        self.steps += 1
        for boundary, seen in self._seen.items():
            # If messages differ it depends on data: they go on sending zeros.
            # Of a boundary with h and an unused d all microbatches told (False, True): d is left
            # out from now on. Both ends have seen the same messages, so both decide this without
            # another one.
            if boundary not in self._known and len(seen) == 1:
                (self._known[boundary],) = seen
        self._seen.clear()

    def forget(self) -> None:
        """Begin anew, since another rank has not ended the same steps."""
        self.steps = 0
        self._known.clear()

    def check(self, boundary: Hashable, stage: int, flags: Flags) -> None:
        """Raise InputError if a message before `stage` misses others than those that are left out
        or sent, and cannot tell.
        """
        known = self._known.get(boundary, flags)
        changed = [index for index, flag in enumerate(flags) if flag != known[index]]
        if changed:
            index = changed[0]
            was, now = ("missing" if each[index] else "there" for each in (known, flags))
            raise InputError(
                f"the gradient of tensor {index} before stage {stage} was {was} in the first step, "
                f"and is {now} now: a module or the loss branches on data, and the rank before "
                "cannot know what to wait for; let all branches give the same tensors a gradient "
                "(one of zeros by adding 0 * x)"
            )
