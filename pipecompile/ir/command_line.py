"""The options of a plan as words of the command line: what `explain` gives to be run."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import join
from typing import Any

from pipecompile.ir.links import FREE, Links
from pipecompile.ir.option import Option
from pipecompile.ir.option_names import implied_objective, implied_schedule
from pipecompile.ir.options import DEFAULT_COSTS, OPTIONS
from pipecompile.ir.plan import Options
from pipecompile.ir.size import option_text

__all__ = ["option_words", "plan_command"]

LINKS_FILE = "LINKS.json"  # a plan has its links, and not the name of their file


def plan_command(target: str, options: Options, links: Links) -> str:
    """Return the command that plans `target` with these options.

    Other links than free ones are to be in a file.
    """
    # With a placeholder the command is not complete, but a reader sees at once what it lacks.
    from_file = [] if links == FREE else ["--links", LINKS_FILE]
    return join(["pipecompile", "plan", target, *option_words(options), *from_file])


def option_words(options: Options) -> list[str]:
    """Return the options that are not the default as the command line takes them."""
    words: list[str] = []
    for option in OPTIONS:
        if option.field is not None:
            value = getattr(options, option.field)
            # Their defaults are not those of a plan, which is made for a target.
            if option.name in ("k", "microbatches") or value != _default(option, options):
                words += _words(option, value)
    return words


def _default(option: Option, options: Options) -> Any:
    """Return what a plan has if the option is left out, all else being given."""
    match option.name:
        # What the schedule implies: a forward-only plan with `throughput` says so by its schedule
        # alone.
        case "objective":
            return implied_objective(options.schedule)
        case "schedule":
            # An objective that the schedule implies is not said, so it implies none in turn.
            is_implied = options.objective == implied_objective(options.schedule)
            return implied_schedule(None if is_implied else options.objective)
        case "recompute":
            return "none"
        case "costs":
            return DEFAULT_COSTS
    return option.default


def _words(option: Option, value: Any) -> Iterator[str]:
    """Yield the flag of an option with its value, as often as it takes."""
    if value is None or (option.name == "replicas" and value == 1):
        return
    match option.form:
        case "switch":
            texts = [""] if value else []
        case "list":
            texts = [",".join(value)] if value else []
        case "pins":
            # Each pin has a flag of its own: --pin a=0 --pin b=1.
            texts = [f"{node}={stage}" for node, stage in value.items()]
        case "groups":
            texts = [",".join(names) for names in value]
        case "repeated":
            texts = list(value)
        case _:
            texts = [_text(option, value)]
    for text in texts:
        yield option.flag
        # A switch has no text behind its flag.
        yield from [text] * bool(text)


def _text(option: Option, value: Any) -> str:
    if option.name == "stage_replicas":
        return ",".join(map(str, value))
    if option.name == "memory":
        return ",".join(map(option_text, (value,) if isinstance(value, int) else value))
    return str(value)
