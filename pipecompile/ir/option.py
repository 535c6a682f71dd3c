"""One option of a plan, as Python, the command line and the documentation see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

__all__ = ["Option"]

Form = Literal["value", "switch", "list", "repeated", "pins", "groups"]
"""How the command line takes an option: one value, on or off, values between commas, the option
several times, NODE=STAGE several times, or lists between commas several times.
"""


@dataclass(frozen=True)
class Option:
    """One option, declared beside its type: `python_keyword: Annotated[its type, Option(…)]`.

    `flag` is its command-line option, `--python-keyword` unless given. `default_text` says what a
    default of None, or an empty one, stands for. `field` is the field of a plan's options that
    holds it: that of the same name, another one, or None if the plan does not hold it. `is_choice`
    is false for what `pipecompile()` takes beside its choices.
    """

    default: Any
    help: str
    default_text: str = ""
    form: Form = "value"
    metavar: str | None = None
    flag: str = ""
    field: str | None = ""
    name: str = ""
    type: Any = None
    is_choice: bool = True

    def declared_as(self, name: str, kind: Any, *, is_choice: bool) -> Option:
        """Return this option with its keyword and type."""
        flag = self.flag or f"--{name.replace('_', '-')}"
        # None means that a plan does not hold it, so that "" must stand for the same name.
        field = name if self.field == "" else self.field
        return replace(self, name=name, type=kind, flag=flag, field=field, is_choice=is_choice)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that it may have, () if it is not one of a few."""
        return tuple(_literals(self.type))

    @property
    def shown_default(self) -> str:
        """Its default for people."""
        if self.default_text:
            return self.default_text
        return ("no", "yes")[self.default] if isinstance(self.default, bool) else str(self.default)


def _literals(kind: Any) -> Iterable[str]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        # Literal["a", "b"] | None has the parts Literal["a", "b"] and NoneType, which has none.
        for part in get_args(kind):
            yield from _literals(part)
