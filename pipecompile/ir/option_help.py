"""What people read about the options: Python's help, and the page docs/reference/options.md.

`python -m pipecompile.ir.option_help` prints the page.
"""

from __future__ import annotations

from textwrap import fill

from pipecompile.ir.option import Option
from pipecompile.ir.options import OPTIONS

__all__ = ["options_page", "python_help"]

INDENT = "    "


def python_help() -> str:
    """Return the choices for `help(pipecompile.Choices)`, each with its default, help and names."""
    entries = []
    for option in OPTIONS:
        if option.is_choice:
            text = [option.help]
            if option.choices:
                text.append(f"One of {', '.join(map(repr, option.choices))}.")
            lines = [
                fill(line, 92, initial_indent=INDENT, subsequent_indent=INDENT) for line in text
            ]
            entries.append("\n".join([f"{option.name}  (default: {option.shown_default})", *lines]))
    return "\n\n".join(entries)


def options_page() -> str:
    """Return the page docs/reference/options.md: all options as a Markdown table."""
    rows = []
    for option in OPTIONS:
        names = f"`{option.flag}`", f"`{option.name}`"
        cells = (*names, _values(option), option.shown_default, option.help)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([PAGE_HEAD, *rows]) + "\n"


PAGE_HEAD = """\
# Options of a plan

The same options go to `pipecompile plan` on the command line and to `pipecompile()` in Python; to
`pipecompile verify` go all but those of a joint search (devices, effort, time limit, top).
Names are known in whatever case; an unknown one is answered with the nearest.

| command line | Python | values | default | what it does |
|---|---|---|---|---|"""


def _values(option: Option) -> str:
    if option.choices:
        names = ", ".join(f"`{name}`" for name in option.choices)
        return f"several of {names}" if option.form == "list" else names
    if option.metavar is not None:
        return f"`{option.metavar}`"
    # Options of other types have a metavar, all but those of whole numbers.
    return {bool: "yes or no", str | None: "name"}.get(option.type, "whole number")


if __name__ == "__main__":
    print(options_page(), end="")
