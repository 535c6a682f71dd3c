"""The command that audits a layout."""

from __future__ import annotations

import logging
from typing import Any

import click

from pipecompile.cli.answers import FINE, AnswerCommand, print_annotation, table_style
from pipecompile.cli.options import format_option, planning_options
from pipecompile.errors import InputError
from pipecompile.ir.audit import Audit
from pipecompile.ir.options import JOINT_SEARCH
from pipecompile.ir.serialization import check_writable, encode, write

__all__ = ["audit"]

logger = logging.getLogger("pipecompile.cli")


@click.command(cls=AnswerCommand, short_help="What a layout costs, beside the best cuts.")
@click.argument("target")
# An audit is of the heaviest rank, at every granularity.
@planning_options(
    without=("objective", "pin", "granularity", *JOINT_SEARCH),
    k={"help": "Number of stages, which the layout says.", "default_text": "the layout's"},
    layout={
        "help": "The layout that is audited, a text or its file, as for plan.",
        "default_text": "none, it is required",
    },
)
@click.option("--page", metavar="FILE", help="Where to write the page (HTML, one file).")
@format_option
def audit(target: str, page: str | None, form: str, **options: Any) -> int:
    """What a layout of TARGET costs, beside the best cuts between layers, inside layers and between
    operators, and what no such cut can go below.

    TARGET is as for plan, or a cost graph (graph.json, which profile writes), or a table of layer
    times (times.csv).
    """
    from pipecompile.api.report import audit_page, audit_text

    check_writable(page)
    if options["layout"] is None:
        raise InputError("an audit is of a layout; give one: --layout LAYOUT")
    # `check_writable` has opened nothing: an audit that fails leaves a page that was there as it
    # was.
    result = _audited(target, options)
    if page is not None:
        write(page, audit_page(target, result).encode())
        logger.info("wrote %s: open it in a browser", page)
    if form == "json":
        click.echo(encode(result), nl=False)
    elif form == "github":
        _print_markdown(target, result)
    else:
        click.echo(audit_text(result, table_style(form)))
    return FINE


def _print_markdown(target: str, result: Audit) -> None:
    from pipecompile.api.report import audit_headline, audit_markdown

    click.echo(audit_markdown(result, target))
    print_annotation("notice", target, audit_headline(result))


def _audited(target: str, options: dict[str, Any]) -> Audit:
    """Return the audit of a target that is a factory, or a file of costs."""
    from pipecompile.api.audit import audit_file, audit_graph, is_file_of_costs
    from pipecompile.api.choices import requested_options
    from pipecompile.api.factory import Factory
    from pipecompile.api.links import links_for

    # The rest of the options are keywords of `requested_options`, so no list of them is kept
    # here.
    self_check, links_from_options = options.pop("self_check"), options.pop("links")
    # The name decides, so that `times.csv` needs no PyTorch, neither here nor later.
    if is_file_of_costs(target):
        return audit_file(target, links=links_from_options, **options)
    factory = Factory.of(target)
    requested = requested_options(**options)
    links = links_for(requested, links_from_options)
    # Only now is PyTorch imported.
    from pipecompile.api.profile import costs_of
    from pipecompile.api.target import target_of

    graph, completed = costs_of(target_of(factory), requested, self_check=self_check)
    return audit_graph(graph, completed, links)
