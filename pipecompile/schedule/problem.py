"""What a schedule is generated, simulated and searched for: stages on ranks with times, bytes and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from pipecompile.errors import InputError
from pipecompile.ir.schedule import BACKWARDS, Action, Kind
from pipecompile.ir.schedule_problem import ScheduleProblem
from pipecompile.memory_model.rank import changes

__all__ = ["Network", "PlacedProblem", "Skip", "StageCosts", "placed_problem"]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One stage and one microbatch: times in ns, and bytes held.

    `kept_bytes` from the forward on, `recomputed_bytes` more from the recompute on, until the backward;
    `between_bytes` of them from the gradients of the inputs to those of the weights. `splits`: whether there may be
    two halves of the backward. `recompute`: the forward runs again before the backward; `but_last`: not that of the
    step's last microbatch, of which `recomputed_bytes` are kept from its only forward on, and no `kept_bytes`; between
    the halves it has `remade_bytes` more, which others let go.
    """

    forward_ns: int
    backward_ns: int
    backward_input_ns: int = 0
    backward_weight_ns: int = 0
    recompute_ns: int = 0
    reduce_ns: int = 0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    between_bytes: int = 0
    remade_bytes: int = 0
    can_split: bool = True
    recompute: bool = False
    except_last: bool = False


@dataclass(frozen=True, slots=True)
class Skip:
    """A tensor sent from one stage to a later one directly; its source holds `bytes` until its own backward."""

    source: int
    destination: int
    bytes: int
    forward_ns: int
    backward_ns: int


@dataclass(frozen=True, slots=True)
class Network:
    """How messages travel: overlapping with compute and with each other unless said otherwise.

    With `blocking` the sender computes nothing meanwhile; with `shared` one message at a time goes from a rank to
    another.
    """

    blocking: bool = False
    shared: bool = False


@dataclass(frozen=True)
class PlacedProblem:
    """Stages on ranks. `placement[s]` is the rank of stage s, `caps` the bytes that each rank may hold, None for any.

    `forward_hops[s]` is the time from stage s to s + 1 in ns, `backward_hops[s]` that of the gradient back; both are
    zero within a rank. `gradient[s]` says whether a gradient flows back over that boundary.
    """

    placement: tuple[int, ...]
    microbatches: int
    costs: tuple[StageCosts, ...]
    forward_transfer_ns: tuple[int, ...]
    backward_transfer_ns: tuple[int, ...]
    gradient: tuple[bool, ...]
    caps: tuple[int, ...] | None = None
    skips: tuple[Skip, ...] = ()
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        boundaries = len(self.placement) - 1
        if len(self.costs) != boundaries + 1:
            raise InputError(f"{len(self.costs)} stages, but a placement of {boundaries + 1}")
        for row in (self.forward_transfer_ns, self.backward_transfer_ns, self.gradient):
            assert len(row) == boundaries, "one entry for each boundary between stages"

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.placement)

    @cached_property
    def ranks(self) -> int:
        """How many."""
        return max(self.placement) + 1

    @cached_property
    def recompute(self) -> tuple[bool, ...]:
        """Which stages run their forward again."""
        return tuple(costs.recompute for costs in self.costs)

    def recomputes(self, action: Action) -> bool:
        """Whether the stage of an action runs the forward of its microbatch again."""
        costs = self.costs[action.stage]
        return costs.recompute and not (
            costs.except_last and action.microbatch == self.microbatches - 1
        )

    @cached_property
    def can_split(self) -> bool:
        """Whether every stage can do its backward in two halves."""
        return all(costs.can_split for costs in self.costs)

    def held_bytes(self, row: Sequence[Action]) -> tuple[int, ...]:
        """What a rank holds as of each compute action of its row; where nothing goes back, nothing is kept for it."""
        changes = map(self.change_bytes, row)
        return tuple(
            accumulate(changes) if any(action.kind in BACKWARDS for action in row) else changes
        )

    @cached_property
    def _durations(self) -> tuple[dict[Kind, int], ...]:
        return tuple(
            {
                Kind.FORWARD: costs.forward_ns,
                Kind.BACKWARD: costs.backward_ns,
                Kind.BACKWARD_INPUT: costs.backward_input_ns,
                Kind.BACKWARD_WEIGHT: costs.backward_weight_ns,
                Kind.RECOMPUTE: costs.recompute_ns,
            }
            for costs in self.costs
        )

    @cached_property
    def _changes(self) -> tuple[dict[Kind, int], ...]:
        return tuple(
            changes(
                kept=costs.kept_bytes + extra,
                recomputed=costs.recomputed_bytes,
                between=costs.between_bytes,
            )
            for costs, extra in zip(self.costs, self._skipped, strict=True)
        )

    @cached_property
    def _last_changes(self) -> tuple[dict[Kind, int], ...]:
        """Those of the step's last microbatch."""
        return tuple(
            changes(
                kept=costs.recomputed_bytes + extra,
                recomputed=0,
                between=costs.between_bytes - costs.kept_bytes + costs.remade_bytes,
            )
            if costs.recompute and costs.except_last
            else plain
            for costs, extra, plain in zip(self.costs, self._skipped, self._changes, strict=True)
        )

    @cached_property
    def _skipped(self) -> tuple[int, ...]:
        """Per stage what it keeps for skips."""
        return tuple(
            sum(skip.bytes for skip in self.skips if skip.source == stage)
            for stage in range(self.stages)
        )

    def change_bytes(self, action: Action) -> int:
        """The bytes that a compute action adds to its rank; a forward and a recompute take them as they start."""
        is_last = action.microbatch == self.microbatches - 1
        return (self._last_changes if is_last else self._changes)[action.stage][action.kind]

    def duration_ns(self, action: Action) -> int:
        """How long a compute action occupies its rank."""
        return self._durations[action.stage][action.kind]


