"""Why a step takes as long as it does, for people: as text, and as Markdown for a page of GitHub.

Both have the same parts: a title and lines, or a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.explanation import (
    Constraint,
    EdgeMove,
    Explanation,
    Outcome,
    Undivided,
    WhatIf,
)
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.plurals import counted
from pipecompile.ir.size import size_text
from pipecompile.report.tables import DrawTable, markdown_table, plain_table
from pipecompile.report.units import gap_text, objective_text, percent

__all__ = ["explanation_headline", "explanation_markdown", "explanation_text"]

_MODULES = 6  # modules of the heaviest rank that are shown
_WIDTH = 100
_NAME_WIDTH = 44  # of modules, and of changes, whose groups may name many
_EVEN = 1.01  # a load that is above the least possible one by less is as good as it
_REMOVALS = ("memory", "pin", "group", "layout", "granularity", "parameters")
_CAUSES = {
    "dependency": "a result of another rank is not there yet: filling, draining, and the order",
    "transfer": "messages and sums of gradients are under way",
    "memory": "the next forward would not fit the cap",
    "imbalance": "other ranks have more to do",
}
_NO_REASON = "no option of the plan holds it; with TARGET, what would change it is solved again"
_HELD_BY = {
    "node": "",
    "group": "they are in a group that was asked for",
    "model": "the model needs them together",
    "granularity": "the model is not cut between them",
    "order": "else gradients would be summed in another order",
}


@dataclass(frozen=True)
class _TitledTable:
    """A title, a table whose columns `left` begin at the left, and lines below."""

    title: str
    lines: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    left: Collection[int] = field(default=(0,))


def explanation_text(
    explanation: Explanation, plan: str = "PLAN", draw: DrawTable = plain_table
) -> str:
    """Return what `explain` prints; `plan` is the file of the plan."""
    texts = []
    for part in _parts(explanation):
        table = [f"  {line}" for line in draw(part.rows, part.left)] if part.rows else []
        lines = (line for text in part.lines for line in _wrapped(text))
        texts.append("\n".join([part.title, *table, *lines]))
    title, command = _advice(explanation, plan)
    return "\n\n".join([*texts, f"{title}\n  {command}".rstrip()])


def _wrapped(text: str) -> list[str]:
    # Commands and names are copied, so that no word is broken.
    return wrap(
        text,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def explanation_markdown(explanation: Explanation, plan: str) -> str:
    """Return the same as Markdown: for the summary of a job."""
    texts = [f"### {plan}"]
    for part in _parts(explanation):
        texts.append(f"**{part.title}**")
        if part.rows:
            texts.append("\n".join(markdown_table(part.rows, part.left)))
        if part.lines:
            texts.append("\n".join(f"- {line}" for line in part.lines))
    title, command = _advice(explanation, plan)
    texts += [f"**{title}**", *[f"```sh\n{command}\n```"] * bool(command)]
    return "\n\n".join(texts)


def explanation_headline(explanation: Explanation) -> str:
    """Return in one line the step, the bubble, the heaviest rank, and what to try first."""
    heaviest, before = explanation.heaviest, explanation.before
    advice = f"; try {explanation.first}" if explanation.first else ""
    return (
        f"step {time_with_unit(before.step_ns, explanation.time_unit)}, bubble "
        f"{before.bubble:.1%}, rank {heaviest.rank} is {_of_mean(explanation)}{advice}"
    )


def _advice(explanation: Explanation, plan: str) -> tuple[str, str]:
    """Return what to do next in words, and the command for it; "" without one."""
    if explanation.first:
        return "try first", explanation.first
    if not explanation.what_ifs:
        command = f"pipecompile explain {plan} {explanation.target or 'TARGET'}"
        return "what would change it, solved again", command
    return "nothing that was tried makes the step shorter by more than 1 %", ""


def _parts(explanation: Explanation) -> Iterator[_TitledTable]:
    yield _TitledTable(_title(explanation), list(_summary(explanation)))
    yield _TitledTable("what the heaviest rank runs", rows=list(_modules(explanation)))
    yield _TitledTable("why it is not lighter", list(_reasons(explanation)) or [_NO_REASON])
    yield _TitledTable("why ranks wait", rows=list(_idle(explanation)), left={0, 2})
    if explanation.what_ifs:
        yield _TitledTable(
            "what would change it", list(_refused(explanation)), list(_changes(explanation))
        )


# The plan by itself


def _title(explanation: Explanation) -> str:
    before = explanation.before
    step = time_with_unit(before.step_ns, explanation.time_unit)
    return f"step {step}, bubble {before.bubble:.1%}"


def _summary(explanation: Explanation) -> Iterator[str]:
    yield from explanation.notes
    heaviest, unit = explanation.heaviest, explanation.time_unit
    load = time_with_unit(heaviest.load_ns, unit)
    least = heaviest.least_ns
    mean = max(heaviest.mean_ns, 1)
    bound = "" if least is None else f"; no cut has less than {least / mean:.2f} ×"
    stages = "stage" if len(heaviest.stages) == 1 else "stages"
    yield (
        f"heaviest: rank {heaviest.rank} ({stages} {', '.join(map(str, heaviest.stages))}) takes "
        f"{load} a microbatch, {_of_mean(explanation)}{bound}"
    )
    if heaviest.extra_ns:
        extra = time_with_unit(heaviest.extra_ns, unit)
        yield f"of that, recompute and encodings take {extra}, so that it fits its memory"
    yield f"cut: {explanation.objective} {_value_text(explanation)}"
    tightest = explanation.tightest
    held = f"{size_text(tightest.expected)} expected, {size_text(tightest.bound)} at most"
    room = "no cap" if tightest.cap is None else _room(tightest.cap, tightest.bound)
    yield f"memory: rank {tightest.rank} is the tightest, {held}; {room}"


def _value_text(explanation: Explanation) -> str:
    """Return the value of the cut with its bound; that of a layout's cut bounds no other cut."""
    unit = explanation.time_unit
    value = objective_text(explanation.objective, explanation.before.value, unit)
    if any(constraint.kind == "layout" for constraint in explanation.constraints):
        return f"{value}, of the layout's cut"
    bound = objective_text(explanation.objective, explanation.bound, unit)
    proof = "proven" if explanation.proven else "not proven"
    return f"{value}, bound {bound}, gap {gap_text(explanation.gap)}, {proof}"


