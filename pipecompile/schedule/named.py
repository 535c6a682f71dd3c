"""The named schedules: what each needs, and its order of compute actions. docs/schedules.md compares them.

On every stage the forwards, and likewise the backwards, take the microbatches in ascending order, so that gradients
are summed in the order of the unsplit run. A stage that recomputes runs its forward once more (R) right before each
backward, or each but that of the step's last microbatch (torchgpipe, arXiv 2004.09910). The last stage never
recomputes: its backward follows its forward at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipecompile.errors import InputError
from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.schedule.asynchronous import (
    DOUBLE_BUFFERED,
    STASHED,
    VERTICAL_SYNC,
    VersionRule,
    with_versions,
)
from pipecompile.schedule.flush import forward_only, gpipe, interleaved, one_f_one_b
from pipecompile.schedule.placement import place, shapes_of
from pipecompile.schedule.recompute import insert_recomputes
from pipecompile.schedule.tasks import Layout, Task, layout_of, numbered
from pipecompile.schedule.v_shaped import dualpipe_v, v_half, v_min, zb_v
from pipecompile.schedule.zero_bubble import zb_h1, zb_h2

__all__ = [
    "ASYNCHRONOUS",
    "MAY_SPLIT",
    "NAMES",
    "SPLIT",
    "fitting_names",
    "generate",
    "peak_in_flight",
    "required_placement",
]

Generator = Callable[[Layout, int], Sequence[Iterable[Task]]]


def _by_rank(turns: Callable[[Layout, int, int], Iterable[Task]]) -> Generator:
    return lambda layout, microbatches: [
        turns(layout, rank, microbatches) for rank in range(len(layout))
    ]


@dataclass(frozen=True, slots=True)
class _NamedSchedule:
    """A schedule and what it needs: a shape, stages on each rank, microbatches for each rank; None for any number."""

    generator: Generator
    shape: str = "linear"
    stages_per_rank: int | None = 1
    microbatches_per_rank: int | None = None
    split: bool = False
    version_rule: VersionRule | None = None


_NAMED = {
    "gpipe": _NamedSchedule(_by_rank(gpipe), "any", None),
    "1f1b": _NamedSchedule(_by_rank(one_f_one_b), "linear", None),
    "interleaved-1f1b": _NamedSchedule(_by_rank(interleaved), "loop", None),
    "looped-bfs": _NamedSchedule(_by_rank(gpipe), "loop", None),
    "zb-h1": _NamedSchedule(_by_rank(zb_h1), split=True),
    "zb-h2": _NamedSchedule(_by_rank(zb_h2), split=True),
    "zb-v": _NamedSchedule(zb_v, "v", 2, split=True),
    "v-half": _NamedSchedule(v_half, "v", 2, split=True),
    "v-min": _NamedSchedule(v_min, "v", 2, split=True),
    "dualpipe-v": _NamedSchedule(_by_rank(dualpipe_v), "v", 2, 2, split=True),
    "pipedream": _NamedSchedule(_by_rank(one_f_one_b), version_rule=STASHED),
    "pipedream-vertical-sync": _NamedSchedule(_by_rank(one_f_one_b), version_rule=VERTICAL_SYNC),
    "pipedream-2bw": _NamedSchedule(_by_rank(one_f_one_b), version_rule=DOUBLE_BUFFERED),
    "forward-only": _NamedSchedule(_by_rank(forward_only), "any", None),
}
NAMES: tuple[str, ...] = tuple(_NAMED)
SPLIT = frozenset(name for name, named in _NAMED.items() if named.split)
"""Those that split some or all of their backwards in two."""
MAY_SPLIT = SPLIT | {"search"}
"""With those whose order is not known before it is searched for."""
ASYNCHRONOUS = frozenset(name for name, named in _NAMED.items() if named.version_rule)
"""Those that update the weights while microbatches are on their way."""


def required_placement(name: str) -> tuple[str, int | None]:
    """The placement for `name`: linear, loop, v or any, and how many stages lie on each rank, None for any number."""
    named = _named(name)
    return named.shape, named.stages_per_rank


def fitting_names(placement: Sequence[int], microbatches: int) -> tuple[str, ...]:
    """The schedules that train on this placement with the gradients of the unsplit model: no asynchronous ones."""
    training = (name for name in NAMES if name != "forward-only" and name not in ASYNCHRONOUS)
    return tuple(
        n
        for n in training
        if _is_shaped(n, placement) and microbatches >= _least_microbatches(n, placement)
    )


def generate(
    name: str,
    placement: Sequence[int],
    microbatches: int,
    recompute: Sequence[bool] | bool = False,
    *,
    except_last: Sequence[bool] | bool = False,
) -> Schedule:
    """The compute actions of schedule `name`, and the optimizer's steps if it is asynchronous.

    `placement[stage]` is the stage's rank. `recompute` says for each stage, or for all, whether the forward runs
    again before the backward; `but_last`, alike: not that of the step's last microbatch. InputError says what does not
    fit and what would.
    """
    stages, version_rule = len(placement), _named(name).version_rule
    again, spared = (
        [each] * stages if isinstance(each, bool) else list(each)
        for each in (recompute, except_last)
    )
    assert len(again) == len(spared) == stages, "one entry for each stage"
    again[-1] = False
    last = microbatches - 1
    rows = zip(layout_of(placement), _rows(name, placement, microbatches), strict=True)
    by_rank = {
        placement[held[0]]: list(
            insert_recomputes(
                row, lambda a: again[a.stage] and not (spared[a.stage] and a.microbatch == last)
            )
        )
        for held, row in rows
    }
    return Schedule.of(
        name,
        microbatches,
        placement,
        [by_rank.get(rank, []) for rank in range(max(placement) + 1)],
        version_rule.weight_versions if version_rule else "synchronous",
    )


def peak_in_flight(name: str, placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """For each stage, how many microbatches it holds between forward and B or W at most, by the schedule's own order.

    An evaluation lets each go at once. InputError as in `generate`.
    """
    held, peak = [0] * len(placement), [0] * len(placement)
    released = {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}
    for row in _rows(name, placement, microbatches):
        for action in row:
            held[action.stage] += (action.kind is Kind.FORWARD) - (action.kind in released)
            peak[action.stage] = max(peak[action.stage], held[action.stage])
    return (1,) * len(placement) if name == "forward-only" else tuple(peak)


def _rows(name: str, placement: Sequence[int], microbatches: int) -> list[tuple[Action, ...]]:
    _refuse_misfit(name, placement, microbatches)
    named, layout = _named(name), layout_of(placement)
    rows = [numbered(turns, microbatches) for turns in named.generator(layout, microbatches)]
    if named.version_rule is None:
        return rows
    return [tuple(with_versions(row, named.version_rule, len(layout), microbatches)) for row in rows]


def _named(name: str) -> _NamedSchedule:
    if name not in _NAMED:
        raise InputError(f"schedule {name!r} is not known; choose one of {', '.join(NAMES)}")
    return _NAMED[name]


def _is_shaped(name: str, placement: Sequence[int]) -> bool:
    shape, held = required_placement(name)
    if shape == "any":
        return True
    return shape in shapes_of(placement) and held in (None, len(placement) // len(set(placement)))


def _least_microbatches(name: str, placement: Sequence[int]) -> int:
    return (_named(name).microbatches_per_rank or 0) * len(set(placement)) or 1


def _refuse_misfit(name: str, placement: Sequence[int], microbatches: int) -> None:
    instead = f"choose one of {', '.join(fitting_names(placement, max(1, microbatches)))}"
    if not _is_shaped(name, placement):
        shape, held = required_placement(name)
        wanted = (
            "one stage on each rank" if held == 1 else f"the stages placed as {shape}, such as "
        )
        if held != 1:
            wanted += " ".join(map(str, place(shape, len(set(placement)), held or 2)))
        raise InputError(
            f"schedule {name!r} needs {wanted}, but the stages lie on {' '.join(map(str, placement))}; "
            f"place them so, or {instead}"
        )
    least = _least_microbatches(name, placement)
    if microbatches < least:
        raise InputError(
            f"schedule {name!r} needs at least {least} microbatches on {len(set(placement))} ranks, "
            f"but there are {microbatches}; use more, or {instead}"
        )
