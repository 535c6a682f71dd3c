"""How a command answers: its exit code, errors in one line, and text printed once."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from pipecompile.errors import InfeasibleError, PipecompileError, StalePlanError, StaleProfileError
from pipecompile.ir.serialization import encode

__all__ = ["FINE", "NO", "answers", "framed", "is_first_rank", "print_findings", "say"]

FINE, NO, ERROR = 0, 1, 2


def answers(command: Callable[..., int]) -> Callable[..., None]:
    """Exits with what `command` returns; an error of ours becomes one line on standard error."""

    @wraps(command)
    def run(**options: Any) -> None:
        try:
            code = command(**options)
        except (InfeasibleError, StalePlanError, StaleProfileError) as error:
            code = _complain(error, NO)
        except PipecompileError as error:
            code = _complain(error, ERROR)
        except click.exceptions.ClickException:
            raise
        except Exception as error:  # the user's model or loss, or a defect of ours: never exit 1, which is an answer
            if "PIPECOMPILE_DEBUG" in os.environ:
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename}:{place.lineno}"
            reason = str(error).strip().split("\n")[0][:300]
            text = f"{type(error).__name__}: {reason} ({where}); set PIPECOMPILE_DEBUG=1 for the whole trace"
            code = _complain(PipecompileError(text), ERROR)
        sys.stdout.flush()
        raise SystemExit(code)

    return run


def _complain(error: PipecompileError, code: int) -> int:
    if is_first_rank():
        click.echo(f"pipecompile: {' '.join(str(error).split())}", err=True)
    return code


def is_first_rank() -> bool:
    """Whether this process speaks for all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Prints once, however many ranks run."""
    if is_first_rank():
        click.echo(text)


def framed(text: str, form: str) -> str:
    """`text` as `--format` wants it: GitHub shows it as it is within a fence."""
    return f"```\n{text}\n```" if form == "github" else text


def print_findings(path: str, found: Sequence[str], form: str) -> None:
    """What is wrong with a file, or that it is sound."""
    if form == "json":
        click.echo(encode({"plan": path, "sound": not found, "findings": list(found)}), nl=False)
    elif form == "github":
        click.echo(
            "\n".join(f"::error file={path}::{line}" for line in found)
            or f"::notice file={path}::sound"
        )
    else:
        click.echo("\n".join(found) or "sound")
