"""A recorded run against its plan: predicted and measured times, action by action and rank by rank.

Predicted times come from the simulator. A measured time is the median over the recorded steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from statistics import median
from typing import Any

from pipecompile.errors import InputError
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedRank, RecordedRun, RecordedStep
from pipecompile.ir.schedule import Action, Event, Kind, Timeline

__all__ = [
    "ComparedTime",
    "RunComparison",
    "compare_run",
    "compared_steps",
    "comparison_figures",
]

# What a message takes on its rank belongs to the action that makes or needs it, as in the plan. In
# one process a backward may have been split where a tied parameter asked for that.
_OWNERS = {
    Kind.SEND_FORWARD: (Kind.FORWARD,),
    Kind.RECEIVE_FORWARD: (Kind.FORWARD,),
    Kind.SEND_BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT),
    Kind.RECEIVE_BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT),
    Kind.BACKWARD_INPUT: (Kind.BACKWARD_INPUT, Kind.BACKWARD),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_WEIGHT, Kind.BACKWARD),
}
WORST = 10


@dataclass(frozen=True)
class ComparedTime:
    """A predicted time and the measured one, in nanoseconds."""

    predicted_ns: int
    measured_ns: int

    @property
    def difference_ns(self) -> int:
        """Measured − predicted."""
        return self.measured_ns - self.predicted_ns

    @property
    def ratio(self) -> float | None:
        """Measured / predicted; None if nothing was predicted."""
        return self.measured_ns / self.predicted_ns if self.predicted_ns else None


@dataclass(frozen=True)
class ComparedAction:
    """One action of a rank."""

    rank: int
    action: Action
    time: ComparedTime


@dataclass(frozen=True)
class ComparedKind:
    """All actions of one kind in one stage: their number, and the mean time of one."""

    rank: int
    stage: int
    kind: Kind
    count: int
    time: ComparedTime


@dataclass(frozen=True)
class ComparedRank:
    """What a rank does in a step.

    `busy` is its time in actions, `idle` are the shares of the step in which it is not, predicted
    and measured. `waiting_ns` is the measured time in which it waited for messages. `peak_bytes` is
    None where no peak was recorded.
    """

    busy: ComparedTime
    idle: tuple[float, float]
    waiting_ns: int
    expected_bytes: int
    bound_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class RunComparison:
    """A plan, its simulated step `predicted`, and what was recorded of `steps`.

    One unit of the plan's time is `unit_ns`: 1 for nanoseconds. Relative units are converted such
    that all actions together take as long as was measured, so only shares are compared. `typical`
    is the recorded step of median length. Under an asynchronous schedule a step here are several
    minibatches that followed each other, from the empty pipeline to the empty one.
    """

    plan: Plan
    run: RecordedRun
    steps: Sequence[RecordedStep]
    predicted: Timeline
    unit_ns: float
    actions: Sequence[ComparedAction]

    @property
    def is_relative(self) -> bool:
        """Whether predicted times are shares, and no prediction of seconds."""
        return self.plan.time_unit == "relative"

    @cached_property
    def typical(self) -> RecordedStep:
        """The step of median length; of two in the middle, the shorter one."""
        # A step that was there, and not a mean of two: it is drawn.
        return sorted(self.steps, key=lambda step: step.ns)[(len(self.steps) - 1) // 2]

    @property
    def minibatches(self) -> int:
        """The number of minibatches in a step, one by one: 1 unless they may be in flight."""
        return self.typical.microbatches // self.plan.microbatches

    @property
    def minibatch(self) -> ComparedTime | None:
        """What a minibatch takes in a full pipeline; None if it was not full, or in turns."""
        predicted = self.plan.prediction.minibatch_ns
        lengths = list(chain(*(_minibatch_lengths(self.plan, step) for step in self.steps)))
        if predicted is None or not lengths or self.run.is_in_turns:
            return None
        return ComparedTime(round(predicted * self.unit_ns), round(median(lengths)))

    @property
    def step(self) -> ComparedTime:
        """The whole step. Where one process did all, what all ranks do one after another."""
        predicted = self.predicted.makespan_ns
        if self.run.is_in_turns:
            per_step = sum(stage.per_step_ns for stage in self.plan.stages) * self.minibatches
            # One process does it all, one after the other, and nothing of it beside anything
            # else.
            predicted = sum(self.predicted.busy_ns) + round(per_step * self.unit_ns)
        return ComparedTime(predicted, round(median(step.ns for step in self.steps)))

    @property
    def bubble(self) -> tuple[float, float]:
        """The mean share of the step in which ranks idle, predicted and measured."""
        measured = [_bubble(step) for step in self.steps]
        return self.predicted.bubble, median(measured)

    @property
    def worst(self) -> Sequence[ComparedAction]:
        """The actions whose measured times are farthest from the predicted ones, farthest first."""
        return sorted(self.actions, key=lambda a: -abs(a.time.difference_ns))[:WORST]

    @property
    def stages(self) -> Sequence[ComparedKind]:
        """The times of each stage by kind, in the order of ranks, stages and first occurrences."""
        groups: dict[tuple[int, int, Kind], list[ComparedTime]] = defaultdict(list)
        for compared in self.actions:
            groups[compared.rank, compared.action.stage, compared.action.kind].append(compared.time)
        rows = [ComparedKind(*key, len(times), _mean(times)) for key, times in groups.items()]
        return sorted(rows, key=lambda row: (row.rank, row.stage))

    @property
    def kinds(self) -> dict[Kind, ComparedTime]:
        """What all actions of each kind take together."""
        groups: dict[Kind, list[ComparedTime]] = defaultdict(list)
        for compared in self.actions:
            groups[compared.action.kind].append(compared.time)
        return {kind: _sum(times) for kind, times in groups.items()}

    @property
    def compute(self) -> ComparedTime:
        """What all actions take together."""
        return _sum([compared.time for compared in self.actions])

    @property
    def ranks(self) -> Sequence[ComparedRank]:
        """What each rank does in a step."""
        return [self._rank(rank) for rank in range(self.plan.ranks)]

    def _rank(self, rank: int) -> ComparedRank:
        recorded = [step.ranks[rank] for step in self.steps]
        busy = [_busy_ns(row) for row in recorded]
        shares = [
            1 - time_ns / max(step.ns, 1) for time_ns, step in zip(busy, self.steps, strict=True)
        ]
        predicted = self.predicted.busy_ns[rank]
        memory = self.plan.prediction.memory[rank].total
        # The largest of all steps, and no median: it must fit each time.
        peaks = [row.peak_bytes for row in recorded if row.peak_bytes is not None]
        return ComparedRank(
            busy=ComparedTime(predicted, round(median(busy))),
            idle=(1 - predicted / max(self.predicted.makespan_ns, 1), median(shares)),
            waiting_ns=round(median(row.waiting_ns for row in recorded)),
            expected_bytes=memory.expected,
            bound_bytes=memory.bound,
            peak_bytes=max(peaks, default=None),
        )


def compared_steps(plan: Plan, run: RecordedRun) -> Sequence[RecordedStep]:
    """Return the recorded steps that are compared with the plan: those with all of its
    microbatches, in its shape. Of minibatches in flight they are those with the most of them.

    InputError if there are none.
    """
    steps = [step for step in run.steps if step.microbatch_shapes == plan.microbatch_shapes]
    wanted = plan.microbatches
    if plan.schedule.weight_versions != "synchronous":
        wanted = max((step.microbatches for step in steps), default=wanted)
    steps = [step for step in steps if step.microbatches == wanted]
    if not steps:
        raise InputError(
            f"no recorded step has all {plan.microbatches} microbatches of the plan, in its shape; "
            "record one with a whole minibatch"
        )
    return steps


def compare_run(plan: Plan, predicted: Timeline, run: RecordedRun) -> RunComparison:
    """Return the recorded `run` of `plan` against the simulated step `predicted`.

    InputError if there is nothing to compare (`compared_steps`), or if an action of the plan is
    missing.
    """
    steps = compared_steps(plan, run)
    planned = {event.action for row in predicted.events for event in row}
    times = [_action_times(step, planned) for step in steps]
    measured: dict[Action, int] = {}
    for action in planned:
        if not all(action in of_step for of_step in times):
            raise InputError(f"the run does not have {action} of the plan; record it anew")
        # By action, so that one step that something else has slowed down does not count.
        measured[action] = round(median(of_step[action] for of_step in times))
    unit_ns = 1.0
    if plan.time_unit == "relative":
        # 1,000 units that took 2 ms: a unit is 2,000 ns, and a stage that was predicted to have
        # 600 of them is compared with 1.2 ms.
        unit_ns = sum(measured.values()) / max(1, sum(predicted.busy_ns))
        predicted = _scaled(predicted, unit_ns)
    actions = [
        ComparedAction(rank, event.action, ComparedTime(_length(event), measured[event.action]))
        for rank, row in enumerate(predicted.events)
        for event in row
    ]
    return RunComparison(plan, run, steps, predicted, unit_ns, actions)


def comparison_figures(comparison: RunComparison) -> dict[str, Any]:
    """Return the comparison for scripts: times in nanoseconds, of each action too."""
    minibatch = comparison.minibatch
    memory_names = ("expected_bytes", "bound_bytes", "peak_bytes")
    return {
        "compares": "shares" if comparison.is_relative else "times",
        "unit_ns": comparison.unit_ns,
        "in_turns": comparison.run.is_in_turns,
        "clock_error_ns": comparison.run.clock_error_ns,
        "steps": len(comparison.steps),
        "minibatches": comparison.minibatches,
        "minibatch": minibatch and _time_figures(minibatch),
        "step": _time_figures(comparison.step),
        "bubble": {"predicted": comparison.bubble[0], "measured": comparison.bubble[1]},
        "kinds": {kind.value: _time_figures(time) for kind, time in comparison.kinds.items()},
        "stages": [
            {"rank": row.rank, "stage": row.stage, "kind": row.kind.value, "count": row.count}
            | _time_figures(row.time)
            for row in comparison.stages
        ],
        "ranks": [
            {
                "busy": _time_figures(rank.busy),
                "idle": {"predicted": rank.idle[0], "measured": rank.idle[1]},
                "waiting_ns": rank.waiting_ns,
                **{name: getattr(rank, name) for name in memory_names},
            }
            for rank in comparison.ranks
        ],
        "worst": [str(compared.action) for compared in comparison.worst],
        "actions": [
            {"rank": compared.rank, "action": str(compared.action)} | _time_figures(compared.time)
            for compared in comparison.actions
        ],
    }


def _time_figures(time: ComparedTime) -> dict[str, Any]:
    return {
        "predicted_ns": time.predicted_ns,
        "measured_ns": time.measured_ns,
        "ratio": time.ratio,
    }


def _action_times(step: RecordedStep, planned: Collection[Action]) -> dict[Action, int]:
    """Return how long each planned action took, with what its messages took on its rank."""
    times: dict[Action, int] = defaultdict(int)
    for rank in step.ranks:
        for recorded in rank.actions:
            action = Action.parse(recorded.action)
            for owner in _owners(action):
                if owner in planned:
                    # Work without waiting: how long an action waits depends on other ranks, and
                    # is in the bubble.
                    times[owner] += recorded.work_ns
                    break
    return times


def _owners(action: Action) -> Iterator[Action]:
    for kind in _OWNERS.get(action.kind, (action.kind,)):
        yield action._replace(kind=kind)


def _minibatch_lengths(plan: Plan, step: RecordedStep) -> Iterator[int]:
    """Yield the times between the ends of minibatches on the first rank, while the pipeline is
    filled: without the first ones and the last ones, as many as the pipeline holds.
    """
    ends: list[int] = []
    for recorded in step.ranks[plan.schedule.placement[0]].actions:
        action = Action.parse(recorded.action)
        is_last = ((action.microbatch or 0) + 1) % plan.microbatches == 0
        if action.kind is Kind.BACKWARD and is_last:
            ends.append(recorded.end_ns)
    # With 4 ranks and 2 microbatches in a minibatch the pipeline holds two minibatches: of six
    # ends the first two and the last two are left out, while it fills and empties.
    held = -(-plan.ranks // plan.microbatches)
    for before, after in pairwise(ends[held:-held]):
        yield after - before


def _busy_ns(rank: RecordedRank) -> int:
    return sum(action.work_ns for action in rank.actions)


def _bubble(step: RecordedStep) -> float:
    busy = sum(_busy_ns(rank) for rank in step.ranks)
    return 1 - busy / max(len(step.ranks) * step.ns, 1)


def _scaled(timeline: Timeline, unit_ns: float) -> Timeline:
    """Return the timeline with its times in nanoseconds, given how many of them a unit has."""

    def scaled(rows: tuple[tuple[Event, ...], ...]) -> tuple[tuple[Event, ...], ...]:
        return tuple(
            tuple(
                Event(e.action, round(e.start_ns * unit_ns), round(e.end_ns * unit_ns)) for e in r
            )
            for r in rows
        )

    # Without idle times and bytes: of these a comparison of shares says nothing.
    return Timeline(scaled(timeline.events), (), (), scaled(timeline.reductions))


def _length(event: Event) -> int:
    return event.end_ns - event.start_ns


def _sum(times: Sequence[ComparedTime]) -> ComparedTime:
    return ComparedTime(
        sum(time.predicted_ns for time in times), sum(time.measured_ns for time in times)
    )


def _mean(times: Sequence[ComparedTime]) -> ComparedTime:
    total = _sum(times)
    return ComparedTime(
        round(total.predicted_ns / len(times)), round(total.measured_ns / len(times))
    )
