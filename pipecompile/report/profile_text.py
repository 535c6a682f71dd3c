"""A profile as text of at most 100 columns: totals, then tables by module, operator and node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.size import size_text
from pipecompile.report.profile import Profile, Row, large_rows, time_of
from pipecompile.report.tables import DrawTable, bar, plain_table
from pipecompile.report.units import percent

__all__ = ["profile_headline", "profile_text", "totals"]

_NAME_WIDTH = 34


def profile_text(profile: Profile, draw: DrawTable = plain_table) -> str:
    """Return the profile as `pipecompile profile` prints it."""
    head = [profile_headline(profile)]
    head += [f"  {name:<11} {figure}" for name, figure in totals(profile)]
    operators = large_rows(profile.operators, profile.total)
    parts = [
        head,
        draw(_rows("module", profile.modules, profile), {0, 4}),
        draw(_rows("operator", operators, profile), {0, 4}),
        draw(_nodes(profile), {0, 2, 6}),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def profile_headline(profile: Profile) -> str:
    """Return in one line what is counted, and by which costs."""
    proof = "capture verified against the model" if profile.verified else "unverified capture"
    relative = profile.time_unit == "relative"
    unit = " (times are relative units, not seconds)" if relative else ""
    return f"one microbatch, costs {profile.costs}{unit}, {proof}"


def totals(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield the figures of the whole, each with its name."""
    total, unit = profile.total, profile.time_unit

    def known(time_ns: int | None) -> str:
        return "?" if time_ns is None else time_with_unit(time_ns, unit)

    yield "nodes", f"{total.nodes}, {profile.distinct} distinct"
    yield "forward", time_with_unit(total.forward_ns, unit)
    inputs, weights = map(known, (profile.backward_input_ns, profile.backward_weight_ns))
    backward = time_with_unit(total.backward_ns, unit)
    yield "backward", f"{backward} (inputs alone {inputs}, weights alone {weights})"
    yield "parameters", f"{size_text(total.parameter_bytes)} with buffers"
    yield "gradients", size_text(profile.gradient_bytes)
    if profile.optimizer is not None:
        yield "optimizer", f"{size_text(profile.optimizer_bytes)} ({profile.optimizer})"
    yield "saved", f"{size_text(total.saved_bytes)} for the backward"


def _rows(title: str, rows: Sequence[Row], profile: Profile) -> list[list[str]]:
    """Return a table of rows of the profile, with bars and shares."""
    total, unit = profile.total, profile.time_unit
    # Bars compare rows, so the longest is full; the share beside it is of the whole model.
    largest = max((row.time_ns for row in rows), default=0)
    lines = [[title, "nodes", "forward", "backward", "", "time", "saved", "", "params", ""]]
    for row in rows:
        lines.append(
            [
                _shortened(f"{'  ' * row.depth}{_without_torch(row.name)}", _NAME_WIDTH),
                str(row.nodes),
                time_text(row.forward_ns, unit),
                time_text(row.backward_ns, unit),
                bar(row.time_ns / max(largest, 1), 5),
                percent(row.time_ns, max(total.time_ns, 1)),
                size_text(row.saved_bytes),
                percent(row.saved_bytes, max(total.saved_bytes, 1)),
                size_text(row.parameter_bytes),
                percent(row.parameter_bytes, max(total.parameter_bytes, 1)),
            ]
        )
    return lines


def _nodes(profile: Profile) -> list[list[str]]:
    """Return the table of the heaviest nodes, with their source lines."""
    lines = [["node", "", "operator", "time", "", "saved", "source"]]
    for nodes in profile.heaviest:
        first, time_ns = nodes[0], time_of(nodes)
        lines.append(
            [
                _shortened(first.name, 20),
                f"×{len(nodes)}" if len(nodes) > 1 else "",
                _shortened(_without_torch(first.operator), 20),
                time_text(time_ns, profile.time_unit),
                percent(time_ns, max(profile.total.time_ns, 1)),
                size_text(sum(node.saved_bytes for node in nodes)),
                first.source if len(first.source) <= 28 else f"…{first.source[-27:]}",
            ]
        )
    return lines


def _without_torch(operator: str) -> str:
    return operator.removeprefix("torch.nn.functional.").removeprefix("torch.nn.")


def _shortened(text: str, width: int) -> str:
    """Return the text, or its beginning and its end where it is too long."""
    # Names mostly differ at their end: a third is for the beginning, and the rest for the end.
    # For example "transformer" in 9 columns is "tra…ormer".
    begin = width // 3
    return text if len(text) <= width else f"{text[:begin]}…{text[1 - width + begin :]}"
