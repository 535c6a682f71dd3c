"""The named schedules: what each needs, and its order of compute actions.

docs/design/schedules.md compares them. On every stage the forwards, and likewise the backwards,
take the microbatches in ascending order, so that gradients are summed in the order of the unsplit
run. A stage that recomputes runs its forward once more (R) right before each backward, or before
each except that of the step's last microbatch (torchgpipe, arXiv 2004.09910). The last stage never
recomputes, since its backward directly follows its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import lcm
from typing import NamedTuple

from pipecompile.errors import InputError
from pipecompile.ir.footprint import SINGLE, WeightCopies
from pipecompile.ir.option_names import known_name
from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.ir.stage_ranks import has_stage_replicas, stage_ranks
from pipecompile.schedule.asynchronous_versions import (
    DOUBLE_BUFFERED,
    STASHED,
    VERTICAL_SYNC,
    PipelineSize,
    VersionRule,
    with_versions,
)
from pipecompile.schedule.flush import forward_only, gpipe, interleaved, one_f_one_b
from pipecompile.schedule.placement import place, shapes_of
from pipecompile.schedule.recompute import insert_recomputes
from pipecompile.schedule.tasks import Layout, Task, layout_of, numbered, own_microbatches
from pipecompile.schedule.v_shaped_orders import dualpipe_v, v_half, v_min, zb_v
from pipecompile.schedule.zero_bubble import zb_h1, zb_h2

__all__ = [
    "ASYNCHRONOUS",
    "MAY_SPLIT",
    "NAMES",
    "SPLIT",
    "FullestMoment",
    "fitting_names",
    "fullest_moment",
    "generate",
    "held_microbatches",
    "lasting_microbatches",
    "peak_in_flight",
    "replicates_stages",
    "required_placement",
    "steady_microbatches",
    "weight_copies",
]

Generator = Callable[[Layout, int], Sequence[Iterable[Task]]]
"""Returns the tasks of each rank, for a layout and a number of microbatches."""


def _by_rank(tasks_of_rank: Callable[[Layout, int, int], Iterable[Task]]) -> Generator:
    return lambda layout, microbatches: [
        tasks_of_rank(layout, rank, microbatches) for rank in range(len(layout))
    ]


@dataclass(frozen=True, slots=True)
class _NamedSchedule:
    """A schedule and what it needs.

    These are the shape of its placement, the number of stages on each rank, None for any, and the
    fewest microbatches on a placement. `split` says that it splits some or all of its
    backwards, `replicates` that stages may have replicas. `version_rule` is that of an asynchronous
    schedule.
    """

    generator: Generator
    shape: str = "linear"
    stages_per_rank: int | None = 1
    least_microbatches: Callable[[Sequence[int]], int] = lambda placement: 1
    split: bool = False
    replicates: bool = False
    version_rule: VersionRule | None = None


_NAMED = {
    "gpipe": _NamedSchedule(_by_rank(gpipe), "any", None, replicates=True),
    "1f1b": _NamedSchedule(_by_rank(one_f_one_b), "linear", None, replicates=True),
    "interleaved-1f1b": _NamedSchedule(_by_rank(interleaved), "loop", None),
    "looped-bfs": _NamedSchedule(_by_rank(gpipe), "loop", None),
    "zb-h1": _NamedSchedule(_by_rank(zb_h1), split=True),
    "zb-h2": _NamedSchedule(_by_rank(zb_h2), split=True),
    "zb-v": _NamedSchedule(zb_v, "v", 2, split=True),
    "v-half": _NamedSchedule(v_half, "v", 2, split=True),
    "v-min": _NamedSchedule(v_min, "v", 2, split=True),
    "dualpipe-v": _NamedSchedule(
        _by_rank(dualpipe_v), "v", 2, lambda placement: 2 * len(set(placement)), split=True
    ),
    "pipedream": _NamedSchedule(_by_rank(one_f_one_b), replicates=True, version_rule=STASHED),
    "pipedream-vertical-sync": _NamedSchedule(
        _by_rank(one_f_one_b), replicates=True, version_rule=VERTICAL_SYNC
    ),
    # With fewer the first rank would begin a minibatch before its version has been made.
    "pipedream-2bw": _NamedSchedule(
        _by_rank(one_f_one_b),
        least_microbatches=lambda placement: max(1, PipelineSize.of(placement, 1).ahead(0)),
        replicates=True,
        version_rule=DOUBLE_BUFFERED,
    ),
    "forward-only": _NamedSchedule(_by_rank(forward_only), "any", None, replicates=True),
}
NAMES: tuple[str, ...] = tuple(_NAMED)
SPLIT = frozenset(name for name, named in _NAMED.items() if named.split)
"""The schedules that split some or all of their backwards."""
MAY_SPLIT = SPLIT | {"search"}
"""The same and the search, which decides only later whether to split backwards."""
ASYNCHRONOUS = frozenset(name for name, named in _NAMED.items() if named.version_rule)
"""The schedules that update the weights while microbatches are on their way."""


def required_placement(name: str) -> tuple[str, int | None]:
    """Return the placement that a schedule needs: its shape and the stages on each rank.

    The shape is linear, loop, v or any; None stands for any number of stages. InputError if there
    is no such schedule.
    """
    named = _named(name)
    return named.shape, named.stages_per_rank


def replicates_stages(name: str) -> bool:
    """Return whether stages may have replicas under a schedule."""
    return _named(name).replicates


def fitting_names(placement: Sequence[int], microbatches: int) -> tuple[str, ...]:
    """Return the schedules that train on a placement with the gradients of the unsplit model.

    Asynchronous ones are not among them.
    """
    training = (name for name in NAMES if name != "forward-only" and name not in ASYNCHRONOUS)
    return tuple(
        name
        for name in training
        if _has_shape(name, placement) and microbatches >= _least_microbatches(name, placement)
    )


def lasting_microbatches(name: str, placement: Sequence[int], microbatches: int) -> int:
    """Return how many microbatches an order needs for its ranks to hold the most that they ever do.

    An asynchronous one goes on with the next minibatch, so each rank has as many in flight as ranks
    follow it, itself included, however few a minibatch has; replicas share them.
    """
    if name not in ASYNCHRONOUS:
        return microbatches
    # Four stages and minibatches of 2: the first stage begins 3 microbatches before
    # the one ahead of them is back, so it holds 4. An order of 2 would show 2.
    size = PipelineSize.of(placement, microbatches)
    most = max(size.ahead(stage) + size.replicas[stage] for stage in range(size.stages))
    # Whole turns, since all replicas of a stage take equally many.
    turns = lcm(*size.replicas)
    return -(-max(microbatches, most) // turns) * turns


def steady_microbatches(name: str, placement: Sequence[int], microbatches: int) -> int:
    """Return how many microbatches an order needs to come to what goes on without an end: under an
    asynchronous schedule as many again as fill it.
    """
    if name not in ASYNCHRONOUS:
        return microbatches
    # In the example above 4 fill the pipeline, and the other 4 of 8 meet a full one.
    filled = lasting_microbatches(name, placement, 1)
    return lasting_microbatches(name, placement, max(microbatches, 2 * filled))


def held_microbatches(name: str, placement: Sequence[int], microbatches: int) -> int:
    """Return of how many microbatches the model's inputs are there at once: those of a minibatch,
    and under an asynchronous schedule of the ones that are read ahead.
    """
    if name not in ASYNCHRONOUS:
        return microbatches
    # Four stages and minibatches of 2: the 3 microbatches ahead are
    # of the next two minibatches, so the inputs of 6 are there.
    return microbatches * (1 + PipelineSize.of(placement, microbatches).read_ahead)


def weight_copies(
    name: str, placement: Sequence[int], microbatches: int
) -> tuple[WeightCopies, ...]:
    """Return for each stage how many copies of its weights it holds at most."""
    rule = _NAMED[name].version_rule if name in ASYNCHRONOUS else None
    if rule is None:
        return (SINGLE,) * len(placement)
    size = PipelineSize.of(placement, microbatches)
    # A parameter of an earlier stage has the versions of that one: at most those of the first.
    first = rule.copies(size, 0)
    return tuple(WeightCopies(rule.copies(size, stage), first) for stage in range(size.stages))


def generate(
    name: str,
    placement: Sequence[int],
    microbatches: int,
    recompute: Sequence[bool] | bool = False,
    *,
    except_last: Sequence[bool] | bool = False,
) -> Schedule:
    """Return the compute actions of a schedule, with optimizer steps if it is asynchronous.

    `placement[stage]` is the first rank of a stage. `recompute` says for each stage, or for all,
    whether it recomputes its forward; `except_last`, for each or for all, whether that of the
    step's last microbatch is kept instead. InputError says what does not fit and what would.
    """
    name = known_name("schedule", name, NAMES)
    recomputes = _for_each_stage(recompute, placement)
    recomputes[-1] = False
    spares_last = _for_each_stage(except_last, placement)

    def is_recomputed(action: Action) -> bool:
        is_last = action.microbatch == microbatches - 1
        return recomputes[action.stage] and not (spares_last[action.stage] and is_last)

    # Generators number ranks as a microbatch meets them, which need not be the placement's order.
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    generated = _rows(name, placement, microbatches)
    # Placed 1 0 0 1, rank 1 is met first, and the first row of the generator is its.
    met = dict.fromkeys(chain.from_iterable(stage_ranks(placement)))
    for rank, row in zip(met, generated, strict=True):
        rows[rank] = list(insert_recomputes(row, is_recomputed))
    rule = _NAMED[name].version_rule
    weight_versions = rule.weight_versions if rule else "synchronous"
    return Schedule.of(name, microbatches, placement, rows, weight_versions)


def _for_each_stage(value: Sequence[bool] | bool, placement: Sequence[int]) -> list[bool]:
    values = [value] * len(placement) if isinstance(value, bool) else list(value)
    assert len(values) == len(placement), "one entry for each stage"
    return values


def peak_in_flight(name: str, placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Return for each stage the most microbatches that it holds between forward and B or W.

    They follow from the order of the stage's own rank. An evaluation frees each microbatch at
    once. InputError as in `generate`.
    """
    rows = _rows(name, placement, microbatches)
    if known_name("schedule", name, NAMES) == "forward-only":
        return (1,) * len(placement)
    held, peaks = [0] * len(placement), [0] * len(placement)
    for row in rows:
        for stage, kind, *_ in row:
            held[stage] += kind is Kind.FORWARD
            # An I lets nothing go that is counted here: W still reads it.
            held[stage] -= kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            peaks[stage] = max(peaks[stage], held[stage])
    return tuple(peaks)


