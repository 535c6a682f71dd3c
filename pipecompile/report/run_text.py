"""A recorded run against its plan, as text; its tables are those of the page too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipecompile.ir.duration import time_text
from pipecompile.ir.plurals import counted
from pipecompile.ir.schedule import Kind
from pipecompile.ir.size import size_text
from pipecompile.report.recompute import recompute_shares
from pipecompile.report.run_comparison import ComparedTime, RunComparison
from pipecompile.report.tables import DrawTable, plain_table
from pipecompile.report.timeline_text import timeline_text

__all__ = [
    "RunTable",
    "comparison_headings",
    "comparison_tables",
    "comparison_text",
    "figure_texts",
    "ratios_text",
    "recorded_text",
    "run_notes",
]

_KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input backward",
    Kind.BACKWARD_WEIGHT: "weight backward",
    Kind.RECOMPUTE: "recompute",
}
_TIMES = ("predicted", "measured", "difference", "ratio")


@dataclass(frozen=True)
class RunTable:
    """A table with its heading. Its first row is the header; columns `words` hold no numbers."""

    heading: str
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = ()


def comparison_text(comparison: RunComparison, draw: DrawTable = plain_table) -> str:
    """Return the comparison as `compare` prints it: figures, tables, and both timelines."""
    run = comparison.run
    head = [f"{recorded_text(comparison)} recorded on {run.device}, torch {run.torch}"]
    head += [f"{name:10} {text}" for name, text in figure_texts(comparison)]
    parts = ["\n".join([*head, *run_notes(comparison)])]
    for table in comparison_tables(comparison):
        parts.append("\n".join([table.heading, *draw(table.rows, table.words)]))
    predicted, recorded = comparison_headings(comparison)
    shares = recompute_shares(comparison.plan)
    parts.append(f"{predicted}\n{timeline_text(comparison.predicted, shares)}".rstrip())
    # Where in a recorded backward regions were recomputed is not known.
    parts.append(f"{recorded}\n{timeline_text(comparison.typical.timeline())}".rstrip())
    return "\n\n".join(parts) + "\n"


def recorded_text(comparison: RunComparison) -> str:
    """Return how many steps were recorded, or how many minibatches that followed each other."""
    count = len(comparison.steps)
    if not _is_in_flight(comparison):
        return counted(count, "step")
    times = f"{count} times " if count > 1 else ""
    return f"{times}{counted(comparison.minibatches, 'minibatch')} in flight"


def _is_in_flight(comparison: RunComparison) -> bool:
    return comparison.plan.schedule.weight_versions != "synchronous"


def figure_texts(comparison: RunComparison) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the figures of a whole step."""
    # Minibatches in flight have no steps: from the empty pipeline to the empty one is what can be
    # told.
    yield "in all" if _is_in_flight(comparison) else "step", _pair_text(comparison.step)
    if comparison.minibatch is not None:
        yield "minibatch", f"{_pair_text(comparison.minibatch)}, in a full pipeline"
    yield "compute", _pair_text(comparison.compute)
    # One process never idles: a bubble of ranks that ran in turns would mean nothing.
    if not comparison.run.is_in_turns:
        predicted, measured = comparison.bubble
        yield "bubble", f"{predicted:.1%} predicted, {measured:.1%} measured"


def comparison_headings(comparison: RunComparison) -> tuple[str, str]:
    """Return what stands above the predicted timeline and above the recorded one."""
    if _is_in_flight(comparison):
        first, last = comparison.typical.number, comparison.minibatches - 1
        return "predicted", f"recorded: minibatches {first} to {first + last}"
    return "predicted", f"recorded: step {comparison.typical.number}, of median length"


def ratios_text(comparison: RunComparison) -> str:
    """Return in one line measured / predicted of all compute, and by kind of action."""
    times = {"all compute": comparison.compute}
    times |= {_KINDS[kind]: time for kind, time in comparison.kinds.items()}
    return "measured / predicted: " + ", ".join(
        f"{name} {_ratio_text(time)}" for name, time in times.items()
    )


