"""The options of a plan, each declared once: its name, type, default and help.

The Python keywords (`pipecompile.Choices`), the command line, and docs/reference/options.md come
from `OPTIONS`; a test compares `Choices` and the fields of a plan with it. Needs no PyTorch.
`python -m pipecompile.ir.options` prints the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal, get_args, get_origin

from pipecompile.errors import InputError, unknown
from pipecompile.ir.encodings import Encoding
from pipecompile.ir.plan import BatchNormUpdate, Granularity, Recompute

__all__ = [
    "DEFAULT_STAGES",
    "OPTIONS",
    "Objective",
    "OptimizerName",
    "Option",
    "PlacementShape",
    "ScheduleName",
    "known_name",
    "options_page",
    "python_help",
]

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
    "forward-only",
    "search",
]
Objective = Literal["variance", "max-load", "step-time"]
PlacementShape = Literal["linear", "loop", "v"]
OptimizerName = Literal["sgd", "momentum", "rmsprop", "adam", "adamw", "adafactor"]

DEFAULT_STAGES = 4
INDENT = "    "

Form = Literal["value", "switch", "list", "repeated", "pins", "groups"]
"""How the command line takes an option: one value, on or off, values between commas, the option
several times, NODE=STAGE several times, or lists between commas several times.
"""


@dataclass(frozen=True)
class Option:
    """One option. `name` is its Python keyword, `type` its Python type, `flag` its command line
    option.

    `default_text` says what a default of None, or an empty one, stands for. `field` is the field of
    a plan's options that holds it; None if the plan does not. `is_choice` is false for what
    `pipecompile()` takes beside its choices.
    """

    name: str
    type: Any
    default: Any
    help: str
    default_text: str = ""
    form: Form = "value"
    metavar: str | None = None
    flag: str = ""
    field: str | None = ""
    is_choice: bool = True

    def __post_init__(self) -> None:
        if not self.flag:
            # A frozen dataclass refuses plain assignment, in its own __post_init__ too.
            object.__setattr__(self, "flag", f"--{self.name.replace('_', '-')}")
        # The empty text stands for the name. None says something else: no field of a plan holds it.
        if self.field == "":
            object.__setattr__(self, "field", self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that it may have, () if it is not one of a few."""
        return tuple(_literals(self.type))

    @property
    def shown_default(self) -> str:
        """Its default for people."""
        if self.default_text:
            return self.default_text
        return ("no", "yes")[self.default] if isinstance(self.default, bool) else str(self.default)


def _literals(kind: Any) -> Iterable[str]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for part in get_args(kind):
            yield from _literals(part)


