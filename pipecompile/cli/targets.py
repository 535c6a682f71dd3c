"""The commands that run a model or measure a device. They import PyTorch after their options are
checked.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import click

from pipecompile.cli.answers import FINE, NO, AnswerCommand, framed, say, table_style
from pipecompile.cli.options import OneOf, format_option, plan_option, planning_options
from pipecompile.cli.plans import print_plan
from pipecompile.cli.ranks import is_first_rank
from pipecompile.ir.options import JOINT_SEARCH
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.ir.serialization import check_writable, encode, read, write

__all__ = ["calibrate", "measure_links", "plan", "profile", "verify"]

logger = logging.getLogger("pipecompile.cli")


@click.command(cls=AnswerCommand, short_help="Capture, cost, cut and schedule TARGET.")
@click.argument("target")
@planning_options()
@click.option("-o", "--output", metavar="FILE", help="Where to write the plan.")
@format_option
def plan(target: str, output: str | None, form: str, **options: Any) -> int:
    """Capture, cost, cut and schedule TARGET (package.module:factory or path/file.py:factory)."""
    from pipecompile.api.factory import Factory
    from pipecompile.api.links import links_for
    from pipecompile.api.plan_request import plan_request

    check_writable(output)
    factory = Factory.of(target)
    self_check, links_from_options = options.pop("self_check"), options.pop("links")
    # What is checked before PyTorch is imported, which takes seconds, and what needs it:
    #     output    can be written            ┐
    #     target    module or file is there   │ at once
    #     options   names, numbers, files     ┘
    #     the factory is called, the model captured, proven, costed and cut
    request: Any = None
    if options["devices"] is not None:
        from pipecompile.api.joint_request import joint_request

        request = joint_request(links=links_from_options, **options)
    else:
        requested = plan_request(**options)
        links = links_for(requested.options, links_from_options)
    # Only now is PyTorch imported.
    from pipecompile.api.joint_plan import joint_plan_of
    from pipecompile.api.open_setting import plan_of
    from pipecompile.api.plan import with_target
    from pipecompile.api.target import made_with, target_of

    subject = target_of(factory)
    if request is not None:
        made = joint_plan_of(subject, request, self_check=self_check)
    else:
        made = plan_of(subject, requested, links, self_check=self_check)
    result = with_target(made, target)
    if output is not None:
        # Before it is printed: if the reader of standard output has gone (`| head`), the file is
        # there all the same.
        write(output, encode(result))
        logger.info("wrote %s", output)
    print_plan(result, form)
    # The plan's bytes do not depend on these, so they are said beside it.
    logger.info(made_with(subject))
    return FINE


@click.command(cls=AnswerCommand, short_help="Where time and memory of TARGET go, by module.")
@click.argument("target")
@plan_option("costs")
@plan_option("microbatches", default=4)
@plan_option("optimizer")
@click.option(
    "-o", "--output", metavar="FILE", help="Where to write the cost graph, for --costs table:FILE."
)
@click.option("--page", metavar="FILE", help="Where to write the page (HTML, one file).")
@plan_option("leaf")
@plan_option("self_check")
@format_option
def profile(
    target: str,
    output: str | None,
    page: str | None,
    form: str,
    self_check: bool,
    **options: Any,
) -> int:
    """Where time and memory of a microbatch of TARGET go, by module, operator and node; its cost
    graph.
    """
    from pipecompile.api.choices import requested_options
    from pipecompile.api.factory import Factory

    check_writable(output, page)
    factory = Factory.of(target)
    # A profile has no stages. k=1 lets the same checks of options serve here.
    requested = requested_options(k=1, **options)
    # Only now is PyTorch imported.
    from pipecompile.api.profile import profiled
    from pipecompile.api.report import profile_figures, profile_page, profile_text
    from pipecompile.api.target import made_with, target_of

    subject = target_of(factory)
    graph, result = profiled(subject, requested, self_check=self_check)
    if page is not None:
        write(page, profile_page(target, result).encode())
        logger.info("wrote %s: open it in a browser", page)
    if output is not None:  # last: if it is there, all went well
        write(output, encode(graph))
        logger.info("wrote %s: use it with --costs table:%s", output, output)
    if form == "json":
        click.echo(encode(profile_figures(result)), nl=False)
    else:
        click.echo(framed(profile_text(result, table_style(form)).rstrip(), form))
    logger.info(made_with(subject))
    return FINE


@click.command(cls=AnswerCommand, short_help="Does a pipeline train TARGET as unsplit?")
@click.argument("target")
@planning_options(without=JOINT_SEARCH, costs={"default": "flops"})
@format_option
def verify(target: str, form: str, **options: Any) -> int:
    """Train one seeded step of TARGET as a pipeline and unsplit, and compare every gradient and
    buffer; for inference, evaluate it both ways and compare every output.

    Under torchrun the stages run on its ranks.
    """
    from pipecompile.api.choices import requested_options
    from pipecompile.api.factory import Factory
    from pipecompile.api.links import links_for

    factory = Factory.of(target)
    choices = {
        name: value for name, value in options.items() if name not in ("links", "self_check")
    }
    # The results are not used: this only finds mistakes before PyTorch is imported.
    links_for(requested_options(**choices), options["links"])
    # Only now is PyTorch imported.
    from pipecompile.api.target import target_of
    from pipecompile.api.verification import verify as compare
    from pipecompile.cli.verdict import figures, text

    compared_plan, comparisons = compare(target_of(factory), **options)
    if form == "json":
        say(encode(figures(comparisons)).decode().rstrip())
    else:
        say(framed(text(target, compared_plan, comparisons), form))
    return FINE if all(comparison.passed for comparison in comparisons) else NO


@click.command("links", cls=AnswerCommand, short_help="Measure the links between ranks.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to write the links, for plan, verify and partition.",
)
@format_option
def measure_links(output: str | None, form: str) -> int:
    """Measure bandwidth and latency between the ranks that torchrun started."""
    from pipecompile.api.links import probe_links
    from pipecompile.api.report import links_table

    # All ranks measure, and get the same links; one of them writes the file.
    output = output if is_first_rank() else None
    check_writable(output)
    links = probe_links()
    if output is not None:
        write(output, encode(links))
        logger.info("wrote %s: use it with --links %s", output, output)
    text = (
        encode(links).decode().rstrip() if form == "json" else links_table(links, table_style(form))
    )
    say(framed(text, form))
    return FINE


@click.command(cls=AnswerCommand, short_help="Fit a device to operators that are timed here.")
@click.option(
    "--device",
    type=OneOf("device", ("cpu", "cuda")),
    default="cpu",
    show_default=True,
    metavar="DEVICE",
    help="cpu or cuda.",
)
@click.option(
    "--run",
    nargs=2,
    metavar="PLAN RUN",
    help="Instead: correct the device of PLAN so that it predicts the compute of RUN.",
)
@click.option(
    "-o", "--output", metavar="FILE", help="Where to write the device, for --costs roofline:FILE."
)
@format_option
def calibrate(
    device: Literal["cpu", "cuda"], run: tuple[str, str] | None, output: str | None, form: str
) -> int:
    """Measure a few dozen operators on the device at hand, and fit the roofline that predicts them
    best. With --run, correct a device by a run that `Pipeline.record()` wrote.
    """
    check_writable(output)
    if run is not None:
        return _correct(*run, output=output, form=form)
    # Only now is PyTorch imported.
    from pipecompile.api.calibration import calibrate as fit
    from pipecompile.api.calibration import calibration_text

    calibration = fit(device)
    if output is not None:
        write(output, encode(calibration.device))
        logger.info("wrote %s: use it with --costs roofline:%s", output, output)
    if form == "json":
        click.echo(encode(calibration.device), nl=False)
    else:
        click.echo(framed(calibration_text(calibration), form))
    return FINE


def _correct(plan_path: str, run_path: str, *, output: str | None, form: str) -> int:
    """Write and print the device of a plan, corrected by a run of it. Needs no PyTorch."""
    from pipecompile.api.comparison import comparison_of
    from pipecompile.api.device_correction import corrected_device, ratios_text

    comparison = comparison_of(read(plan_path, Plan), read(run_path, RecordedRun))
    device = corrected_device(comparison)
    if output is not None:
        write(output, encode(device))
        logger.info("wrote %s: use it with --costs roofline:%s", output, output)
    if form == "json":
        click.echo(encode(device), nl=False)
    else:
        click.echo(framed(ratios_text(comparison), form))
    return FINE