def run_notes(comparison: RunComparison) -> Iterator[str]:
    """Yield what a reader must know before comparing figures."""
    if comparison.is_relative:
        yield (
            f"costs {comparison.plan.options.costs} are relative units: only shares are compared, "
            "as if all actions took as long as measured"
        )
    if comparison.run.is_in_turns:
        yield (
            "one process performed the actions of all ranks in turns, so the step is compared with "
            "their sum"
        )
    # Lengths come from one clock each; only who waited for whom compares two.
    if comparison.run.clock_error_ns:
        error = time_text(comparison.run.clock_error_ns)
        yield f"moments of different ranks may be off by {error}, times within a rank are not"


def comparison_tables(comparison: RunComparison) -> list[RunTable]:
    """Return the times by kind, by stage and by rank, and the worst actions."""
    of_a_step, in_a_step = " of a step", " in a step"
    if _is_in_flight(comparison):
        of_a_step = in_a_step = ""
    return [
        RunTable(f"all actions{of_a_step}, by kind", list(_kind_rows(comparison)), (0,)),
        RunTable("one action, by stage (mean)", list(_stage_rows(comparison)), (2,)),
        RunTable(f"busy time of each rank{in_a_step}", list(_rank_rows(comparison))),
        RunTable("the actions farthest from their prediction", list(_worst_rows(comparison)), (1,)),
    ]


def _kind_rows(comparison: RunComparison) -> Iterator[list[str]]:
    yield ["kind", *_TIMES]
    for kind, time in comparison.kinds.items():
        yield [_KINDS[kind], *_cells(time)]


def _stage_rows(comparison: RunComparison) -> Iterator[list[str]]:
    yield ["rank", "stage", "kind", "actions", *_TIMES]
    for row in comparison.stages:
        numbers = [str(row.rank), str(row.stage), _KINDS[row.kind], str(row.count)]
        yield [*numbers, *_cells(row.time)]


def _rank_rows(comparison: RunComparison) -> Iterator[list[str]]:
    """Idle shares and waiting only of ranks that ran at once, memory only where it was recorded."""
    ranks, at_once = comparison.ranks, not comparison.run.is_in_turns
    has_memory = any(rank.peak_bytes is not None for rank in ranks)
    header = ["rank", *_TIMES]
    header += ["idle predicted", "idle measured", "waiting"] if at_once else []
    yield header + (["expected", "bound", "peak"] if has_memory else [])
    for index, rank in enumerate(ranks):
        row = [str(index), *_cells(rank.busy)]
        if at_once:
            row += [*(f"{share:.1%}" for share in rank.idle), time_text(rank.waiting_ns)]
        if has_memory:
            sizes = (rank.expected_bytes, rank.bound_bytes, rank.peak_bytes or 0)
            row += map(size_text, sizes)
        yield row


def _worst_rows(comparison: RunComparison) -> Iterator[list[str]]:
    yield ["rank", "action", *_TIMES]
    for compared in comparison.worst:
        yield [str(compared.rank), str(compared.action), *_cells(compared.time)]


def _cells(time: ComparedTime) -> list[str]:
    sign = "+" if time.difference_ns > 0 else ""
    return [
        time_text(time.predicted_ns),
        time_text(time.measured_ns),
        sign + time_text(time.difference_ns),
        _ratio_text(time),
    ]


def _ratio_text(time: ComparedTime) -> str:
    return "" if time.ratio is None else f"{time.ratio:.2f}"


def _pair_text(time: ComparedTime) -> str:
    ratio = "" if time.ratio is None else f", ratio {time.ratio:.2f}"
    return (
        f"{time_text(time.predicted_ns)} predicted, {time_text(time.measured_ns)} measured{ratio}"
    )
