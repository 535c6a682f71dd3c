"""An audit for people: as text, and as Markdown for a page of GitHub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.ir.audit import WHERE, Audit, AuditedCut, AuditedPart, SharedTensor
from pipecompile.ir.duration import time_text
from pipecompile.ir.plurals import counted
from pipecompile.ir.size import size_text
from pipecompile.report.tables import DrawTable, markdown_table, plain_table
from pipecompile.report.units import costs_text

__all__ = [
    "audit_headline",
    "audit_markdown",
    "audit_rows",
    "audit_subtitle",
    "audit_text",
    "cut_name",
    "findings_of",
    "part_rows",
    "shared_text",
]

MOST_SHARED = 5  # tensors that are listed
_PARTS = {
    "E": "E embedding",
    "t": "t layer",
    "m": "m MTP layer",
    "L": "L norm, head, loss",
    "a": "attention of a layer",
    "p": "MLP of a layer",
}


def audit_text(audit: Audit, draw: DrawTable = plain_table) -> str:
    """Return what `audit` prints: the cuts in a table, what follows from them, what parts cost."""
    parts = [
        [f"{audit.layout} ({audit.layout_format})", audit_subtitle(audit)],
        list(draw(audit_rows(audit), {0})),
        list(findings_of(audit)),
        list(draw(part_rows(audit), {0})),
        [f"{name}: {text}" for name, text in _to_paste(audit)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def audit_markdown(audit: Audit, title: str) -> str:
    """Return the same as Markdown with a `title`: for the summary of a job."""
    parts = [
        [f"### {title}: `{audit.layout}`"],
        [audit_subtitle(audit)],
        list(markdown_table(audit_rows(audit), {0})),
        [f"- {line}" for line in findings_of(audit)],
        list(markdown_table(part_rows(audit), {0})),
        [f"- {name}: `{text}`" for name, text in _to_paste(audit)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def audit_headline(audit: Audit) -> str:
    """Return in one line what the layout costs over the best cuts."""
    return "; ".join(_over_best(audit)) or "nothing to compare the layout with"


def audit_subtitle(audit: Audit) -> str:
    """Return what was audited: the shape of the pipeline and the costs."""
    shape = f"{counted(audit.k, 'stage')} on {counted(audit.ranks, 'rank')}"
    microbatches = counted(audit.microbatches, "microbatch")
    costs = costs_text(audit.costs, audit.time_unit)
    return f"{shape}, {audit.schedule}, {microbatches}; costs {costs}"


# The table of cuts


def audit_rows(audit: Audit) -> list[list[str]]:
    """Return the table of cuts: the heaviest rank, the step and the fullest rank, each with what
    bounds it.
    """
    rows = [["", "heaviest rank", "of mean", "at least", "step", "at least", "bubble", "memory"]]
    for cut in audit.cuts:
        rows.append(
            [
                cut_name(cut),
                f"{time_text(cut.heaviest_ns, audit.time_unit)} (rank {cut.heaviest_rank})",
                f"{cut.imbalance:.3f}",
                "proven" if cut.proven else time_text(cut.bound_ns, audit.time_unit),
                time_text(cut.step_ns, audit.time_unit),
                time_text(cut.step_bound_ns, audit.time_unit),
                f"{cut.bubble:.1%}",
                _fullest_text(cut),
            ]
        )
    return rows


def cut_name(cut: AuditedCut) -> str:
    """Return what a cut is called: layout, best between layers, …"""
    return "layout" if cut.grain is None else f"best {WHERE[cut.grain]}"


def _fullest_text(cut: AuditedCut) -> str:
    most = max(cut.memory)
    return f"{size_text(most)} (rank {cut.memory.index(most)})"


# What follows from it


def findings_of(audit: Audit) -> Iterator[str]:
    """Yield a sentence for each thing that an owner of the layout may want to change or to know."""
    yield from _over_best(audit)
    hand = audit.hand
    if hand.parts:
        content = " + ".join(f"{share:g} {name}" for name, share in hand.parts.items())
        yield f"rank {hand.heaviest_rank} is the heaviest: {content}"
    yield _memory_text(audit)
    for tensor in audit.shared[:MOST_SHARED]:
        yield shared_text(tensor)
    if len(audit.shared) > MOST_SHARED:
        yield f"and {counted(len(audit.shared) - MOST_SHARED, 'more shared tensor')}"
    yield from audit.notes


def _over_best(audit: Audit) -> Iterator[str]:
    """Yield how much heavier the layout's heaviest rank is than that of each best cut."""
    hand = audit.hand
    for cut in audit.best:
        what = cut_name(cut).removeprefix("best ")
        if cut.heaviest_ns > hand.heaviest_ns:
            # Only a layout over its cap is lighter than the best cut: that one recomputes.
            more = _over(cut.heaviest_ns, hand.heaviest_ns)
            yield f"the best cut {what} that fits has a heaviest rank {more} over the layout's"
            continue
        # The layout meets the bound itself, whatever the search has found.
        if hand.heaviest_ns == cut.bound_ns:
            text = f"no cut {what} has a lighter heaviest rank than the layout (proven)"
            less = 1 - cut.step_ns / max(hand.step_ns, 1)
            yield text + (f"; one as heavy has a step {less:.1%} shorter" if less >= 0.001 else "")
            continue
        # 110 over a best cut of 100 with a bound of 99: 10.0 % over what was found, and 11.1 %
        # over what can be reached at most.
        over, most = (_over(hand.heaviest_ns, ns) for ns in (cut.heaviest_ns, cut.bound_ns))
        if hand.heaviest_ns == cut.heaviest_ns:
            yield f"no lighter cut {what} was found; the layout is {most} over what one can reach"
            continue
        limit = "" if cut.proven else f", and {most} over what any such cut can reach"
        proof = " (proven best)" if cut.proven else ""
        yield f"the layout's heaviest rank is {over} over the best cut {what}{proof}{limit}"


