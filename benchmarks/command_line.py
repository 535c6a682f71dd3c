"""The command lines of the benchmarks: which models or groups a run is limited to.

Every benchmark calls one of these functions first, so that `--help` prints its docstring and a
mistyped name stops it before it measures anything.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from pathlib import Path

from pipecompile.errors import unknown

__all__ = ["checked_names", "chosen_names", "no_arguments", "parser_of"]


def parser_of(documentation: str | None) -> ArgumentParser:
    """Return a parser whose help is the docstring of a benchmark."""
    name = Path(sys.argv[0]).stem
    return ArgumentParser(
        prog="python -m benchmarks" + f".{name}" * (name != "__main__"),
        description=documentation,
        formatter_class=RawDescriptionHelpFormatter,
    )


def no_arguments(documentation: str | None) -> None:
    """Print the help or refuse arguments, for a benchmark that takes none."""
    parser_of(documentation).parse_args()


def chosen_names(documentation: str | None, what: str, known: Iterable[str]) -> list[str]:
    """Return the names on the command line, which is empty where everything is to be measured.

    Each is a `what` among `known`; another name ends the process with status 2 and a message that
    lists them.
    """
    parser = parser_of(documentation)
    parser.add_argument("names", nargs="*", metavar=what.upper())
    return checked_names(parser, parser.parse_args().names, what, known)


def checked_names(
    parser: ArgumentParser, names: list[str], what: str, known: Iterable[str]
) -> list[str]:
    """Return `names` of the command line; the process ends unless each is a `what` among `known`.

    Not by argparse's `choices`, which refuse an empty list too.
    """
    known_names = list(known)
    for name in names:
        if name not in known_names:
            parser.error(str(unknown(what, name, known_names)))
    return names