class FullestMoment(NamedTuple):
    """The last moment at which ranks hold the most: the microbatches that each stage then holds
    between forward and B or W, and whether all stages have run a backward by then.

    Of stages that share a rank these are held at once, which the peaks of each are not: under
    interleaved-1f1b stages 0 and 4 share rank 0 of four, and hold 8 and 4 at most, but together 11.
    """

    held: tuple[int, ...]
    have_gradients: bool


def fullest_moment(name: str, placement: Sequence[int], microbatches: int) -> FullestMoment:
    """Return what the stages of each rank hold when it holds the most. InputError as in
    `generate`.
    """
    if known_name("schedule", name, NAMES) == "forward-only":
        return FullestMoment((1,) * len(placement), have_gradients=False)
    counts, backwards = [0] * len(placement), [0] * len(placement)
    # The first replica of a stage has the most microbatches, and so the last word.
    for row in reversed(_rows(name, placement, microbatches)):
        stages = sorted({action.stage for action in row})
        held, ended, most = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0), 0
        for stage, kind, *_ in row:
            held[stage] += kind is Kind.FORWARD
            ended[stage] += kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            held[stage] -= kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            # Of equal moments the last one: the later it is, the more stages have gradients too.
            if sum(held.values()) >= most:
                most = sum(held.values())
                for each in stages:
                    counts[each], backwards[each] = held[each], ended[each]
    return FullestMoment(tuple(counts), all(backwards))


