"""Numbers of things as people write them: 1 stage, 4 stages."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Return the number and the noun, in the plural unless the number is 1."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"