def _over(value: int, other: int) -> str:
    return f"{value / max(other, 1) - 1:.1%}"


def _memory_text(audit: Audit) -> str:
    rank, hand = audit.first_full_rank, audit.hand
    held = size_text(hand.memory[rank])
    least = f"any cut has a rank with at least {size_text(hand.memory_bound)}"
    if audit.caps is None:
        return f"memory: rank {rank} holds most, up to {held}; {least}"
    left = audit.caps[rank] - hand.memory[rank]
    room = f"{size_text(left)} left" if left >= 0 else f"{size_text(-left)} too much"
    cap = size_text(audit.caps[rank])
    would = "runs" if left < 0 else "would run"
    return f"memory: rank {rank} {would} out first: up to {held} of {cap}, {room}; {least}"


def shared_text(tensor: SharedTensor) -> str:
    """Return which stages a shared tensor is sent to, and how it need not be."""
    # Once over each boundary, and back.
    size = size_text((tensor.bytes + tensor.gradient_bytes) * len(tensor.before))
    made = "before the layers" if tensor.first < 0 else f"in layer {tensor.first}"
    where = f"{counted(len(tensor.before), 'boundary')} from stage {tensor.before[0]} on"
    remedy = f"a boundary after layer {tensor.last} would not send it"
    if tensor.spans_all:
        remedy = "all layers read it: compute it in each stage instead"
    return (
        f"{tensor.name}, made {made} and read up to layer {tensor.last}, crosses {where} "
        f"({size} per microbatch); {remedy}"
    )


# What parts cost, and what to paste


def part_rows(audit: Audit) -> list[list[str]]:
    """Return the table of the parts of the model; no rows if it has no layers."""
    if not audit.parts:
        return []
    total = sum(_part_ns(part) * part.count for part in audit.parts)
    rows = [["part", "count", "forward", "backward", "of all"]]
    for part in audit.parts:
        times = (time_text(ns, audit.time_unit) for ns in (part.forward_ns, part.backward_ns))
        share = f"{_part_ns(part) * part.count / max(total, 1):.1%}"
        rows.append([_PARTS[part.name], str(part.count), *times, share])
    return rows


def _part_ns(part: AuditedPart) -> int:
    return part.forward_ns + part.backward_ns


def _to_paste(audit: Audit) -> Sequence[tuple[str, str]]:
    """Return the best cuts that are better than those before, or how to get what no format of
    layers says: such as fit, where those before do not, are lighter, or have a shorter step.
    """
    found, worth = [], _worth(audit, audit.hand)
    for cut in audit.best:
        # Grains become finer and cuts no heavier: one that is only as good as the coarser one
        # before it is not worth its longer text.
        if _worth(audit, cut) < worth:
            plan = f"plan with these options, -k {audit.k} --objective max-load; export --to json"
            form = cut.form or "as a plan"
            found.append((f"{cut_name(cut)} ({form})", cut.text or plan))
        worth = min(worth, _worth(audit, cut))
    return found


def _worth(audit: Audit, cut: AuditedCut) -> tuple[bool, int, int]:
    """Return what makes a cut worse than another one: the less, the better."""
    # False sorts before True: what fits comes first, then what is lighter, then what is faster.
    return not audit.fits(cut), cut.heaviest_ns, cut.step_ns
