"""The command line. Exit codes as diff(1): 0 fine, 1 the answer is no, 2 an error, one line that says what to do."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import click

from pipecompile.cli.answers import FINE, NO, answers, framed, is_first_rank, print_findings, say
from pipecompile.cli.options import (
    COSTS_HELP,
    OPTIMIZER_HELP,
    format_option,
    given_options,
    granularity_option,
    leaf_option,
    planning_options,
    self_check_option,
)
from pipecompile.errors import InputError
from pipecompile.ir.plan import RECOMPUTES, Plan
from pipecompile.ir.serialization import check_writable, encode, read, write
from pipecompile.ir.size import parse_budget

__all__ = ["commands", "main"]


def main() -> None:
    """Entry point."""
    # A harmless warning of torch's, about an optional library, must not bury the answer.
    warnings.filterwarnings("ignore", message=".*pynvml.*")
    commands(prog_name="pipecompile")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pipecompile")
def commands() -> None:
    """Cuts a PyTorch model into pipeline stages, predicts the step, and proves that it trains the same model."""


@commands.command()
@click.argument("target")
@planning_options
@click.option("-o", "--output", help="Where to write the plan.")
@format_option
@answers
def plan(target: str, output: str | None, form: str, **options: Any) -> int:
    """Capture, cost, cut and schedule TARGET (package.module:factory or path/file.py:factory)."""
    from pipecompile.api.capture import capture_target
    from pipecompile.api.planning import make_plan
    from pipecompile.api.links import links_for
    from pipecompile.api.options import options_for
    from pipecompile.api.target import load_target, made_with

    check_writable(output)
    subject = load_target(target)
    given = options.pop("links")
    checked = options.pop("self_check")
    chosen = options_for(subject, **given_options(options))
    links = links_for(chosen, given)
    made = make_plan(subject, chosen, capture_target(subject, chosen, verify=checked), links)
    if output is not None:
        write(output, encode(made))
    _print_plan(made, form)
    # Not part of the plan's bytes: told beside it.
    click.echo(made_with(subject), err=True)
    return FINE


@commands.command()
@click.argument("target")
@click.option("--costs", default="measured", show_default=True, help=COSTS_HELP)
@click.option(
    "--microbatches", type=int, default=4, show_default=True, help="As the plan will have."
)
@click.option("--optimizer", help=OPTIMIZER_HELP)
@click.option("-o", "--output", help="Where to write the cost graph, for --costs table:FILE.")
@click.option("--page", help="Where to write the page (HTML, one file).")
@leaf_option
@self_check_option
@format_option
@answers
def profile(target: str, output: str | None, page: str | None, form: str, **options: Any) -> int:
    """Where time and memory of a microbatch of TARGET go, by module, operator and node; its cost graph."""
    from pipecompile.api.profile import profiled
    from pipecompile.api.target import load_target, made_with
    from pipecompile.report.page import profile_page
    from pipecompile.report.profile import profile_figures, profile_text

    check_writable(output, page)
    subject = load_target(target)
    graph, found = profiled(subject, **options)
    if page is not None:
        write(page, profile_page(target, found).encode())
    if output is not None:  # last: where it lies, all went well
        write(output, encode(graph))
    if form == "json":
        click.echo(encode(profile_figures(found)), nl=False)
    else:
        click.echo(framed(profile_text(found).rstrip(), form))
    click.echo(made_with(subject), err=True)
    return FINE


@commands.command()
@click.argument("path", metavar="PLAN")
@format_option
@answers
def show(path: str, form: str) -> int:
    """The plan for people: stages, loads, memory, timeline."""
    _print_plan(_read_plan(path), form)
    return FINE


@commands.command()
@click.argument("path", metavar="PLAN")
@click.option("-o", "--output", required=True, help="Where to write the page (HTML, one file).")
@answers
def view(path: str, output: str) -> int:
    """The plan as a page: timeline, memory of ranks by kind and budget, what stages compute again."""
    from pipecompile.report.view import plan_page
    from pipecompile.schedule.simulator import simulate_plan

    check_writable(output)
    made = _read_plan(path)
    write(output, plan_page(made, simulate_plan(made)).encode())
    return FINE


def _read_plan(path: str) -> Plan:
    """The plan; standard error says if it is not sound, for then its figures are not to be trusted."""
    from pipecompile.api.soundness import violations

    made = read(path, Plan)
    found = violations(made)
    if found:
        click.echo(f"pipecompile: {path} is not sound: {found[0]}; see pipecompile check", err=True)
    return made


def _print_plan(made: Plan, form: str) -> None:
    from pipecompile.report.text import summary, timeline_text
    from pipecompile.schedule.simulator import simulate_plan

    if form == "json":
        click.echo(encode(made), nl=False)
        return
    text = f"{summary(made)}\n{timeline_text(simulate_plan(made))}"
    click.echo(framed(text, form))


@commands.command()
@click.argument("path", metavar="PLAN")
@click.argument("target", required=False)
@click.option("--max-imbalance", type=float, help="Largest load / mean load, such as 1.1.")
@click.option(
    "--memory",
    "--max-memory",
    help="Largest bound of a rank, such as 16GiB, or one a rank with commas.",
)
@click.option("--max-bubble", type=float, help="Idle share of the step, such as 0.2.")
@click.option(
    "--recompute", type=click.Choice(RECOMPUTES), help="The policy that the plan was to be made by."
)
@format_option
@answers
def check(path: str, target: str | None, form: str, **limits: Any) -> int:
    """Is PLAN sound (deadlock-free, complete, within its limits) and, given TARGET, still current?"""
    from pipecompile.api.soundness import over_limits, violations

    made = read(path, Plan)
    memory = limits["memory"]
    found = violations(made) + over_limits(
        made,
        max_imbalance=limits["max_imbalance"],
        memory_bytes=None if memory is None else parse_budget(memory),
        max_bubble=limits["max_bubble"],
        recompute=limits["recompute"],
    )
    if target is not None:
        found += _staleness(made, target)
    print_findings(path, found, form)
    return NO if found else FINE


def _staleness(made: Plan, target: str) -> list[str]:
    from pipecompile.api.staleness import staleness
    from pipecompile.api.costs import comparable
    from pipecompile.api.target import load_target

    costs = made.options.costs
    if not comparable(costs):
        click.echo(
            f"{costs} costs are not compared: they differ from run to run, or are not at hand here",
            err=True,
        )
    return staleness(made, load_target(target))


@commands.command()
@click.argument("path", metavar="PLAN")
@click.option("--trace", "trace_path", help="Write a trace for Perfetto (Chrome JSON).")
@click.option("--svg", "svg_path", help="Write the timeline as a picture.")
@format_option
@answers
def simulate(path: str, trace_path: str | None, svg_path: str | None, form: str) -> int:
    """Simulate one step of PLAN: when each rank does what, why it waits, and what decides how long it takes."""
    from pipecompile.report.step import step_figures, step_text
    from pipecompile.report.svg import timeline_svg
    from pipecompile.report.trace import trace
    from pipecompile.schedule.critical_path import critical_path
    from pipecompile.schedule.simulator import simulate_plan
    from pipecompile.schedule.stages import problem_of_plan

    check_writable(trace_path, svg_path)
    made = _read_plan(path)
    timeline = simulate_plan(made)
    if trace_path is not None:
        write(trace_path, trace(made, timeline))
    if svg_path is not None:
        write(svg_path, timeline_svg(made, timeline).encode())
    critical = critical_path(problem_of_plan(made), timeline)
    if form == "json":
        click.echo(encode(step_figures(timeline, critical)), nl=False)
        return FINE
    text = step_text(timeline, critical)
    click.echo(framed(text, form))
    return FINE


@commands.command()
@click.argument("path", metavar="GRAPH")
@click.option("-k", "k", type=int, required=True, help="Number of stages.")
@click.option(
    "--objective", default="variance", show_default=True, help="variance, max-load or step-time."
)
@click.option(
    "--memory", help="Cap of each rank, such as 16GiB, or one a rank with commas between."
)
@click.option(
    "--bandwidth", type=float, help="Bytes per second between ranks; without it transfers are free."
)
@click.option("--latency", type=int, default=0, help="Nanoseconds of each transfer besides.")
@click.option(
    "--links", help="File with bandwidth and latency from rank to rank, instead of one for all."
)
@click.option(
    "--comm", default="endpoint", show_default=True, help="endpoint, relay, overlap or none."
)
@click.option(
    "--schedule",
    help="1f1b or gpipe: how many microbatches a stage holds, and what step-time simulates.",
)
@click.option("--microbatches", type=int, help="Microbatches per step.")
@click.option(
    "--state-factor", default="1", show_default=True, help="Memory per byte of parameters."
)
@click.option(
    "--stages-per-rank", type=int, default=1, show_default=True, help="Stages that share a rank."
)
@click.option("--placement", type=click.Choice(["loop", "v"]), default="loop", show_default=True)
@click.option("--speeds", help="How fast each rank is, such as 1,1,0.5.")
@click.option("--ranks", type=int, help="Ranks in all: stages may run on several, data-parallel.")
@click.option(
    "--pin", multiple=True, metavar="NODE=STAGE", help="Fix the stage of a node (-1: the last)."
)
@click.option("--no-split", multiple=True, metavar="NODE[,…]", help="Keep nodes on one stage.")
@click.option(
    "--parameters-everywhere", is_flag=True, help="Each stage has a node with parameters."
)
@granularity_option
@click.option(
    "--time-limit",
    type=float,
    default=10.0,
    show_default=True,
    help="Seconds of work, counted in steps.",
)
@format_option
@answers
def partition(path: str, form: str, **options: Any) -> int:
    """Cut a cost graph into stages: the partitioner alone."""
    from pipecompile.api.cut import Request, given_links
    from pipecompile.api.cut import partition as cut
    from pipecompile.report.cut import cut_text

    seconds, given = options.pop("time_limit"), given_options(options)
    links = given_links(given.pop("links"), given.pop("bandwidth"), given.pop("latency"))
    found = cut(
        path, Request(links=links, communication=given.pop("comm"), **given), seconds=seconds
    )
    if form == "json":
        click.echo(encode(found), nl=False)
    else:
        text = cut_text(found)
        click.echo(framed(text, form))
    return FINE


@commands.command()
@click.argument("path", metavar="PROBLEM")
@click.option(
    "--name",
    default="search",
    show_default=True,
    help="search, or a schedule such as 1f1b, zb-h1 or zb-v.",
)
@click.option(
    "--objective",
    default="makespan",
    show_default=True,
    help="makespan, or span: a rank's start to its end.",
)
@click.option("--placement", help="linear, loop, v or open, instead of the ranks in PROBLEM.")
@click.option(
    "--time-limit",
    type=float,
    default=5.0,
    show_default=True,
    help="Seconds of work, counted in steps.",
)
@click.option(
    "--order", help="CSV of torch's with an order to check and simulate, instead of making one."
)
@click.option("--csv", "csv_path", help="Write the order for torch, if it fits.")
@click.option("--svg", "svg_path", help="Write the timeline as a picture, if the order fits.")
@format_option
@answers
def schedule(
    path: str,
    csv_path: str | None,
    svg_path: str | None,
    time_limit: float,
    form: str,
    **options: Any,
) -> int:
    """Order the work of stages on ranks: the scheduler alone."""
    from pipecompile.report.order import order_text, order_title
    from pipecompile.report.svg import picture
    from pipecompile.schedule.request import ScheduleRequest, answer
    from pipecompile.schedule.torch_csv import write_csv

    check_writable(csv_path, svg_path)
    found = answer(path, ScheduleRequest(seconds=time_limit, **options))
    order, files = found.order, dict[str, str]()
    if csv_path is not None and found.skips:
        raise InputError(
            "torch's runtime sends to the next stage only, so an order with skips has no CSV; drop --csv"
        )
    if csv_path is not None and order.fits:
        files[csv_path] = write_csv(found.schedule)
    if svg_path is not None and order.fits:
        files[svg_path] = picture(order_title(order), found.timeline)
    for name, content in files.items():  # all of them can be made before one is written
        write(name, content.encode())
    if form == "json":
        click.echo(encode(order), nl=False)
    else:
        text = order_text(order, found.timeline)
        click.echo(framed(text, form))
    return FINE if order.fits else NO


@commands.command("links")
@click.option("-o", "--output", help="Where to write the links, for plan, verify and partition.")
@format_option
@answers
def measure_links(output: str | None, form: str) -> int:
    """Measure bandwidth and latency between the ranks that torchrun started."""
    from pipecompile.api.links import probe_links
    from pipecompile.report.links import links_table

    output = output if is_first_rank() else None
    check_writable(output)
    found = probe_links()
    if output is not None:
        write(output, encode(found))
    text = encode(found).decode().rstrip() if form == "json" else links_table(found)
    say(framed(text, form))
    return FINE


@commands.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("-o", "--output", help="Where to write the device, for --costs roofline:FILE.")
@format_option
@answers
def calibrate(device: Literal["cpu", "cuda"], output: str | None, form: str) -> int:
    """Measure a few dozen operators on the device at hand, and fit the roofline that predicts them best."""
    from pipecompile.profiling.calibration import calibrate as measure
    from pipecompile.profiling.calibration import calibration_text

    check_writable(output)
    found = measure(device)
    if output is not None:
        write(output, encode(found.device))
    if form == "json":
        click.echo(encode(found.device), nl=False)
    else:
        text = calibration_text(found)
        click.echo(framed(text, form))
    return FINE


@commands.command()
@click.argument("target")
@planning_options
@format_option
@answers
def verify(target: str, form: str, **options: Any) -> int:
    """Train one seeded step of TARGET as a pipeline and unsplit, and compare every gradient and buffer.

    Under torchrun the stages run on its ranks.
    """
    from pipecompile.api.target import load_target
    from pipecompile.api.verify import verify as compare
    from pipecompile.cli.verdict import figures, text

    made, comparisons = compare(load_target(target), **given_options(options))
    if form == "json":
        say(encode(figures(comparisons)).decode().rstrip())
    else:
        say(framed(text(target, made, comparisons), form))
    return FINE if all(comparison.passed for comparison in comparisons) else NO
