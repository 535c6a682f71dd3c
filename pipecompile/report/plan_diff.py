"""Two plans compared: each thing that differs, with its value before and after.

What follows from something else that is listed, such as the tensors at a boundary that moved, is
left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from pipecompile.ir.amount import Amount
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.options import OPTIONS
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.plurals import counted
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.serialization import Value
from pipecompile.ir.setting import JointSearch
from pipecompile.ir.stage import Stage
from pipecompile.report.joint import STATUS_TEXTS
from pipecompile.report.recompute import encoding_texts, recompute_text, region_texts
from pipecompile.report.stage_moves import StageMove, move_text, moved_modules, moved_nodes

__all__ = ["ChangeKind", "ComparedPlans", "PlanChange", "PlanDiff", "compare_plans"]

ChangeKind = Literal[
    "step",
    "bubble",
    "memory",
    "load",
    "move",
    "copies",
    "recompute",
    "schedule",
    "search",
    "choice",
    "option",
    "links",
    "model",
    "costs",
    "other",
]
"""What differs, in the order of the list: what comes out, what was decided, what was given.

`other` is what no other kind covers; it is listed only if nothing else differs.
"""

_SHOWN_ACTIONS = 4


class PlanChange(Value, frozen=True, kw_only=True):
    """One thing that differs between two plans: where, and its value before and after.

    Times are in the time unit of their plan, memory is what is expected and bound, in bytes. Stages
    of a move are a number, or several for a module that is cut; None where a plan lacks the module.
    """

    kind: ChangeKind
    where: str
    before: Any
    after: Any


class PlanDiff(Value, frozen=True, kw_only=True):
    """All changes from an old plan to a new one; none if the plans are the same.

    `notes` say what cannot be compared, and how it is compared instead. `time_units` are those of
    the old and of the new plan.
    """

    changes: tuple[PlanChange, ...]
    notes: tuple[str, ...] = ()
    time_units: tuple[TimeUnit, TimeUnit] = ("ns", "ns")

    @property
    def same(self) -> bool:
        """Whether the two plans have the same content."""
        return not self.changes


class ComparedPlans(Value, frozen=True, kw_only=True):
    """The result of `pipecompile diff`: the paths of two plans, and how these differ."""

    old: str
    new: str
    same: bool
    changes: tuple[PlanChange, ...]
    notes: tuple[str, ...]
    time_units: tuple[TimeUnit, TimeUnit]

    @classmethod
    def of(cls, old: str, new: str, diff: PlanDiff) -> ComparedPlans:
        """Return the result for the plans in the files at `old` and `new`."""
        return cls(
            old=old,
            new=new,
            same=diff.same,
            changes=diff.changes,
            notes=diff.notes,
            time_units=diff.time_units,
        )


def compare_plans(old: Plan, new: Plan) -> PlanDiff:
    """Return what differs between two plans, what matters first."""
    if old == new:
        return PlanDiff(changes=())
    moved, notes = _moves(old, new)
    schedule = list(_schedule(old, new))
    # In the order of ChangeKind: texts put neighbours of one kind under one heading.
    changes = [
        *_step(old, new),
        *_memory(old, new),
        *_loads(old, new),
        *moved,
        *_copies(old, new),
        *_recompute(old, new),
        *schedule,
        *_fields("search", old.search, new.search, ["gap", "proven"]),
        *_choice(old.joint, new.joint),
        *_options(old.options, new.options, schedule),
        *_changed("links", "links", old.links, new.links),
        *_model(old, new),
        *_costs(old, new),
    ]
    return PlanDiff(
        # Of an edited plan only consequences may differ: they must not pass unseen.
        changes=tuple(changes or _other(old, new)),
        notes=(*_size_notes(old, new), *notes),
        time_units=(old.time_unit, new.time_unit),
    )


def _changed(kind: ChangeKind, where: str, before: Any, after: Any) -> Iterator[PlanChange]:
    """Yield the change if there is one."""
    if before != after:
        yield PlanChange(kind=kind, where=where, before=before, after=after)


def _fields(
    kind: ChangeKind, old: msgspec.Struct, new: msgspec.Struct, names: Sequence[str] = ()
) -> Iterator[PlanChange]:
    """Yield the fields of two values of one type that differ: all of them, or those in `names`."""
    for name in names or old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        yield from _changed(kind, name.replace("_", " "), before, after)


def _size_notes(old: Plan, new: Plan) -> Iterator[str]:
    """Yield what cannot be compared number by number."""
    if old.ranks != new.ranks:
        yield (
            f"the plans are for {old.ranks} and {counted(new.ranks, 'rank')}: of memory and loads "
            "the largest of all ranks is compared"
        )
    if old.k != new.k:
        yield (
            f"the plans have {old.k} and {counted(new.k, 'stage')}: recompute is compared for all "
            "stages together"
        )
    if old.time_unit != new.time_unit:
        yield "only one plan has times in seconds: times have no relative change"


def _step(old: Plan, new: Plan) -> Iterator[PlanChange]:
    before, after = old.prediction, new.prediction
    yield from _changed("step", "step", before.step_ns, after.step_ns)
    spans = before.span_ns, after.span_ns
    # A rank that is busy from the first action to the last has the step as its span.
    if spans != (before.step_ns, after.step_ns):
        yield from _changed("step", "largest span", *spans)
    yield from _changed("bubble", "bubble", before.bubble, after.bubble)


def _memory(old: Plan, new: Plan) -> Iterator[PlanChange]:
    """Yield what ranks hold at their peaks, and of each the kinds that differ."""
    # Rank 1 of two runs other stages than rank 1 of four: only the largest ranks can be compared.
    before, after = old.prediction.memory, new.prediction.memory
    if old.ranks != new.ranks:
        yield from _changed("memory", "largest rank", _largest(before), _largest(after))
        return
    for rank, (left, right) in enumerate(zip(before, after, strict=True)):
        yield from _changed("memory", f"rank {rank}", left.total, right.total)
        for kind in RankMemory.__struct_fields__:
            held = getattr(left, kind), getattr(right, kind)
            yield from _changed("memory", f"rank {rank} {kind}", *held)


def _largest(memory: Sequence[RankMemory]) -> Amount:
    totals = [rank.total for rank in memory]
    return Amount(
        expected=max(total.expected for total in totals), bound=max(total.bound for total in totals)
    )


def _loads(old: Plan, new: Plan) -> Iterator[PlanChange]:
    before, after = old.prediction.loads_ns, new.prediction.loads_ns
    if old.ranks != new.ranks:
        yield from _changed("load", "largest rank", max(before), max(after))
        return
    for rank, (left, right) in enumerate(zip(before, after, strict=True)):
        yield from _changed("load", f"rank {rank}", left, right)


def _moves(old: Plan, new: Plan) -> tuple[list[PlanChange], list[str]]:
    """Return what lies in other stages, and a note where nodes cannot be compared."""
    # Names of nodes are numbered through the graph: add_7 of one model may be add_8 of the other.
    if old.assignment.keys() == new.assignment.keys():
        return [_move(move, move_text(move, old)) for move in moved_nodes(old, new)], []
    moved = moved_modules(old, new)
    if moved is None:
        return [], ["the plans share no module: stages are not compared"]
    note = "the plans are for different graphs: stages are compared by module"
    return [_move(move, _ends(move)) for move in moved], [note]


def _ends(move: StageMove) -> str:
    return move.first if move.first == move.last else f"{move.first} … {move.last}"


def _move(move: StageMove, where: str) -> PlanChange:
    before, after = _stages(move.before), _stages(move.after)
    return PlanChange(kind="move", where=where, before=before, after=after)


def _stages(stages: tuple[int, ...]) -> int | tuple[int, ...] | None:
    return (stages[0] if len(stages) == 1 else stages) if stages else None


def _copies(old: Plan, new: Plan) -> Iterator[PlanChange]:
    """Yield the nodes that only one of the plans has in several stages."""
    if old.copied != new.copied:
        before, after = (
            tuple(sorted(old.copied - new.copied)),
            tuple(sorted(new.copied - old.copied)),
        )
        yield PlanChange(kind="copies", where="run in several stages", before=before, after=after)


def _recompute(old: Plan, new: Plan) -> Iterator[PlanChange]:
    """Yield what stages recompute and encode, and the time that this adds to a microbatch."""
    if old.k != new.k:
        counts = [sum(stage.recompute != "none" for stage in plan.stages) for plan in (old, new)]
        if any(counts):
            texts = (f"{count} of {plan.k}" for count, plan in zip(counts, (old, new), strict=True))
            yield from _changed("recompute", "stages that recompute", *texts)
        extra = (sum(stage.extra_ns for stage in plan.stages) for plan in (old, new))
        yield from _changed("recompute", "all stages, extra time", *extra)
        return
    for index, (before, after) in enumerate(zip(old.stages, new.stages, strict=True)):
        yield from _recompute_of_stage(f"stage {index}", before, after)


def _recompute_of_stage(where: str, old: Stage, new: Stage) -> Iterator[PlanChange]:
    # Not by the text alone: it also says of how many nodes, which may differ by itself.
    if (old.recompute, old.regions) != (new.recompute, new.regions):
        yield from _changed("recompute", where, recompute_text(old), recompute_text(new))
        yield from _differing(f"{where}, regions", region_texts(old), region_texts(new))
    encodings = encoding_texts(old), encoding_texts(new)
    yield from _differing(f"{where}, encodings", *encodings)
    yield from _changed("recompute", f"{where}, extra time", old.extra_ns, new.extra_ns)


def _differing(where: str, old: Iterable[str], new: Iterable[str]) -> Iterator[PlanChange]:
    """Yield what only one of two lists has."""
    before, after = list(old), list(new)
    yield from _changed(
        "recompute",
        where,
        tuple(text for text in before if text not in after),
        tuple(text for text in after if text not in before),
    )


def _schedule(old: Plan, new: Plan) -> Iterator[PlanChange]:
    """Yield name and size of the schedule; where these are the same, the orders of ranks."""
    before, after = old.schedule, new.schedule
    yield from _changed("schedule", "schedule", before.name, after.name)
    sizes = ("k", "ranks", "stages_per_rank", "replicas", "microbatches")
    yield from _fields("schedule", old, new, sizes)
    if old.k == new.k and old.ranks == new.ranks:
        yield from _changed("schedule", "ranks of stages", before.placement, after.placement)
    yield from _fields("schedule", before, after, ["weight_versions"])
    # Orders of another name, placement or number of microbatches differ in nearly all of their
    # actions: to list where they begin to would say nothing.
    shapes = [(s.name, s.placement, s.microbatches) for s in (before, after)]
    if shapes[0] == shapes[1]:
        for rank, rows in enumerate(zip(before.compute, after.compute, strict=True)):
            yield from _order(rank, *(list(map(str, row)) for row in rows))


def _order(rank: int, old: Sequence[str], new: Sequence[str]) -> Iterator[PlanChange]:
    """Yield the first actions by which two orders of a rank differ."""
    pairs = enumerate(zip(old, new, strict=False))
    # One of them may be the beginning of the other.
    # 0F0 0F1 0B0 0F2 and 0F0 0F1 0F2 0B0 differ from action 2 on: 0B0 0F2 before, and 0F2 0B0
    # after.
    first = next((at for at, (one, other) in pairs if one != other), min(len(old), len(new)))
    before, after = (tuple(row[first : first + _SHOWN_ACTIONS]) for row in (old, new))
    yield from _changed("schedule", f"order of rank {rank}, action {first}", before, after)


def _choice(old: JointSearch | None, new: JointSearch | None) -> Iterator[PlanChange]:
    """Yield what differs of a choice among settings; of one setting after the other how many."""
    if old is None or new is None:
        counts = (None if each is None else each.settings for each in (old, new))
        yield from _changed("choice", "settings", *counts)
        return
    yield from _fields("choice", old, new, ["devices", "settings"])
    yield from _changed("choice", "no step below", old.bound_ns, new.bound_ns)
    yield from _fields("choice", old, new, ["gap"])
    for status in sorted({*old.counts, *new.counts}):
        counts = (each.counts.get(status, 0) for each in (old, new))
        yield from _changed("choice", f"settings, {STATUS_TEXTS[status]}", *counts)
    yield from _changed("choice", "settings listed as best", len(old.best), len(new.best))


def _options(old: Options, new: Options, schedule: Sequence[PlanChange]) -> Iterator[PlanChange]:
    """Yield the options that differ, by their names in Python; not those that the schedule says."""
    # With k 4 → 8 the schedule says "k: 4 → 8", and the option k would say it again.
    said = {(change.where.replace(" ", "_"), change.before, change.after) for change in schedule}
    names = {option.field: option.name for option in OPTIONS if option.field is not None}
    for field in Options.__struct_fields__:
        name, before, after = names.get(field, field), getattr(old, field), getattr(new, field)
        if isinstance(before, dict):
            # The stages of nodes: one line for each node, as on the command line.
            for key in sorted(before.keys() | after.keys()):
                yield from _changed("option", f"{name} {key}", before.get(key), after.get(key))
        elif (name, before, after) not in said:
            yield from _changed("option", name, before, after)


def _model(old: Plan, new: Plan) -> Iterator[PlanChange]:
    yield from _changed("model", "fingerprint", old.fingerprint.graph, new.fingerprint.graph)
    yield from _fields("model", old, new, ["microbatch_shapes"])
    for change in _fields("model", old.capture, new.capture):
        yield msgspec.structs.replace(change, where=f"capture, {change.where}")


def _costs(old: Plan, new: Plan) -> Iterator[PlanChange]:
    yield from _changed("costs", "fingerprint", old.fingerprint.costs, new.fingerprint.costs)
    yield from _fields("costs", old, new, ["time_unit", "allocator"])


def _other(old: Any, new: Any, path: str = "") -> Iterator[PlanChange]:
    """Yield all that differs, by its path in the files."""
    if isinstance(old, msgspec.Struct):
        # By the names in the file: `blocks` of a stage is written as `nodes`.
        fields = zip(old.__struct_fields__, old.__struct_encode_fields__, strict=True)
        parts = [(f"{path}.{shown}", getattr(old, f), getattr(new, f)) for f, shown in fields]
    elif isinstance(old, tuple) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        parts = [(f"{path}[{index}]", *pair) for index, pair in pairs]
    else:
        yield from _changed("other", path.removeprefix("."), old, new)
        return
    for where, before, after in parts:
        if before != after:
            yield from _other(before, after, where)
