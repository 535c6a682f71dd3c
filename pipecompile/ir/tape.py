"""A stage as a choice of what to compute again sees it: times, needs and storages by position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["Held", "Tape"]


@dataclass(frozen=True)
class Held:
    """A storage: made at a position, used (read or saved) at later ones, `saved` for the backward at some of them.

    What is `sent` to later stages is held until the backward ends, whatever is computed again. What is `copied` for
    them lives until this position is done, the stage's last, and copies were made. Made at −1 is what is there before.
    """

    bytes: int
    made: int
    uses: tuple[int, ...]
    saved: tuple[int, ...]
    sent: bool
    copied: int | None = None

    @property
    def last(self) -> int:
        """The last position that uses it, or is done before it goes."""
        return max((*self.uses, *self.saved), default=self.made) if self.copied is None else self.copied


@dataclass(frozen=True)
class Tape:
    """The nodes of a stage by position 0 … n − 1; bytes are those of a microbatch, as a bound counts them.

    `packs` says when a node's forward hands tensors to its backward (before its kernels, after them, never).
    `forward` is what must be free when a node's forward begins, `before` when its backward does. The latter counts
    gradients, which are `flowing` when it begins and, with sums that are made last, live `after` it; what the forward
    kept comes on top.
    A region keeps copies of what its nodes have `written` to, from the forward on.
    Regions begin and end at `boundaries`, among 0 … n, and hold none of the nodes at `fixed` positions. When the last
    node is done `copies` are made, which are sent.
    """

    ns: tuple[int, ...]
    packs: tuple[str, ...]
    forward: tuple[int, ...]
    flowing: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    held: tuple[Held, ...]
    written: tuple[int, ...]
    boundaries: tuple[int, ...]
    fixed: frozenset[int] = frozenset()
    copies: int = 0

    @cached_property
    def sent(self) -> int:
        """What is held for later stages: bytes."""
        return self.copies + sum(held.bytes for held in self.held if held.sent)