def _rows(name: str, placement: Sequence[int], microbatches: int) -> list[tuple[Action, ...]]:
    """Return the actions of each rank of the layout, without recomputes."""
    _refuse_misfit(name, placement, microbatches)
    named, layout = _named(name), layout_of(placement)
    rows = [
        numbered(tasks, own_microbatches(layout, rank, microbatches))
        for rank, tasks in enumerate(named.generator(layout, microbatches))
    ]
    rule = named.version_rule
    if rule is None:
        return rows
    size = PipelineSize.of(placement, microbatches)
    return [tuple(with_versions(row, rule, size)) for row in rows]


def _named(name: str) -> _NamedSchedule:
    return _NAMED[known_name("schedule", name, NAMES)]


def _has_shape(name: str, placement: Sequence[int]) -> bool:
    shape, stages_per_rank = required_placement(name)
    if has_stage_replicas(placement) and not replicates_stages(name):
        return False
    # GPipe and an evaluation run on every placement.
    if shape == "any":
        return True
    # One stage on each rank is a line, a loop and a V at once. Then only the number
    # of stages on a rank tells that a V schedule, which needs two, does not fit.
    number = len(placement) // len(set(placement))
    return shape in shapes_of(placement) and stages_per_rank in (None, number)


def _least_microbatches(name: str, placement: Sequence[int]) -> int:
    least = _named(name).least_microbatches(placement)
    if name == "forward-only":
        return least
    # Each replica of a stage trains on one at least.
    return max(least, *map(len, stage_ranks(placement)))


