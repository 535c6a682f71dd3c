"""The command that reads a recorded run. It needs no PyTorch."""

from __future__ import annotations

import logging

import click

from pipecompile.cli.answers import FINE, AnswerCommand, framed, table_style
from pipecompile.cli.options import format_option
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.ir.serialization import check_writable, encode, read, write

__all__ = ["compare"]

logger = logging.getLogger("pipecompile.cli")


@click.command(cls=AnswerCommand, short_help="Predicted against measured, action by action.")
@click.argument("path", metavar="PLAN")
@click.argument("run_path", metavar="RUN")
@click.option("--page", metavar="FILE", help="Where to write the page (HTML, one file).")
@click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    help="Write the recorded step of median length as a trace for Perfetto (Chrome JSON).",
)
@format_option
def compare(path: str, run_path: str, page: str | None, trace_path: str | None, form: str) -> int:
    """Predicted against measured: PLAN and a RUN of it that `Pipeline.record()` wrote, by kind of
    action, stage and rank, and the ten actions that differ most.
    """
    from pipecompile.api.comparison import (
        comparison_figures,
        comparison_of,
        comparison_text,
        run_page,
        run_trace,
    )

    check_writable(page, trace_path)
    # Compared before anything is written: a run of another plan must leave no page behind.
    comparison = comparison_of(read(path, Plan), read(run_path, RecordedRun))
    if trace_path is not None:
        write(trace_path, run_trace(comparison))
        logger.info("wrote %s: open it in ui.perfetto.dev", trace_path)
    if page is not None:
        write(page, run_page(comparison).encode())
        logger.info("wrote %s: open it in a browser", page)
    if form == "json":
        click.echo(encode(comparison_figures(comparison)), nl=False)
    else:
        click.echo(framed(comparison_text(comparison, table_style(form)).rstrip(), form))
    return FINE
