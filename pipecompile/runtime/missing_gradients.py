"""Which gradients the stage behind a boundary does not compute, so that nobody receives zeros.

A parameter without a gradient is one that the optimizer leaves alone; with a gradient of zeros its
weight would decay, and momentum would move it. A tensor at a boundary has no gradient if nothing
that leads to the loss reads it. In its first step a sender tells that with each message, and from
then on such tensors are left out:

    first step    d loss/d h, zeros, flags (has, missing)      for h and an unused d
    later steps   d loss/d h
"""

from __future__ import annotations

from pipecompile.errors import InputError

__all__ = ["MissingGradients"]

Flags = tuple[bool, ...]
"""For each tensor at a boundary, whether its gradient is missing."""


class MissingGradients:
    """What messages of gradients leave out, by the stage behind the boundary.

    Sender and receiver see the same messages, and so know the same.
    """

    def __init__(self) -> None:
        self._known: dict[int, Flags] = {}
        self._seen: dict[int, set[Flags]] = {}

    def of(self, stage: int) -> Flags | None:
        """Return what is left out before `stage`; None while messages tell it."""
        return self._known.get(stage)

    def note(self, stage: int, flags: Flags) -> None:
        """Take in what a message has told."""
        self._seen.setdefault(stage, set()).add(flags)

    def begin_step(self) -> None:
        """Forget what a step before this one has told, which may have failed."""
        self._seen.clear()

    def end_step(self) -> None:
        """From the next step on leave out what was missing in every message of this one."""
        for stage, seen in self._seen.items():
            if len(seen) == 1:  # else it depends on data, and messages go on telling it
                (self._known[stage],) = seen

    def check(self, stage: int, flags: Flags) -> None:
        """Raise InputError if a gradient is missing that was there in the first step, or the other
        way round.
        """
        known = self._known[stage]
        if flags != known:
            changed = [was != now for was, now in zip(known, flags, strict=True)].index(True)
            raise InputError(
                f"the gradient of tensor {changed} before stage {stage} was "
                f"{'missing' if known[changed] else 'there'} in the first step, and is "
                f"{'missing' if flags[changed] else 'there'} now: a module or the loss branches on "
                "data, and the rank before cannot know what to wait for; let all branches give the "
                "same tensors a gradient (one of zeros by adding 0 * x)"
            )