def _room(cap: int, bound: int) -> str:
    return f"{size_text(cap - bound)} left under its cap of {size_text(cap)}"


def _of_mean(explanation: Explanation) -> str:
    heaviest = explanation.heaviest
    return f"{heaviest.load_ns / max(heaviest.mean_ns, 1):.2f} × the mean load"


def _modules(explanation: Explanation) -> Iterator[list[str]]:
    """Yield the modules that take most; nothing of an older plan, which does not say."""
    modules, unit = explanation.heaviest.modules, explanation.time_unit
    whole = sum(module.ns for module in modules)
    yield ["module", "nodes", "forward + backward", "of the rank"]
    for module in modules[:_MODULES]:
        name = _fitted(module.module or "(the model itself)")
        time = time_text(module.ns, unit)
        yield [name, _fitted(module.node) or str(module.nodes), time, percent(module.ns, whole)]
    rest = modules[_MODULES:]
    if rest:
        ns, nodes = sum(module.ns for module in rest), sum(module.nodes for module in rest)
        share = percent(ns, whole)
        yield [f"{len(rest)} more", str(nodes), time_text(ns, unit), share]


def _idle(explanation: Explanation) -> Iterator[list[str]]:
    """Yield each cause with its share of the time of all ranks: together they are the bubble."""
    before = explanation.before
    # Four ranks and a step of 100 ms have 400 ms. If 60 of them are waited for transfers, that is
    # 15 %.
    whole = max(before.ranks * before.step_ns, 1)
    yield ["cause", "of all time", "what is waited for"]
    for cause, meaning in _CAUSES.items():
        ns = getattr(explanation.idle, f"{cause}_ns")
        if ns:
            yield [cause, percent(ns, whole), meaning]
    yield ["all", percent(explanation.idle.total_ns, whole), "the bubble"]


# Why the heaviest rank is not lighter


def _reasons(explanation: Explanation) -> Iterator[str]:
    yield from _at_the_bound(explanation)
    if explanation.undivided is None:
        yield from _large_node(explanation)
    else:
        yield from _undivided_texts(explanation, explanation.undivided)
    for move in explanation.moves:
        yield _move_text(move, explanation)
    if explanation.what_ifs:
        yield from _binding(explanation)
    else:
        yield from map(_constraint_text, explanation.constraints)


def _at_the_bound(explanation: Explanation) -> Iterator[str]:
    """Yield that no cut helps, if the load is as good as the least possible one."""
    heaviest = explanation.heaviest
    if heaviest.least_ns is not None and heaviest.load_ns <= heaviest.least_ns * _EVEN:
        yield "no cut makes the heaviest rank lighter by more than 1 %"


def _large_node(explanation: Explanation) -> Iterator[str]:
    """Yield the node of the heaviest rank that takes more than the mean load, if there is one."""
    heaviest = explanation.heaviest
    for module in heaviest.modules:
        if module.node and module.ns > heaviest.mean_ns and heaviest.least_ns is not None:
            yield _node_text(module.node, module.module, module.ns, explanation)


def _node_text(node: str, module: str, ns: int, explanation: Explanation) -> str:
    """Return what a node takes."""
    where = f" ({module})" if module not in ("", node) else ""
    time = time_with_unit(ns, explanation.time_unit)
    share = ns / max(explanation.heaviest.mean_ns, 1)
    return f"{node}{where} takes {time}, {share:.2f} × the mean load, and no cut splits a node"


