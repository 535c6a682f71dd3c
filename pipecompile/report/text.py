"""A plan for people: plain text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile

from pipecompile.ir.encodings import POLICIES
from pipecompile.ir.links import Link, Links
from pipecompile.ir.plan import Plan, Stage
from pipecompile.ir.schedule import BACKWARDS, Event, Idle, Kind, Timeline
from pipecompile.memory_model.rank import memory_by_stage

__all__ = [
    "EXTRA",
    "again_text",
    "bar",
    "cap_text",
    "extra_texts",
    "form_texts",
    "gap_text",
    "idle_shares",
    "is_bounded",
    "link_text",
    "links_text",
    "objective_text",
    "own_texts",
    "region_texts",
    "size_text",
    "summary",
    "table",
    "time_text",
    "timeline_text",
]

_MODULES_WIDTH = 26  # what 100 columns leave in the table of stages
_TYPICAL = 1 << 20  # bytes of a message by which links are compared
_BAR = " ▏▎▍▌▋▊▉█"


def time_text(nanoseconds: float) -> str:
    """A time in the unit in which it reads best."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(nanoseconds) >= scale:
            return f"{nanoseconds / scale:.1f} {unit}"
    return f"{nanoseconds:.0f} ns"


def size_text(size: int) -> str:
    """A number of bytes in the unit in which it reads best."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def summary(plan: Plan) -> str:
    """What `plan` and `show` print: quality, stages, ranks, budgets, regions, forms, relays, ties."""
    parts = [
        _header(plan),
        _stages(plan),
        _ranks(plan),
        _budgets(plan),
        _by_stage("regions that are computed again", region_texts, plan),
        _by_stage("saved in other forms", form_texts, plan),
        _routes(plan),
        _tied(plan),
    ]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part) + "\n"


def _header(plan: Plan) -> Iterator[str]:
    loads, prediction = plan.prediction.loads_ns, plan.prediction
    mean = sum(loads) / len(loads)
    again = "" if plan.options.recompute == "none" else f", recompute {plan.options.recompute}"
    cut = _GRANULARITIES[plan.options.granularity]
    yield f"{plan.k} stages on {plan.ranks} ranks, {plan.schedule.name}, {plan.microbatches} microbatches{again}{cut}"
    yield f"  step       {time_text(prediction.step_ns)}, bubble {prediction.bubble:.1%}"
    yield f"  imbalance  {max(loads) / mean if mean else 1:.3f} (largest load / mean load)"
    yield f"  objective  {_objective(plan)}"
    yield from _all_objectives(plan)
    yield from _ordering(plan)
    yield f"  costs      {plan.options.costs}; time is simulated from them"
    yield f"  links      {links_text(plan.links)}"
    yield from (f"             {text}" for text in own_texts(plan.links))
    yield f"  memory     {cap_text(plan)}; predicted for {_ALLOCATORS[plan.allocator]}; {_optimizer_text(plan)}"
    if plan.options.memory_bytes is None and (
        plan.options.recompute == "auto" or plan.options.saving
    ):
        yield "  note       without a memory budget nothing is computed again, or saved in another form"
    yield from _forms(plan)
    proof = "verified against the model" if plan.capture.verified else "unverified capture"
    yield f"  capture    {proof}" + (
        "" if plan.capture.method == "recorded" else f"; {plan.capture.method}"
    )
    yield from (f"             {note}" for note in plan.capture.notes)


_GRANULARITIES = {
    "operators": "",
    "modules": ", cut between modules",
    "blocks": ", cut between blocks",
    "auto": ", blocks opened as needed",
}
_ALLOCATORS = {"cpu": "a CPU", "cuda": "a GPU, bound not proven"}


def _forms(plan: Plan) -> Iterator[str]:
    """Other forms in which stages save, if they may."""
    used = {policy for stage in plan.stages for run in stage.saving for policy in run.policies}
    if used or plan.options.saving:
        exact = ", not exact" if "half" in used else ""
        yield f"  saving     {', '.join(policy for policy in POLICIES if policy in used) or 'not needed'}{exact}"


def cap_text(plan: Plan) -> str:
    """What each rank may hold, if that is one size for all."""
    caps = set(plan.options.caps(plan.ranks) or ())
    return (
        f"cap {size_text(caps.pop())} a rank"
        if len(caps) == 1
        else "a cap for each rank"
        if caps
        else "no cap"
    )


def _optimizer_text(plan: Plan) -> str:
    """Whose state is counted."""
    if plan.options.optimizer is None:
        return "no optimizer named"
    return f"with the state of {plan.options.optimizer}{' and master weights' * plan.options.master_weights}"


def links_text(links: Links) -> str:
    """How ranks are connected, from the slowest to the fastest link."""
    found = sorted(
        {link for *_, link in links.pairs()},
        key=lambda link: link.transfer_ns(_TYPICAL),
        reverse=True,
    )
    if found in ([], [Link()]):
        return "free: none given"
    return " – ".join(map(link_text, dict.fromkeys([found[0], found[-1]])))


def own_texts(links: Links) -> Iterator[str]:
    """What a message takes of the ranks themselves, where it takes anything."""
    for action, link in (("sending", links.sending), ("receiving", links.receiving)):
        if link != Link():
            yield f"{action} keeps a rank for {link_text(link)}"


def link_text(link: Link) -> str:
    """Bandwidth and latency."""
    rate = link.bandwidth_bytes_per_s
    return (
        f"{'any size' if rate is None else f'{rate / 1e9:.1f} GB/s'} + {time_text(link.latency_ns)}"
    )


def _ordering(plan: Plan) -> Iterator[str]:
    """What the search for a schedule found, beside the best named one."""
    ordering = plan.ordering
    if ordering is None:
        return
    found, bound = time_text(ordering.searched_ns), time_text(ordering.bound_ns)
    best = min(ordering.named_ns, key=ordering.named_ns.__getitem__, default=None)
    if best is None:
        yield f"  order      searched: {found}, bound {bound}; no named schedule fits the memory"
        return
    gain = 1 - ordering.searched_ns / max(ordering.named_ns[best], 1)
    named = f"best named {best} {time_text(ordering.named_ns[best])}"
    fate = "" if ordering.kept else ", does not survive noise"
    change = f"search {found} ({-gain:+.1%}){fate}" if gain > 0 else "search found none shorter"
    yield f"  order      {named}, {change}; bound {bound}"


def _objective(plan: Plan) -> str:
    search = plan.search
    value, bound = (
        objective_text(search.objective, number) for number in (search.value, search.bound)
    )
    proof = "proven" if search.proven else "not proven"
    label = "variance, Σ load²" if search.objective == "variance" else search.objective
    return f"{label} {value}, bound {bound}, gap {gap_text(search.gap)}, {proof} ({search.method})"


def _all_objectives(plan: Plan) -> Iterator[str]:
    """What the cut is worth by each objective, and another objective if its cut is faster.

    Loads stand here as the objectives measure them: transfers count, unlike in the table of stages.
    """
    names = {"max_load_ns": ("max load", "max-load"), "sum_of_squares_ns2": ("Σ load²", "variance")}
    values = plan.search.values
    texts = [
        f"{label} {objective_text(kind, values[name])}"
        for name, (label, kind) in names.items()
        if name in values
    ]
    if texts and plan.links.one != Link():
        texts[-1] += " with transfers"
    if "step_ns" in values:
        texts.append(f"simulated step {time_text(values['step_ns'])}")
    if texts:
        yield f"             {', '.join(texts)}"
    faster = plan.search.faster
    if faster is not None:
        change = faster.step_ns / max(plan.prediction.step_ns, 1) - 1
        step = f"the simulated step to {time_text(faster.step_ns)} ({change:+.1%})"
        yield f"  note       objective {faster.objective} would shorten {step}"


def objective_text(objective: str, value: int) -> str:
    """A value of an objective with its unit."""
    if objective != "variance":
        return time_text(value)
    unit, scale = (
        ("s²", 1e18) if value >= 1e18 else ("ms²", 1e12) if value >= 1e12 else ("µs²", 1e6)
    )
    return f"{value / scale:,.1f} {unit}"


def gap_text(gap: float) -> str:
    """A gap in percent; a small one is not printed as none."""
    return "<0.01%" if 0 < gap < 1e-4 else f"{gap:.2%}"


def _stages(plan: Plan) -> Iterator[str]:
    loads = [plan.prediction.loads_ns[rank] for rank in plan.schedule.placement]
    total, largest = max(sum(loads), 1), max(*loads, 1)
    rows = [
        ["stage", "modules", "nodes", "forward", "backward", "load", "", "share", "params", "sends"]
    ]
    sizes = {parameter.name: parameter.bytes for parameter in plan.parameters}
    for index, (stage, load) in enumerate(zip(plan.stages, loads, strict=True)):
        held = size_text(sum(sizes.get(name, 0) for name in stage.parameters))
        times = [time_text(time) for time in (stage.forward_ns, stage.backward_ns, load)]
        filled, share = bar(load / largest, 5), f"{load / total:.1%}"
        rows.append(
            [
                str(index),
                _modules(stage),
                str(len(stage.nodes)),
                *times,
                filled,
                share,
                held,
                _sends(stage),
            ]
        )
    return table(rows, left={1, 6})


def _modules(stage: Stage) -> str:
    """The modules of a stage, or from the first to the last of them where not all fit."""
    names = stage.modules or (stage.nodes[0], stage.nodes[-1])
    text = ", ".join(names)
    if len(text) > _MODULES_WIDTH:
        first, last = names[0].split("."), names[-1].split(".")
        shared = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
        )
        text = (
            f"{names[0]} … {'.'.join(last[shared:])}"
            if len(names) > 1 and last[shared:]
            else names[0]
        )
    return text if len(text) <= _MODULES_WIDTH else f"…{text[1 - _MODULES_WIDTH :]}"


def _sends(stage: Stage) -> str:
    return size_text(sum(tensor.bytes for tensor in stage.outputs)) if stage.outputs else ""


def bar(part: float, width: int) -> str:
    """A bar of `width` columns, of which `part` is filled, to the eighth of a column."""
    eighths = round(part * width * 8)
    return ("█" * (eighths // 8) + _BAR[eighths % 8]).rstrip().ljust(width)


def _ranks(plan: Plan) -> Iterator[str]:
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace")
    rows = [["rank", "idle", *kinds, "expected", "bound"]]
    for rank, (memory, idle) in enumerate(
        zip(plan.prediction.memory, plan.prediction.idle, strict=True)
    ):
        share = idle.total_ns / max(plan.prediction.step_ns, 1)
        held = [size_text(getattr(memory, kind).expected) for kind in kinds]
        rows.append(
            [
                str(rank),
                f"{share:.1%}",
                *held,
                size_text(memory.total.expected),
                size_text(memory.total.bound),
            ]
        )
        rows += [
            [name, "", *map(size_text, sizes), ""]
            for name, sizes in stage_shares(plan, rank, kinds)
        ]
    return table(rows, left=set())


def stage_shares(plan: Plan, rank: int, kinds: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """What the stages of a rank that has several hold at its peak: a name, bytes by kind, and all of them."""
    shares = memory_by_stage(plan, rank)
    for index, share in shares.items() if len(shares) > 1 else ():
        yield (
            f"stage {index}",
            [*(getattr(share, kind).expected for kind in kinds), share.total.expected],
        )


def _budgets(plan: Plan) -> Iterator[str]:
    """What each stage's rank may hold and has left, and what the stage computes again; nothing if there is neither."""
    caps = plan.options.caps(plan.ranks)
    if caps is None and all(
        stage.recompute == "none" and not stage.saving for stage in plan.stages
    ):
        return iter(())
    titles = ["stage", "computed again", *EXTRA, *["at least"] * is_bounded(plan)]
    rows = [[*titles, *["rank", "budget", "bound", "left"] * bool(caps)]]
    for index, (stage, rank) in enumerate(zip(plan.stages, plan.schedule.placement, strict=True)):
        row = [str(index), again_text(stage), *extra_texts(stage, bounded=is_bounded(plan))]
        if caps is not None:
            bound = plan.prediction.memory[rank].total.bound
            row += [str(rank), *map(size_text, (caps[rank], bound, caps[rank] - bound))]
        rows.append(row)
    return table(rows, left={1})


