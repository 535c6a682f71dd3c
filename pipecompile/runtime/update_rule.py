"""What an update does with gradients of a given norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.runtime.norm import clip_to_norm

__all__ = ["UpdateRule"]


@dataclass(frozen=True)
class UpdateRule:
    """Gradients are scaled so that their norm is at most `max_norm`, if there is one; with
    `skip_nonfinite` an update whose norm is NaN or infinite is left out.

    InputError if `max_norm` is no number of 0 or more: a negative one would turn updates around.
    """

    max_norm: float | None = None
    skip_nonfinite: bool = False

    @staticmethod
    def of(max_norm: float | Tensor) -> UpdateRule:
        """Return the rule for a norm that may be a tensor of one number, as torch takes it."""
        if isinstance(max_norm, Tensor) and max_norm.numel() == 1:
            return UpdateRule(max_norm.item())
        return UpdateRule(max_norm)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        is_norm = isinstance(self.max_norm, Real) and self.max_norm >= 0
        if self.max_norm is not None and not is_norm:
            raise InputError(f"max_norm={self.max_norm!r}, but it is a number, 0 or more")

    @property
    def needs_norm(self) -> bool:
        """Whether an update needs the norm of all gradients."""
        return self.max_norm is not None or self.skip_nonfinite

    def changes_nothing(self, norm: Tensor) -> bool:
        """Return whether gradients of this norm are used as they are. If not, they are not for any
        higher norm.
        """
        if not norm.isfinite():
            return False
        # The arithmetic of `clip_to_norm`: in another one the two could disagree by a rounding,
        # and an update would stand that ranks without post-validation would scale.
        return self.max_norm is None or bool(self.max_norm / (norm + 1e-6) >= 1)

    def apply(self, gradients: Sequence[Tensor], norm: Tensor) -> bool:
        """Scale `gradients` in place; return False if the update is to be left out."""
        if self.skip_nonfinite and not norm.isfinite():
            return False
        if self.max_norm is not None:
            clip_to_norm(gradients, norm, self.max_norm)
        return True
