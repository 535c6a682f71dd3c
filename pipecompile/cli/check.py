"""The command that checks plans, for people and for CI. Without a target it needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pipecompile.cli.answers import FINE, NO, AnswerCommand, print_annotation
from pipecompile.cli.options import OneOf, format_option, parsed_by
from pipecompile.ir.duration import parse_duration
from pipecompile.ir.finding import CheckedPlan
from pipecompile.ir.plan import RECOMPUTES, Plan
from pipecompile.ir.serialization import encode, read
from pipecompile.ir.share import parse_share
from pipecompile.ir.size import parse_bytes, parse_caps

__all__ = ["check"]


@click.command(cls=AnswerCommand, short_help="Is PLAN sound, and does it fit limits and TARGET?")
@click.argument("arguments", metavar="PLAN... [TARGET]", nargs=-1, required=True)
@click.option(
    "--max-step",
    "max_step_ns",
    metavar="TIME",
    callback=parsed_by(parse_duration),
    help="Longest predicted step, such as 120ms.",
)
@click.option("--max-imbalance", type=float, help="Largest load / mean load, such as 1.1.")
@click.option(
    "--memory",
    "--max-memory",
    "memory_bytes",
    metavar="SIZE",
    callback=parsed_by(parse_caps),
    help="Largest bound of a rank, such as 16GiB, or one for each rank with commas between.",
)
@click.option(
    "--max-bubble",
    metavar="SHARE",
    callback=parsed_by(parse_share),
    help="Idle share of the step, such as 20% or 0.2.",
)
@click.option(
    "--max-relayed",
    "max_relayed_bytes",
    metavar="SIZE",
    callback=parsed_by(parse_bytes),
    help="What stages relay for others for a microbatch, values and gradients, such as 64MiB.",
)
@click.option(
    "--recompute",
    type=OneOf("recompute", RECOMPUTES),
    metavar="NAME",
    help=f"The policy that the plan was to be made by. One of {', '.join(RECOMPUTES)}.",
)
@click.option(
    "--drift",
    metavar="SHARE",
    callback=parsed_by(parse_share),
    help="How much the times of a block of TARGET may differ from the plan's, such as 5%; "
    "measured ones are then measured anew.  [default: 0%, and measured ones are not compared]",
)
@format_option
def check(arguments: Sequence[str], form: str, **limits: Any) -> int:
    """Is each PLAN sound (no deadlock, complete, within limits) and, given TARGET, still current?
    If not: which nodes of the model changed, came and went, and which costs drifted.
    """
    from pipecompile.api.check import check_plan
    from pipecompile.api.factory import Factory

    paths, target = _plans_and_target(arguments)
    factory = None if target is None else Factory.of(target)
    # All plans are checked, also after one that is not sound: one run of CI says all there is.
    checked = [
        CheckedPlan.of(path, check_plan(read(path, Plan), factory, **limits)) for path in paths
    ]
    _print(checked, form)
    return FINE if all(each.sound for each in checked) else NO


def _plans_and_target(arguments: Sequence[str]) -> tuple[Sequence[str], str | None]:
    """Return the paths of plans, and what names a target behind them, if anything does."""
    *paths, last = arguments
    # A missing plan is to be named as a file that cannot be read, and not as a wrong target.
    #     check a.json                 one plan
    #     check a.json b.json          two plans
    #     check a.json nets:unet       a plan, and the factory behind it
    #     check a.json old.plan        two plans, if there is such a file
    is_plan = not paths or last.endswith(".json") or Path(last).is_file()
    return (arguments, None) if is_plan else (paths, last)


def _print(checked: Sequence[CheckedPlan], form: str) -> None:
    """Print what was checked of each plan; JSON has one document, which is a list of several."""
    if form == "json":
        click.echo(encode(checked if len(checked) > 1 else checked[0]), nl=False)
    elif form == "github":
        for each in checked:
            _print_for_github(each)
    else:
        click.echo(_text(checked))


def _text(checked: Sequence[CheckedPlan]) -> str:
    from pipecompile.api.check import findings_text

    if len(checked) == 1:
        return findings_text(checked[0].checks)
    return "\n\n".join(f"{each.plan}\n{findings_text(each.checks)}" for each in checked)


def _print_for_github(checked: CheckedPlan) -> None:
    """Print the list to standard output, which a workflow adds to the page of the run, and
    annotations to standard error, where a workflow's runner reads them too.
    """
    from pipecompile.api.check import findings_headline, findings_markdown

    click.echo(findings_markdown(checked.plan, checked.checks))
    for finding in checked.findings:
        print_annotation("error", checked.plan, finding.message)
    if checked.sound:
        print_annotation("notice", checked.plan, findings_headline(checked.checks))