def _undivided_texts(explanation: Explanation, undivided: Undivided) -> Iterator[str]:
    """Yield the largest piece of the heaviest rank, and whether the rest may be moved."""
    if explanation.moves and 2 * undivided.ns < explanation.heaviest.mean_ns:
        return  # it is small: what happens at the ends of the stage says more
    text = _node_text(undivided.node, undivided.module, undivided.node_ns, explanation)
    if undivided.nodes > 1:
        whole = time_with_unit(undivided.ns, explanation.time_unit)
        others = counted(undivided.nodes - 1, "other node")
        text += f"; it stays with {others}, {whole} in all: {_HELD_BY[undivided.by]}"
    yield text
    if not explanation.moves:
        yield "nothing else that takes time can be moved out of it"


def _move_text(move: EdgeMove, explanation: Explanation) -> str:
    """Return what would happen if an end of the stage lay in the next one."""
    unit = explanation.time_unit
    nodes = move.node if move.nodes == 1 else f"{counted(move.nodes, 'node')} with {move.node}"
    ns, receiver, before, after = (
        time_with_unit(time, unit) for time in (move.ns, move.receiver_ns, *move.heaviest_ns)
    )
    text = f"stage {move.before} → {move.after} for {nodes} ({ns})"
    if move.obstacle:
        return f"{text}: not allowed, {move.obstacle}"
    # Such as "stage 0 → 1 for norm_2 (1 ms): that rank would take 7 ms, and the heaviest one 9 ms
    # instead of 10 ms, less".
    outcome = "no less" if move.heaviest_ns[1] >= move.heaviest_ns[0] else "less"
    is_tight = any(constraint.kind == "memory" for constraint in explanation.constraints)
    # In little room more nodes in the other stage may need recompute, which the move does not
    # count.
    unknown = ", without what recompute would add" * (is_tight and outcome == "less")
    return (
        f"{text}: that rank would take {receiver}, and the heaviest one {after} instead of "
        f"{before}, {outcome}{unknown}"
    )


def _constraint_text(constraint: Constraint) -> str:
    """Return what may hold the cut where it is: only planning again tells whether it does."""
    here = "in the heaviest rank" if constraint.here else "elsewhere"
    match constraint.kind:
        case "layout":
            return f"the cut is that of the layout ({constraint.where})"
        case "granularity":
            return f"the model is cut between {constraint.where} only"
        case "parameters":
            return "each stage must have parameters"
        case "memory":
            return f"the caps may forbid a better cut: {constraint.where} is the tightest, {here}"
    return f"may hold it: {constraint.kind} {_fitted(constraint.where)}, {here}"


def _binding(explanation: Explanation) -> Iterator[str]:
    """Yield the constraints without which the step is shorter, or that none of those tried is."""
    tried = [w for w in explanation.what_ifs if w.kind in _REMOVALS and w.after is not None]
    # Only planning again tells whether a constraint binds: the best cut may lie within it anyway.
    binding = [what_if for what_if in tried if _gain(explanation, what_if) > 0]
    for what_if in binding:
        gain = f"{_gain(explanation, what_if):.1%}"
        yield f"binds: {_fitted(what_if.change)}, the step is {gain} shorter"
    if tried and not binding:
        yield "none of the constraints binds: without each the step is no shorter"


def _gain(explanation: Explanation, what_if: WhatIf) -> float:
    """Return by what share of itself the step becomes shorter."""
    assert what_if.after is not None
    return 1 - what_if.after.step_ns / max(explanation.before.step_ns, 1)


# What would change it


def _changes(explanation: Explanation) -> Iterator[list[str]]:
    """Yield the figures of the plan, then those of each change."""
    before, unit = explanation.before, explanation.time_unit
    yield ["change", "step", "", "bubble", "heaviest load", "memory at most"]
    yield ["as it is", *_figures(before, "", unit)]
    for what_if in explanation.what_ifs:
        if what_if.after is not None:
            change, step = _fitted(what_if.change), _signed(-_gain(explanation, what_if))
            yield [change, *_figures(what_if.after, step, unit)]


def _fitted(text: str) -> str:
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 1]}…"


def _signed(share: float) -> str:
    """Return a change in percent; one that rounds to nothing has no sign."""
    # −0.0003 would be "-0.0%", which looks like a gain.
    text = f"{share:+.1%}"
    return text if text.strip("+-") != "0.0%" else "0.0%"


def _figures(outcome: Outcome, change: str, unit: TimeUnit) -> list[str]:
    step, load = time_text(outcome.step_ns, unit), time_text(outcome.load_ns, unit)
    return [step, change, f"{outcome.bubble:.1%}", load, size_text(outcome.bound)]


def _refused(explanation: Explanation) -> Iterator[str]:
    """Yield by how much the next-best cut is worse, and why there is no plan with some changes."""
    for what_if in explanation.what_ifs:
        change = what_if.change  # whole: lines wrap
        if what_if.after is None:
            yield f"{_fitted(change)}: {what_if.reason}"
        elif what_if.kind == "next cut":
            loss = what_if.after.value / max(explanation.before.value, 1) - 1
            more = f"{gap_text(loss)} more" if loss > 0 else "no more"
            yield f"{change}, {explanation.objective} is {more}"