_MEMORY = int | str | Sequence[int | str] | None
# Help and page list them in this order.
OPTIONS: tuple[Option, ...] = (
    Option(
        "k",
        int | None,
        None,
        "Number of stages.",
        default_text=str(DEFAULT_STAGES),
        flag="-k",
        is_choice=False,
    ),
    Option(
        "ranks",
        int | None,
        None,
        "Number of ranks, instead of k: k is then as many stages as the schedule has on these "
        "ranks.",
        default_text="k / stages per rank",
        field=None,
    ),
    Option(
        "microbatches",
        int | None,
        None,
        "Number of equal parts that the minibatch is cut into.",
        default_text="k",
    ),
    Option(
        "schedule",
        ScheduleName,
        "1f1b",
        "A named schedule, or search for the shortest one for this model, its links and its "
        "memory.",
    ),
    Option(
        "stages_per_rank",
        int | None,
        None,
        "Number of stages on each rank.",
        default_text="what the schedule needs",
    ),
    Option(
        "placement",
        PlacementShape | None,
        None,
        "Which stages share a rank: neighbours (linear), around and around (loop), or there and "
        "back (v).",
        default_text="what the schedule needs; a search tries all",
    ),
    Option(
        "objective",
        Objective,
        "variance",
        "What the cut minimises: the variance of the loads, the largest load, or the simulated "
        "step.",
    ),
    Option(
        "memory",
        _MEMORY,
        None,
        "Cap of each rank, such as 16GiB, or one for each rank with commas between.",
        default_text="no cap",
        metavar="SIZE[,…]",
        field="memory_bytes",
    ),
    Option(
        "optimizer",
        OptimizerName | None,
        None,
        "Count the state of this optimizer.",
        default_text="the target's optimizer",
    ),
    Option(
        "master_weights",
        bool,
        False,
        "Count float32 copies of parameters that have fewer bits.",
        form="switch",
    ),
    Option(
        "recompute",
        Recompute,
        "none",
        "What stages recompute instead of saving it: nothing (none), each stage but the last as "
        "a whole (stage), that for all microbatches but a step's last (except-last), each block "
        "(block), about √n of n blocks together (sqrt), or what lets each rank fit its memory at "
        "the least extra time (auto).",
    ),
    Option(
        "encodings",
        Iterable[Encoding],
        (),
        "Encodings of saved tensors that stages may use where they do not fit their memory; "
        "gradients stay the same bit for bit, except with half.",
        default_text="none",
        form="list",
        metavar="ENCODING[,…]",
    ),
    Option(
        "batch_norm",
        BatchNormUpdate,
        "microbatch",
        "When BatchNorm updates its running averages: after each microbatch, as the original "
        "module does, or once a step with the statistics of the whole minibatch, over all "
        "replicas.",
    ),
    Option(
        "costs",
        str,
        "measured",
        "Cost model: flops, measured, measured:DEVICE, roofline:DEVICE (a name, or a file that "
        "calibrate wrote) or table:FILE (a file that profile wrote).",
        is_choice=False,
    ),
    Option(
        "links",
        Any,
        None,
        "File with bandwidth and latency from rank to rank, which the command links writes.",
        default_text="transfers take no time",
        metavar="FILE",
        field=None,
        is_choice=False,
    ),
    Option(
        "pin",
        Mapping[str, int] | None,
        None,
        "Fix the stage of a node; -1 is the last stage.",
        default_text="none",
        form="pins",
        metavar="NODE=STAGE",
    ),
    Option(
        "no_split",
        Iterable[Iterable[str]],
        (),
        "Keep modules or nodes together on one stage.",
        default_text="none",
        form="groups",
        metavar="MODULE[,…]",
        field="groups",
    ),
    Option(
        "parameters_everywhere",
        bool,
        False,
        "Each stage has a node with parameters.",
        form="switch",
    ),
    Option(
        "granularity",
        Granularity,
        "operators",
        "What the model is cut between; auto opens blocks where balance or memory needs it.",
    ),
    Option(
        "leaf",
        Iterable[str],
        (),
        "Take a module, by path or class, as one node.",
        default_text="none",
        form="repeated",
        metavar="MODULE",
    ),
    Option(
        "self_check",
        bool,
        True,
        "Prove the captured graph by a training step before it is used.",
        form="switch",
        field=None,
        is_choice=False,
    ),
)


def known_name(what: str, name: object, known: Iterable[str]) -> str:
    """Return the one of the `known` names that `name` is, in whatever case; InputError suggests the
    nearest one.

    >>> known_name("schedule", "1F1B", ["gpipe", "1f1b"]) '1f1b'
    """
    names = tuple(known)
    if not isinstance(name, str):
        raise InputError(f"{what}={name!r} is not a name; choose one of {', '.join(names)}")
    if name.lower() not in names:
        raise unknown(what, name, names)
    return name.lower()


def python_help() -> str:
    """The choices for `help(pipecompile.Choices)`, each with its default, help and names."""
    entries = []
    for option in OPTIONS:
        if option.is_choice:
            text = [option.help]
            if option.choices:
                text.append(f"One of {', '.join(map(repr, option.choices))}.")
            lines = [
                fill(line, 92, initial_indent=INDENT, subsequent_indent=INDENT) for line in text
            ]
            entries.append("\n".join([f"{option.name}  (default: {option.shown_default})", *lines]))
    return "\n\n".join(entries)


def options_page() -> str:
    """The page docs/reference/options.md: all options as a Markdown table."""
    rows = []
    for option in OPTIONS:
        names = f"`{option.flag}`", f"`{option.name}`"
        cells = (*names, _values(option), option.shown_default, option.help)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([PAGE_HEAD, *rows]) + "\n"


PAGE_HEAD = """\
# Options of a plan

The same options go to `pipecompile plan` and `pipecompile verify` on the command line, and to
`pipecompile()` in Python. Names are known in whatever case; an unknown one is answered with the
nearest.

| command line | Python | values | default | what it does |
|---|---|---|---|---|"""


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{name}`" for name in option.choices)
    if option.metavar is not None:
        return f"`{option.metavar}`"
    return {bool: "yes or no", str: "name"}.get(option.type, "whole number")


if __name__ == "__main__":
    print(options_page(), end="")
