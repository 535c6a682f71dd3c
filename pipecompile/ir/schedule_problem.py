"""The file of a schedule problem, `pipecompile/schedule-problem/1`, and the scheduler's answer."""

from __future__ import annotations

from typing import Literal

from pipecompile.ir.schedule import Idle, WeightVersions
from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = ["NamedOrder", "Order", "ScheduleProblem", "StageProblem"]


class StageProblem(Value, frozen=True, kw_only=True):
    """How long one microbatch takes in a stage, and the bytes that the stage holds of it.

    A forward takes `activation_bytes`. The input gradient frees all of them except
    `weight_gradient_bytes`, and the weight backward frees these. A full backward takes
    `backward_ns`, or, where that is null, the time of both halves. A stage with `recompute_ns`
    recomputes its forward before the backward, which takes `recompute_bytes` more; the last stage
    never recomputes, and holds those bytes from its forward on. `rank` is null where the scheduler
    chooses. `reduce_ns` is the time of the sum of the stage's gradients over its replicas; it runs
    beside what the rank computes.
    """

    rank: NonNegative | None
    # What a stage holds of one microbatch whose backward is split, and when:
    #
    #     F ── activation_bytes ── I ── weight_gradient_bytes ── W
    #
    forward_ns: NonNegative
    backward_input_ns: NonNegative
    backward_weight_ns: NonNegative
    activation_bytes: NonNegative
    weight_gradient_bytes: NonNegative
    backward_ns: NonNegative | None = None
    recompute_ns: NonNegative = 0
    recompute_bytes: NonNegative = 0
    reduce_ns: NonNegative = 0

    def __post_init__(self) -> None:
        # F takes 4 bytes and R 2 more; I then frees 6 − `weight_gradient_bytes`, which cannot be
        # negative.
        if self.weight_gradient_bytes > self.activation_bytes + self.recompute_bytes:
            raise ValueError(
                "weight_gradient_bytes is the part of activation_bytes that is held until the "
                "weight backward, so it cannot be larger"
            )


class ScheduleProblem(Value, frozen=True, kw_only=True):
    """Stages, ranks and microbatches for which an order is wanted.

    `transfer_ns` is one time, or a matrix: row = sending rank, column = receiving rank. A transfer
    within a rank takes no time. `skips` are triples [source stage, destination stage, bytes] of
    tensors that skip the stages between: they are sent directly, and their source holds them until
    its backward. With `blocking_sends` a rank does not compute while it sends. With `shared_links`
    the messages from one rank to another travel one at a time.
    """

    schema: Literal["pipecompile/schedule-problem/1"]
    ranks: Positive
    microbatches: Positive
    transfer_ns: NonNegative | tuple[tuple[NonNegative, ...], ...]
    stages: tuple[StageProblem, ...]
    memory_bytes: tuple[NonNegative, ...] | None
    split_backward: bool
    skips: tuple[tuple[NonNegative, NonNegative, NonNegative], ...] = ()
    blocking_sends: bool = False
    shared_links: bool = False

    def __post_init__(self) -> None:
        ranks, stages = self.ranks, len(self.stages)
        if not stages:
            raise ValueError("there are no stages to schedule")
        if not isinstance(self.transfer_ns, int) and {
            len(self.transfer_ns),
            *map(len, self.transfer_ns),
        } != {ranks}:
            raise ValueError(
                f"transfer_ns must be one time, or {ranks} rows of {ranks} for {ranks} ranks"
            )
        if self.memory_bytes is not None and len(self.memory_bytes) != ranks:
            raise ValueError(f"memory_bytes has {len(self.memory_bytes)} caps for {ranks} ranks")
        self._check_placement()
        # A tensor that goes back would close a circle: its reader runs before what makes it.
        for source, destination, _ in self.skips:
            if not source < destination < stages:
                raise ValueError(
                    f"the skip from stage {source} to {destination} must lead from a stage to a "
                    f"later one of the {stages} stages"
                )

    def _check_placement(self) -> None:
        """Raise ValueError unless stages lie on all ranks, or on none."""
        ranks, stages = self.ranks, len(self.stages)
        stage_ranks = [stage.rank for stage in self.stages]
        if None in stage_ranks and set(stage_ranks) != {None}:
            raise ValueError(
                "either every stage has a rank or none; with null everywhere the scheduler "
                "places them"
            )
        unknown_rank = next((r for r in stage_ranks if r is not None and r >= ranks), None)
        if unknown_rank is not None:
            raise ValueError(f"a stage is on rank {unknown_rank}, but there are {ranks} ranks")
        if None not in stage_ranks and len(set(stage_ranks)) < ranks:
            raise ValueError(f"rank {min(set(range(ranks)) - set(stage_ranks))} has no stage")
        # The scheduler tries the shapes linear, loop and v, which have equally many stages a rank.
        if None in stage_ranks and stages % ranks:
            raise ValueError(
                f"{stages} stages cannot be placed evenly on {ranks} ranks; give each stage a rank"
            )

    @property
    def placement(self) -> tuple[int, ...] | None:
        """The rank of each stage, or None where the scheduler chooses."""
        # All or none, as was checked: a tuple is never a part of the placement.
        ranks = tuple(stage.rank for stage in self.stages if stage.rank is not None)
        return ranks or None

    def transfer_ns_between(self, source: int, destination: int) -> int:
        """Return the time of a message from one rank to another."""
        if source == destination:
            return 0
        return (
            self.transfer_ns
            if isinstance(self.transfer_ns, int)
            else self.transfer_ns[source][destination]
        )


class NamedOrder(Value, frozen=True, kw_only=True):
    """A named schedule on a problem, for comparison.

    `value_ns` is its objective, `peak_bytes` the most that a rank holds, `over_bytes` by how much
    the worst rank exceeds its cap, and `placement_shape` is that of its placement.
    """

    name: str
    placement_shape: str
    value_ns: NonNegative
    peak_bytes: NonNegative
    over_bytes: NonNegative


class Order(Value, frozen=True, kw_only=True):
    """A schedule for a problem, with its simulated times and bytes.

    `request` is search, the name of a schedule, or csv for an order that was read.
    `name` is the schedule's own name: a search returns a named schedule where none is better.
    `placement_shape` is linear, loop, v, or own for any other.

    `lower_bound_ns` is a lower bound on the objective of all orders on all placements that were
    allowed. It is null where it has no meaning: for an order without backwards, and for one that
    never flushes the pipeline. `proven` says that the value equals it. `violations` say which rank
    exceeds its cap, from which action on and by how much. `named` are all named schedules that the
    placements allow. `seconds` is the running time, for people to read.
    """

    request: str
    name: str
    weight_versions: WeightVersions
    microbatches: Positive
    placement: tuple[NonNegative, ...]
    placement_shape: str
    orders: tuple[tuple[str, ...], ...]
    objective: str
    makespan_ns: NonNegative
    span_ns: NonNegative
    lower_bound_ns: NonNegative | None
    proven: bool
    bubble: float
    idle: tuple[Idle, ...]
    peak_bytes: tuple[NonNegative, ...]
    memory_bytes: tuple[NonNegative, ...] | None
    fits: bool
    violations: tuple[str, ...]
    best_named: NamedOrder | None
    named: tuple[NamedOrder, ...]
    seconds: float

    @property
    def value_ns(self) -> int:
        """The value of the objective."""
        # The span leaves out how long ranks wait before their first action and behind their last
        # one.
        return self.makespan_ns if self.objective == "makespan" else self.span_ns