def again_text(stage: Stage) -> str:
    """What a stage computes again, and whether it saves anything in another form."""
    forms = ", other forms" if stage.saving else ""
    if stage.recompute != "regions":
        texts = {"none": "nothing", "stage": "all", "except-last": "all but the last microbatch"}
        return f"{texts[stage.recompute]}{forms}"
    count, inside = len(stage.regions), len(set(chain.from_iterable(stage.regions)))
    return f"{inside} of {len(stage.nodes)} nodes in {count} region{'s' * (count > 1)}{forms}"


EXTRA = ("extra time", "of forward")


def extra_texts(stage: Stage, *, bounded: bool) -> list[str]:
    """The time that this takes for a microbatch, as a share of the stage's forward, and if `bounded` what is proven.

    Empty if there is none.
    """
    if stage.recompute == "none" and not stage.saving:
        return [""] * (2 + bounded)
    found = [time_text(stage.extra_ns), f"{stage.extra_ns / max(stage.forward_ns, 1):.1%}"]
    return [*found, *[time_text(stage.recompute_bound_ns)] * bounded]


def is_bounded(plan: Plan) -> bool:
    """Whether the least time is searched for that stages take to fit, so that there is a bound to it."""
    return plan.options.recompute == "auto"


def _by_stage(title: str, texts: Callable[[Stage], Iterable[str]], plan: Plan) -> list[str]:
    """A line for each stage that has any of what the title says."""
    rows = [(index, ", ".join(texts(stage))) for index, stage in enumerate(plan.stages)]
    lines = [_fitted(f"  stage {index:>2}  {text}", 100) for index, text in rows if text]
    return [title, *lines] if lines else []


