"""The options of the commands. Those that decide a plan are generated from `OPTIONS`
(pipecompile/ir/options.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import click

from pipecompile.errors import InputError
from pipecompile.ir.option import Option
from pipecompile.ir.option_names import known_name
from pipecompile.ir.options import OPTIONS

__all__ = [
    "LOWERCASE",
    "OneOf",
    "format_option",
    "parsed_by",
    "plan_option",
    "planning_options",
]


class OneOf(click.ParamType[str]):
    """One of a few names, in whatever case; an unknown one is answered with the nearest."""

    def __init__(self, what: str, names: Iterable[str]) -> None:
        self.name = what
        self.names = tuple(names)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name in small letters; InputError if there is no such name."""
        return known_name(self.name, value, self.names)


class _Lowercase(click.ParamType[str]):
    """A name that the room which knows it checks; here it is only written in small letters."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name in small letters."""
        return str(value).lower()


LOWERCASE = _Lowercase()


def parsed_by(parse: Callable[[str], Any]) -> Callable[[Any, Any, str | None], Any]:
    """Return the callback of an option whose text `parse` reads; None where it is not given."""
    return lambda _context, _option, text: None if text is None else parse(text)


format_option = click.option(
    "--format",
    "form",
    type=OneOf("format", ("text", "json", "github")),
    default="text",
    show_default=True,
    metavar="FORMAT",
    help="text, json or github.",
)


def planning_options(
    *, without: Collection[str] = (), **changes: dict[str, Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of a plan to a command, except those `without`
    which it does; `changes` are those of the declarations of single options.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        # The last decorator that is applied comes first in the help.
        for option in (each for each in reversed(OPTIONS) if each.name not in without):
            function = plan_option(option.name, **changes.get(option.name, {}))(function)
        return function

    return decorate


def plan_option(name: str, **changes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator for the option of a plan that is called `name` in Python, with
    `changes` of its declaration.
    """
    # One declaration for the command line and for Python: a default or a name that changes in the
    # table changes in both.
    option = next(option for option in OPTIONS if option.name == name)
    # A command with a default of its own must not show that of `OPTIONS` in its help.
    if "default" in changes:
        changes.setdefault("default_text", "")
    flag, attributes = _on_command_line(replace(option, **changes))
    return click.option(flag, option.name, **attributes)


def _on_command_line(option: Option) -> tuple[str, dict[str, Any]]:
    """Return the flag of an option, and the attributes with which click declares it."""
    shown: dict[str, Any] = {"help": _help(option)}
    if option.form == "switch":
        # What is on by default needs a way to be turned off: --self-check/--no-self-check.
        flag = f"{option.flag}/--no-{option.flag[2:]}" if option.default else option.flag
        return flag, {**shown, "is_flag": True, "default": option.default}
    shown["metavar"] = option.metavar
    # What is given several times comes as a tuple of texts, which a callback turns into what the
    # Python keyword takes: --pin a=0 --pin b=-1 into {"a": 0, "b": -1}.
    match option.form:
        case "list":
            return option.flag, {**shown, "default": "", "callback": _listed}
        case "pins":
            return option.flag, {**shown, "multiple": True, "callback": _pinned}
        case "groups":
            return option.flag, {**shown, "multiple": True, "callback": _grouped}
        case "repeated":
            return option.flag, {**shown, "multiple": True}
    if option.choices:
        shown["metavar"] = "NAME"
        shown["type"] = OneOf(option.name, option.choices)
    elif option.type == int | None:
        shown["type"] = int
    elif option.type == float | None:
        shown["type"] = float
    return option.flag, {**shown, "default": option.default}


def _help(option: Option) -> str:
    """Return what an option does, which names it may have, and its default."""
    names = f" One of {', '.join(option.choices)}." if option.choices else ""
    is_off = option.form == "switch" and not option.default
    shown = "" if is_off else f"  [default: {option.shown_default}]"
    return f"{option.help}{names}{shown}"


def _listed(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    """Return the values between commas."""
    return tuple(part for part in text.split(",") if part)


def _grouped(
    context: click.Context, option: click.Parameter, texts: Iterable[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the names between commas, of each time that the option is given."""
    return tuple(tuple(text.split(",")) for text in texts)


def _pinned(
    context: click.Context, option: click.Parameter, texts: Iterable[str]
) -> dict[str, int]:
    """Return the stage of each node that NODE=STAGE gives; InputError if a node has two."""
    pins: dict[str, int] = {}
    for text in texts:
        # From the right: the name of a node may have an = of its own, a number has none.
        node, _, stage = text.rpartition("=")
        try:
            number = int(stage)
        except ValueError:
            raise InputError(f"--pin {text}: write NODE=STAGE, for example lm_head=-1") from None
        # The same pin twice does no harm: scripts add to lists of options.
        if pins.setdefault(node, number) != number:
            raise InputError(f"--pin {node}={pins[node]} and {node}={number}: a node has one stage")
    return pins
