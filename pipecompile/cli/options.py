"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pipecompile.errors import InputError
from pipecompile.ir.plan import GRANULARITIES

__all__ = [
    "COSTS_HELP",
    "OPTIMIZER_HELP",
    "format_option",
    "given_options",
    "granularity_option",
    "leaf_option",
    "planning_options",
    "self_check_option",
]

SCHEDULE_HELP = (
    "gpipe, 1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, "
    "forward-only, or search."
)

SAVING_HELP = "Forms for what backwards need, to fit --memory: mask, relu, pool, offload, half (half is not exact)."

OPTIMIZER_HELP = (
    "Count its state: sgd, momentum, rmsprop, adam, adamw or adafactor; default the target's."
)

MEMORY_HELP = "Cap of each rank, such as 16GiB, or one a rank with commas between."

RECOMPUTE_HELP = "auto, none, stage, except-last, block or sqrt."

COSTS_HELP = "flops, measured, roofline:DEVICE (a name or a file of calibrate) or table:FILE."

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github"]),
    default="text",
    show_default=True,
)

granularity_option = click.option(
    "--granularity",
    type=click.Choice(GRANULARITIES),
    default="operators",
    show_default=True,
    help="What is cut between.",
)

leaf_option = click.option(
    "--leaf", multiple=True, metavar="MODULE", help="Take a module (path or class) as one node."
)

self_check_option = click.option(
    "--self-check/--no-self-check",
    default=True,
    show_default=True,
    help="Prove the graph by a training step.",
)


def _listed(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(filter(None, text.split(",")))


def planning_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that decide a plan."""
    for option in reversed(
        [
            click.option(
                "-k", "k", type=int, default=4, show_default=True, help="Number of stages."
            ),
            click.option("--microbatches", type=int, help="Microbatches per step; default k."),
            click.option("--schedule", default="1f1b", show_default=True, help=SCHEDULE_HELP),
            click.option(
                "--stages-per-rank",
                type=int,
                help="Stages on each rank; default what the schedule needs.",
            ),
            click.option(
                "--placement",
                type=click.Choice(["linear", "loop", "v"]),
                help="Where the stages lie.",
            ),
            click.option(
                "--objective",
                default="variance",
                show_default=True,
                help="variance, max-load or step-time.",
            ),
            click.option("--memory", help=MEMORY_HELP),
            click.option("--optimizer", help=OPTIMIZER_HELP),
            click.option(
                "--master-weights",
                is_flag=True,
                help="Count float32 copies of parameters of fewer bits.",
            ),
            click.option("--recompute", default="none", show_default=True, help=RECOMPUTE_HELP),
            click.option(
                "--saving", default="", callback=_listed, metavar="FORM[,…]", help=SAVING_HELP
            ),
            click.option("--costs", default="measured", show_default=True, help=COSTS_HELP),
            click.option(
                "--links",
                help="File with bandwidth and latency from rank to rank; without it: free.",
            ),
            click.option(
                "--pin",
                multiple=True,
                metavar="NODE=STAGE",
                help="Fix the stage of a node (-1: the last).",
            ),
            click.option(
                "--no-split",
                multiple=True,
                metavar="MODULE[,…]",
                help="Keep modules or nodes on one stage.",
            ),
            click.option(
                "--parameters-everywhere",
                is_flag=True,
                help="Each stage has a node with parameters.",
            ),
            granularity_option,
            leaf_option,
            self_check_option,
        ]
    ):
        function = option(function)
    return function


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Command line options as `options_for` takes them."""
    pins: dict[str, int] = {}
    for node, stage in map(_pin, options.pop("pin")):
        if pins.setdefault(node, stage) != stage:
            raise InputError(f"--pin {node}={pins[node]} and {node}={stage}: a node has one stage")
    groups = tuple(tuple(text.split(",")) for text in options.pop("no_split"))
    return {**options, "pin": pins, "groups": groups}


def _pin(text: str) -> tuple[str, int]:
    node, _, stage = text.rpartition("=")
    try:
        return node, int(stage)
    except ValueError:
        raise InputError(f"--pin {text}: write NODE=STAGE, for example lm_head=-1") from None