def region_texts(stage: Stage) -> Iterator[str]:
    """Each region of a stage by its first and its last node."""
    return map(_ends, stage.regions)


def form_texts(stage: Stage) -> Iterator[str]:
    """Each run of nodes that saves in other forms, with these."""
    return (f"{_ends(run.nodes)} ({', '.join(run.policies)})" for run in stage.saving)


def _ends(nodes: Sequence[str]) -> str:
    """A run by its first and its last node."""
    return f"{nodes[0]} … {nodes[-1]}" if len(nodes) > 1 else nodes[0]


def _routes(plan: Plan) -> list[str]:
    sizes = {tensor.name: tensor.bytes for stage in plan.stages for tensor in stage.outputs}
    lines = (
        f"  {_fitted(route.name, 50)}  {' → '.join(map(str, route.stages))}  {size_text(sizes.get(route.name, 0))}"
        for route in plan.routes
    )
    return ["relayed through the stages between", *lines] if plan.routes else []


def _tied(plan: Plan) -> list[str]:
    lines = [
        _fitted(f"  {parameter.name} = {', '.join(parameter.aliases)}", 60)
        + f"  {size_text(parameter.bytes)}, stages {', '.join(map(str, parameter.stages))}, owner {parameter.owner}"
        for parameter in plan.parameters
        if parameter.aliases or len(parameter.stages) > 1
    ]
    return ["tied parameters", *lines] if lines else []


