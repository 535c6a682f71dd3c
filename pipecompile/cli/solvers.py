"""The partitioner and the scheduler alone, on files. They need no PyTorch."""

from __future__ import annotations

import logging
from typing import Any, Literal

import click

from pipecompile.cli.answers import FINE, NO, AnswerCommand, framed, table_style
from pipecompile.cli.options import LOWERCASE, format_option, plan_option
from pipecompile.ir.serialization import check_writable, encode, write

__all__ = ["partition", "schedule"]

logger = logging.getLogger("pipecompile.cli")
CutObjective = Literal["variance", "max-load", "step-time"]


@click.command(cls=AnswerCommand, short_help="The partitioner alone: cut a cost graph.")
@click.argument("path", metavar="GRAPH")
@plan_option("k", default_text="any, with --ranks and max-load")
@plan_option(
    "objective",
    type=CutObjective,
    default="variance",
    help="What the cut minimises: the variance of the loads, the largest load, or the simulated "
    "step.",
)
@plan_option("memory", default_text="no cap")
@click.option(
    "--bandwidth", type=float, help="Bytes per second between ranks; without it transfers are free."
)
@click.option(
    "--latency", type=int, default=0, show_default=True, help="Nanoseconds of each transfer."
)
@plan_option("links")
@click.option(
    "--comm",
    type=LOWERCASE,
    default="endpoint",
    show_default=True,
    metavar="NAME",
    help="Who pays for a transfer. One of endpoint, relay, overlap, none.",
)
@click.option(
    "--schedule",
    type=LOWERCASE,
    metavar="NAME",
    help="1f1b or gpipe: how many microbatches are in flight, and what step-time simulates.",
)
@plan_option("microbatches", help="Microbatches of a step.", default_text="1 is in flight")
@click.option(
    "--state-factor", default="1", show_default=True, help="Bytes held for each byte of parameters."
)
@plan_option("stages_per_rank", default=1)
@plan_option("placement", default="loop")
@click.option("--speeds", help="How fast each rank is, such as 1,1,0.5.")
@plan_option("ranks", help="Ranks in all: stages may run on several, data-parallel.")
@plan_option("pin")
@plan_option("no_split", metavar="NODE[,…]", help="Keep nodes together on one stage.")
@plan_option("parameters_everywhere")
@plan_option("granularity")
@click.option(
    "--time-limit",
    type=float,
    default=10.0,
    show_default=True,
    help="Seconds of work, counted in steps.",
)
@format_option
def partition(
    path: str,
    k: int | None,
    form: str,
    links: str | None,
    bandwidth: float | None,
    latency: int,
    comm: str,
    time_limit: float,
    **options: Any,
) -> int:
    """Cut a cost graph, which `profile -o` or another tool wrote, into stages: the partitioner
    alone. GRAPH may also be a profile of PipeDream's profiler.
    """
    from pipecompile.api.partition_file import (
        CutRequest,
        links_from_options,
        partition_over_ranks,
    )
    from pipecompile.api.partition_file import partition as cut
    from pipecompile.api.report import cut_text

    # Two ways to say the same: a file with a link for each pair, or one link for all of them.
    connected = links_from_options(links, bandwidth, latency)
    request = CutRequest(k=1 if k is None else k, links=connected, communication=comm, **options)
    search = cut if k is not None else partition_over_ranks
    # Without -k the number of stages is searched too, which is another search. `k=1` in the
    # request only stands in: that search does not read it.
    result = search(path, request, seconds=time_limit)
    click.echo(
        encode(result).decode().rstrip()
        if form == "json"
        else framed(cut_text(result, table_style(form)), form)
    )
    return FINE


@click.command(cls=AnswerCommand, short_help="The scheduler alone: order the work of stages.")
@click.argument("path", metavar="PROBLEM_OR_PLAN")
@click.option(
    "--name",
    type=LOWERCASE,
    default="search",
    show_default=True,
    metavar="NAME",
    help="search, or a schedule such as 1f1b, zb-h1 or zb-v.",
)
@click.option(
    "--objective",
    type=LOWERCASE,
    default="makespan",
    show_default=True,
    metavar="NAME",
    help="makespan, or span: from a rank's start to its end.",
)
@click.option(
    "--placement",
    type=LOWERCASE,
    metavar="NAME",
    help="linear, loop, v or open, instead of the ranks in the file.",
)
@click.option(
    "--time-limit",
    type=float,
    default=5.0,
    show_default=True,
    help="Seconds of work, counted in steps.",
)
@click.option(
    "--order",
    metavar="FILE",
    help="CSV of torch's with an order to check and simulate, instead of making one.",
)
@click.option("--csv", "csv_path", metavar="FILE", help="Write the order for torch, if it fits.")
@click.option(
    "--svg", "svg_path", metavar="FILE", help="Write the timeline as a picture, if the order fits."
)
@format_option
def schedule(
    path: str,
    csv_path: str | None,
    svg_path: str | None,
    time_limit: float,
    form: str,
    **options: Any,
) -> int:
    """Order the work of stages on ranks: the scheduler alone, on the stages of a plan, or on a
    schedule problem (a file that you write, see docs/how-to/alone.md).
    """
    from pipecompile.api.schedule import csv_of, order_for, order_picture, order_text

    check_writable(csv_path, svg_path)
    answer = order_for(path, seconds=time_limit, **options)
    # Both can be made before one is written.
    csv = None if csv_path is None else csv_of(answer)
    svg = None if svg_path is None or not answer.order.fits else order_picture(answer)
    for name, content in ((csv_path, csv), (svg_path, svg)):
        if name is not None and content is not None:
            write(name, content.encode())
            logger.info("wrote %s", name)
    click.echo(
        encode(answer.order).decode().rstrip()
        if form == "json"
        else framed(order_text(answer, table_style(form)), form)
    )
    return FINE if answer.order.fits else NO
