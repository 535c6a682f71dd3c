"""The command line. Exit codes as diff(1): 0 fine, 1 the answer is no, 2 an error, one line that
says what to do.

Commands call `pipecompile.api` and no phase. What needs PyTorch is imported in the commands, after
their options are checked: a misspelt option is answered at once.
"""

from __future__ import annotations

import warnings

import click

from pipecompile.cli.answers import AnswerGroup
from pipecompile.cli.audit import audit
from pipecompile.cli.check import check
from pipecompile.cli.plans import diff, explain, export, show, simulate, view
from pipecompile.cli.runs import compare
from pipecompile.cli.solvers import partition, schedule
from pipecompile.cli.targets import calibrate, measure_links, plan, profile, verify

__all__ = ["commands", "main"]


def main() -> None:
    """Entry point."""
    # A harmless warning of torch's, about an optional library, must not bury the answer.
    warnings.filterwarnings("ignore", message=".*pynvml.*")
    commands(prog_name="pipecompile")


@click.group(cls=AnswerGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pipecompile")
def commands() -> None:
    """Cuts a PyTorch model into pipeline stages, predicts the step, and proves that it trains the
    same model.
    """


for command in (
    plan,
    profile,
    show,
    view,
    check,
    diff,
    explain,
    simulate,
    export,
    audit,
    compare,
    verify,
    partition,
    schedule,
    measure_links,
    calibrate,
):
    commands.add_command(command)