def _fitted(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def table(rows: Sequence[Sequence[str]], left: set[int]) -> Iterator[str]:
    """The lines of a table; columns are as wide as need be, those of `left` begin at the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.ljust(w) if column in left else cell.rjust(w)
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        yield " ".join(cells).rstrip()


def idle_shares(idle: Idle, makespan_ns: int) -> list[str]:
    """All idle time and that of each cause (dependency, transfer, memory, imbalance), as shares of the step."""
    spent = [idle.total_ns, idle.dependency_ns, idle.transfer_ns, idle.memory_ns, idle.imbalance_ns]
    return [f"{time / max(makespan_ns, 1):.1%}" for time in spent]


def timeline_text(timeline: Timeline, width: int = 90) -> str:
    """One line a rank, time from left to right: 0 1 2 forwards, a b c backwards, r recompute, · idle."""
    scale = width / max(timeline.makespan_ns, 1)
    lines = [
        f"rank {rank:>2} {_line(row, scale, width)}" for rank, row in enumerate(timeline.events)
    ]
    return (
        "\n".join([*lines, "        0 1 2 … forward   a b c … backward   r recompute   · idle"])
        + "\n"
    )


def _line(row: Sequence[Event], scale: float, width: int) -> str:
    cells = ["·"] * width
    for event in row:
        begin, end = int(event.start_ns * scale), int(event.end_ns * scale)
        cells[begin:end] = _letter(event) * (end - begin)
    return "".join(cells)


def _letter(event: Event) -> str:
    number = (event.action.microbatch or 0) % 10
    if event.action.kind is Kind.FORWARD:
        return str(number)
    if event.action.kind is Kind.BACKWARD_WEIGHT:
        return "w"
    return "abcdefghij"[number] if event.action.kind in BACKWARDS else "r"
