"""Parts and slots of the objects of a class, through which the search for reads goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipecompile.frontend.found_attributes import slots_in
from pipecompile.frontend.implicit_reads import parts_of

__all__ = ["ObjectShape"]


@dataclass(frozen=True)
class ObjectShape:
    """The parts by which an object leads to functions or items, and the slots of its classes.

    It holds the class, whose id therefore names no other class while the shape lives.
    """

    kind: type
    parts: tuple[str, ...]
    slots: tuple[dict[str, Any], ...]

    @staticmethod
    def of(value: Any) -> ObjectShape:
        """Return the shape of an object; most classes have the same for all their objects."""
        kind = type(value)
        slots = (slots_in(vars(base)) for base in kind.__mro__)
        return ObjectShape(kind, parts_of(value), tuple(each for each in slots if each))