def placed_problem(given: ScheduleProblem, placement: Sequence[int] | None = None) -> PlacedProblem:
    """The problem in a file, with its own placement or this one."""
    placement = tuple(placement) if placement is not None else given.placement
    if placement is None:
        raise InputError(
            "the problem leaves the placement open (rank: null); choose one of linear, loop and v"
        )
    forward = [given.transfer_ns_between(a, b) for a, b in pairwise(placement)]
    backward = [given.transfer_ns_between(b, a) for a, b in pairwise(placement)]
    return PlacedProblem(
        placement=placement,
        microbatches=given.microbatches,
        costs=tuple(_work(given, index) for index in range(len(placement))),
        forward_transfer_ns=tuple(forward),
        backward_transfer_ns=tuple(backward),
        gradient=(True,) * len(forward),
        caps=given.memory_bytes,
        skips=tuple(
            Skip(
                a,
                b,
                size,
                given.transfer_ns_between(placement[a], placement[b]),
                given.transfer_ns_between(placement[b], placement[a]),
            )
            for a, b, size in given.skips
        ),
        network=Network(given.blocking_sends, given.shared_links),
    )


def _work(given: ScheduleProblem, index: int) -> StageCosts:
    stage = given.stages[index]
    both = stage.backward_input_ns + stage.backward_weight_ns
    again = stage.recompute_ns > 0 and index + 1 < len(given.stages)
    return StageCosts(
        forward_ns=stage.forward_ns,
        backward_ns=both if stage.backward_ns is None else stage.backward_ns,
        backward_input_ns=stage.backward_input_ns,
        backward_weight_ns=stage.backward_weight_ns,
        recompute_ns=stage.recompute_ns if again else 0,
        reduce_ns=stage.reduce_ns,
        kept_bytes=stage.activation_bytes + (0 if again else stage.recompute_bytes),
        recomputed_bytes=stage.recompute_bytes if again else 0,
        between_bytes=stage.weight_gradient_bytes,
        can_split=given.split_backward,
        recompute=again,
    )
