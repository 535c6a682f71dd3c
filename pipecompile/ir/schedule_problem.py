"""The schedule problem, `pipecompile/schedule-problem/1`, and what the scheduler answers."""

from __future__ import annotations

from typing import Literal

from pipecompile.ir.schedule import Idle, WeightVersions
from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = ["NamedOrder", "Order", "ScheduleProblem", "StageProblem"]


class StageProblem(Value, frozen=True, kw_only=True):
    """What one stage costs for one microbatch, and what it holds of it.

    A forward takes `activation_bytes`; the gradients of the inputs release all but `weight_gradient_bytes`, those of
    the weights the rest. A full backward takes the time of both, or `backward_ns`. With `recompute_ns` the forward is
    run again before the backward, which takes `recompute_bytes` more; the last stage never recomputes and keeps those
    from its forward on. `rank` null: the scheduler chooses. `reduce_ns` is the data-parallel sum of the stage's
    gradients, beside whatever its rank computes by then.
    """

    rank: NonNegative | None
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
        if self.weight_gradient_bytes > self.activation_bytes + self.recompute_bytes:
            raise ValueError(
                "weight_gradient_bytes is what is left of activation_bytes, so it cannot be more"
            )


class ScheduleProblem(Value, frozen=True, kw_only=True):
    """Stages on ranks, to be scheduled.

    `transfer_ns` is one time or a matrix from rank (row) to rank; within a rank it is zero. `skips` are [source stage,
    destination stage, bytes]: tensors that pass stages by, sent directly, held by their source until its backward.
    With `blocking_sends` a rank does not compute while it sends; with `shared_links` the messages from one rank to
    another travel one at a time.
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
        given = [stage.rank for stage in self.stages]
        if None in given and set(given) != {None}:
            raise ValueError(
                "either every stage has a rank or none: with null everywhere the scheduler places them"
            )
        wrong = next((rank for rank in given if rank is not None and rank >= ranks), None)
        if wrong is not None:
            raise ValueError(f"a stage is on rank {wrong}, but there are {ranks} ranks")
        if None not in given and len(set(given)) < ranks:
            raise ValueError(f"rank {min(set(range(ranks)) - set(given))} has no stage")
        if None in given and stages % ranks:
            raise ValueError(
                f"{stages} stages cannot be placed evenly on {ranks} ranks; give each stage its rank"
            )
        for source, destination, _ in self.skips:
            if not source < destination < stages:
                raise ValueError(
                    f"skip from stage {source} to {destination} does not go forward within {stages}"
                )

    @property
    def placement(self) -> tuple[int, ...] | None:
        """The rank of each stage, None if it is left open."""
        ranks = tuple(stage.rank for stage in self.stages if stage.rank is not None)
        return ranks or None

    def transfer_ns_between(self, source: int, destination: int) -> int:
        """The time of a message from one rank to another."""
        if source == destination:
            return 0
        return (
            self.transfer_ns
            if isinstance(self.transfer_ns, int)
            else self.transfer_ns[source][destination]
        )


class NamedOrder(Value, frozen=True, kw_only=True):
    """What a named schedule is worth on a problem, the most that a rank holds, and by how much one is over its cap."""

    name: str
    shape: str
    value_ns: NonNegative
    peak_bytes: NonNegative
    over_bytes: NonNegative


class Order(Value, frozen=True, kw_only=True):
    """A schedule for a problem and what it gives.

    `asked` is what was asked for: search, a name, or csv for an order that was read. `name` is what it is: of the
    orders searched one has the name search, and the others are the named ones. `shape` is linear, loop, v, or own.

    `lower_bound_ns` bounds the objective over all orders and all placements that were in question; null where nothing
    compares: without backwards, or without a flush. `proven`: the value meets it. `violations` say which rank is over
    its cap, from which action on and by how much; empty if it fits. `named` are all that the placements allow.
    `seconds` are those it took, for people.
    """

    asked: str
    name: str
    weight_versions: WeightVersions
    microbatches: Positive
    placement: tuple[NonNegative, ...]
    shape: str
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
        """What the objective says it is worth."""
        return self.makespan_ns if self.objective == "makespan" else self.span_ns