def _refuse_misfit(name: str, placement: Sequence[int], microbatches: int) -> None:
    ranks = max(placement) + 1
    alternatives = f"choose one of {', '.join(fitting_names(placement, max(1, microbatches)))}"
    if has_stage_replicas(placement) and not replicates_stages(name):
        raise InputError(
            f"schedule {name!r} is not known for stages with replicas, which take microbatches in "
            f"turns; give each stage one rank, or {alternatives}"
        )
    if not _has_shape(name, placement):
        raise InputError(
            f"schedule {name!r} needs {_required_text(name, ranks)}, but the stages lie on "
            f"{' '.join(map(str, placement))}; place them so, or {alternatives}"
        )
    least = _least_microbatches(name, placement)
    if microbatches < least:
        raise InputError(
            f"schedule {name!r} needs at least {least} microbatches on {ranks} ranks, "
            f"but there are {microbatches}; use more, or {alternatives}"
        )
    # Stages with 2 and with 3 replicas need a multiple of 6.
    turns = lcm(*map(len, stage_ranks(placement)))
    if name in ASYNCHRONOUS and microbatches % turns:
        raise InputError(
            f"under schedule {name!r} all ranks of a stage take equally many microbatches of a "
            f"minibatch, but there are {microbatches}; use a multiple of {turns}, or "
            f"{alternatives}"
        )


def _required_text(name: str, ranks: int) -> str:
    """Return the placement that a schedule needs in words, with an example on so many ranks."""
    shape, stages_per_rank = required_placement(name)
    if stages_per_rank == 1:
        return "one stage on each rank"
    example = place(shape, ranks, stages_per_rank or 2)
    return f"the stages placed as {shape}, such as {' '.join(map(str, example))}"
