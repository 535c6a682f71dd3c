"""The commands that read a plan and say what is in it. None of them needs PyTorch."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from pipecompile.cli.answers import (
    FINE,
    NO,
    AnswerCommand,
    framed,
    print_annotation,
    table_style,
)
from pipecompile.cli.options import format_option
from pipecompile.ir.explanation import TIME_LIMIT, ExplainedPlan
from pipecompile.ir.plan import LAYOUT_FORMATS, Plan
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.ir.serialization import check_writable, encode, read, write

__all__ = ["diff", "explain", "export", "print_plan", "show", "simulate", "view"]

logger = logging.getLogger("pipecompile.cli")


@click.command(cls=AnswerCommand, short_help="The plan for people: stages, loads, memory.")
@click.argument("path", metavar="PLAN")
@format_option
def show(path: str, form: str) -> int:
    """The plan for people: stages, loads, memory, timeline."""
    print_plan(_read_plan(path), form)
    return FINE


def print_plan(plan: Plan, form: str) -> None:
    """Print `plan` in the form that `--format` asks for."""
    from pipecompile.api.report import text_of

    if form == "json":
        click.echo(encode(plan), nl=False)
    else:
        click.echo(framed(text_of(plan, table_style(form)), form))


def _read_plan(path: str) -> Plan:
    """Return the plan; a warning if it is not sound, because its figures are then not to be
    trusted.
    """
    from pipecompile.api.soundness import findings

    plan = read(path, Plan)
    faults = findings(plan)
    if faults:
        logger.warning(
            "%s is not sound: %s; see pipecompile check %s", path, faults[0].message, path
        )
    return plan


@click.command(cls=AnswerCommand, short_help="The plan as a page.")
@click.argument("path", metavar="PLAN")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    help="Where to write the page (HTML, one file).",
)
@click.option("--run", "run_path", metavar="RUN", help="A recorded run, beside the prediction.")
@click.option("--against", metavar="OLD", help="Another plan: what differs from it.")
def view(path: str, output: str, run_path: str | None, against: str | None) -> int:
    """The plan as a page: timeline, memory of ranks over the step and at its peak, the model by
    stage, what stages recompute.
    """
    from pipecompile.api.report import page_of

    check_writable(output)
    plan = _read_plan(path)
    # All files are read before the page is made, which takes seconds: a path that is misspelt is
    # answered at once.
    run = None if run_path is None else read(run_path, RecordedRun)
    old = None if against is None else (Path(against).name, read(against, Plan))
    write(output, page_of(plan, run=run, against=old).encode())
    logger.info("wrote %s: open it in a browser", output)
    return FINE


@click.command(cls=AnswerCommand, short_help="What differs between two plans.")
@click.argument("old_path", metavar="OLD")
@click.argument("new_path", metavar="NEW")
@format_option
def diff(old_path: str, new_path: str, form: str) -> int:
    """What differs between the plans OLD and NEW: step, memory and loads, what moved to another
    stage, recompute, schedule, options, model and costs. Exit code 1 if anything does.
    """
    from pipecompile.api import diff as api

    # Unlike the other commands, this one does not look whether the plans are sound: that takes
    # seconds for large plans, and `check` says it of a plan in a pull request.
    found = api.diff(read(old_path, Plan), read(new_path, Plan))
    if form == "json":
        click.echo(encode(api.ComparedPlans.of(old_path, new_path, found)), nl=False)
    elif form == "github":
        click.echo(api.diff_markdown(found, f"{old_path} → {new_path}"))
        print_annotation("notice", new_path, api.diff_headline(found))
    else:
        click.echo(api.diff_text(found, table_style(form)))
    return FINE if found.same else NO


@click.command(cls=AnswerCommand, short_help="Why the step is as long as it is, and what helps.")
@click.argument("path", metavar="PLAN")
@click.argument("target", required=False)
@click.option(
    "--time-limit",
    type=float,
    default=TIME_LIMIT,
    show_default=True,
    help="Seconds after which no other change is begun.",
)
@format_option
def explain(path: str, target: str | None, time_limit: float, form: str) -> int:
    """Why the step of PLAN takes as long as it does: the heaviest rank and what holds it, memory,
    and why ranks wait. With TARGET, the model or its cost graph (a .json that profile wrote), what
    would change it: the plan is made again with one thing changed at a time.
    """
    from pipecompile.api import explain as api

    # Taken at its word, as by `diff`: whether a plan is sound takes longer to see.
    found = api.explain(read(path, Plan), target, time_limit=time_limit)
    if form == "json":
        click.echo(encode(ExplainedPlan.of(path, found)), nl=False)
    elif form == "github":
        click.echo(api.explanation_markdown(found, path))
        print_annotation("notice", path, api.explanation_headline(found))
    else:
        click.echo(api.explanation_text(found, path, table_style(form)))
    return FINE


@click.command(cls=AnswerCommand, short_help="When each rank does what, and why it idles.")
@click.argument("path", metavar="PLAN")
@click.option(
    "--trace", "trace_path", metavar="FILE", help="Write a trace for Perfetto (Chrome JSON)."
)
@click.option("--svg", "svg_path", metavar="FILE", help="Write the timeline as a picture.")
@format_option
def simulate(path: str, trace_path: str | None, svg_path: str | None, form: str) -> int:
    """Simulate one step of PLAN: when each rank does what, why it waits, and what decides how long
    it takes.
    """
    from pipecompile.api.report import picture_of, step_figures_of, step_text_of, trace_of

    check_writable(trace_path, svg_path)
    plan = _read_plan(path)
    if trace_path is not None:
        write(trace_path, trace_of(plan))
        logger.info("wrote %s: open it in ui.perfetto.dev", trace_path)
    if svg_path is not None:
        write(svg_path, picture_of(plan).encode())
        logger.info("wrote %s", svg_path)
    if form == "json":
        click.echo(encode(step_figures_of(plan)), nl=False)
    else:
        click.echo(framed(step_text_of(plan, table_style(form)), form))
    return FINE


@click.command(cls=AnswerCommand, short_help="The cut of PLAN in the words of another framework.")
@click.argument("path", metavar="PLAN")
@click.option(
    "--to",
    required=True,
    metavar="FORMAT",
    help=f"One of {', '.join((*LAYOUT_FORMATS, 'torch-csv'))} (the schedule, for torch).",
)
@click.option("--round", "rounded", is_flag=True, help="Round a cut that the format cannot say.")
@click.option(
    "--layers",
    metavar="MODULE",
    help="The list of modules that are the layers.  [default: that of the plan, or found]",
)
@click.option("-o", "--output", metavar="FILE", help="Where to write it, instead of printing it.")
def export(path: str, to: str, rounded: bool, layers: str | None, output: str | None) -> int:
    """The cut of PLAN as a layout for Megatron-LM, torchtitan, torch, Hugging Face, vLLM or SGLang,
    or its schedule for torch. Read back with plan --layout, all that the format names lies in the
    stages that it had.
    """
    from pipecompile.api.layouts import cost_text, export_of

    check_writable(output)
    plan = _read_plan(path)
    # What rounding costs is a warning and no error: who gives --round knows that it moves
    # something, but not how much.
    exported = export_of(plan, to, layers, rounded=rounded)
    if exported.moved:
        logger.warning("%s", cost_text(plan, exported))
    if output is None:
        click.echo(exported.text.rstrip())
    else:
        write(output, f"{exported.text.rstrip()}\n".encode())
        logger.info("wrote %s", output)
    return FINE
