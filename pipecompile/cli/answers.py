"""What all commands share: exit codes, errors as one line, and output that only one rank prints."""

from __future__ import annotations

import os
import sys
import traceback
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

from pipecompile.cli.log import logging_to_stderr
from pipecompile.cli.ranks import is_first_rank
from pipecompile.errors import (
    InfeasibleError,
    PipecompileError,
    StalePlanError,
    StaleProfileError,
    reason_of,
)

if TYPE_CHECKING:
    from pipecompile.api.report import DrawTable

__all__ = [
    "FINE",
    "NO",
    "AnswerGroup",
    "framed",
    "print_annotation",
    "say",
    "table_style",
]

# As diff(1) and grep(1) have them. CI tells "the plan does not fit" (1) from "no answer" (2).
FINE, NO, ERROR = 0, 1, 2


class AnswerCommand(click.Command):
    """A command whose function returns its exit code. It has the options -q and -v."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.params += [
            click.Option(
                ["-q", "--quiet"], is_flag=True, help="Print the result and warnings only."
            ),
            click.Option(["-v", "--verbose"], is_flag=True, help="Print all messages."),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with the log on standard error."""
        # Taken out of the parameters: the functions of commands do not know these two.
        quiet, verbose = ctx.params.pop("quiet"), ctx.params.pop("verbose")
        with logging_to_stderr(quiet=quiet, verbose=verbose):
            return super().invoke(ctx)


class AnswerGroup(click.Group):
    """Commands that end with what their function returns; an error becomes one line on standard
    error.
    """

    command_class = AnswerCommand

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and exit with its code."""
        try:
            # From the narrow to the wide, since the first `except` that matches is taken:
            #     1    an answer: it does not fit, it is stale
            #     2    another error of ours, misuse of the command line, what nobody foresaw
            # Help and --version leave by exceptions of click's, which are no errors and pass.
            code = super().invoke(ctx)
        # "It does not fit" and "it is stale" are answers: the question was understood.
        except (InfeasibleError, StalePlanError, StaleProfileError) as error:
            code = _complain(str(error), NO)
        except PipecompileError as error:
            code = _complain(str(error), ERROR)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            code = _complain(_misuse(error), ERROR)
        except (click.exceptions.ClickException, click.exceptions.Exit, click.exceptions.Abort):
            raise
        except Exception as error:
            # It comes from the user's model or loss, or is a defect of ours. Exit code 1 would be
            # an answer.
            if "PIPECOMPILE_DEBUG" in os.environ:
                raise
            code = _complain(_unexpected(error), ERROR)
        sys.stdout.flush()
        raise SystemExit(code)


def _misuse(error: click.UsageError) -> str:
    command = "pipecompile" if error.ctx is None else error.ctx.command_path
    message = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption):
        message = f"No such option {error.option_name!r}"
        if meant := _meant_options(error):
            message += f". Did you mean {' or '.join(map(repr, meant))}?"
    return f"{message}{' See' if message.endswith('?') else '; see'} {command} --help"


def _meant_options(error: click.NoSuchOption) -> list[str]:
    """Return the options that an unknown one may stand for: `--format json` for `--json`, or those
    with a name that is near.
    """
    given = error.option_name.lstrip("-")
    options = [] if error.ctx is None else error.ctx.command.get_params(error.ctx)
    by_value = [
        f"{option.opts[0]} {given}"
        for option in options
        if given in getattr(option.type, "names", ())
    ]
    # Without their dashes, which would make any two short names alike: --schedule and --help.
    flags = (flag for option in options for flag in (*option.opts, *option.secondary_opts))
    by_name = {flag.lstrip("-"): flag for flag in flags}
    return by_value or [by_name[name] for name in get_close_matches(given, by_name)]


def _unexpected(error: Exception) -> str:
    # The last frame is where it was raised: in the user's model, or in what that calls.
    place = traceback.extract_tb(error.__traceback__)[-1]
    reason = reason_of(error)[:300]
    return (
        f"{type(error).__name__}: {reason} ({place.filename}:{place.lineno}); "
        "set PIPECOMPILE_DEBUG=1 for the whole trace"
    )


def _complain(message: str, code: int) -> int:
    if is_first_rank():
        # In one line, since logs of CI and of torchrun mix the lines of several processes.
        click.echo(f"pipecompile: {' '.join(message.split())}", err=True)
    return code


def say(text: str) -> None:
    """Print `text` once, however many ranks run."""
    if is_first_rank():
        click.echo(text)


def table_style(form: str) -> DrawTable:
    """Return how tables are drawn: by rich on a terminal, as plain text in pipes, files and on
    GitHub.
    """
    from pipecompile.api.report import plain_table, terminal_table

    return terminal_table if form == "text" and sys.stdout.isatty() else plain_table


def framed(text: str, form: str) -> str:
    """Return `text` as `--format` wants it: GitHub shows what is fenced as it is."""
    return f"```\n{text}\n```" if form == "github" else text


def print_annotation(level: str, path: str, message: str) -> None:
    """Print a workflow command: GitHub shows its message beside the file in a pull request's
    diff.
    """
    # The percent sign begins an escape there, as in %0A for a line break.
    text = message.replace("%", "%25").replace("\n", "%0A")
    click.echo(f"::{level} file={path}::{text}", err=True)
