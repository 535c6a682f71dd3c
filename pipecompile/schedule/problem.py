"""What a schedule is generated, simulated and searched for: placed stages, their times and bytes.

`ir.schedule_problem.ScheduleProblem` is the file, which may leave the placement open; a
`PlacedProblem` has each stage on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from pipecompile.errors import InputError
from pipecompile.ir.schedule import BACKWARDS, Action, Kind
from pipecompile.ir.schedule_problem import ScheduleProblem
from pipecompile.memory_model.rank import activation_changes

__all__ = ["Network", "PlacedProblem", "Skip", "StageCosts", "placed_problem"]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Times in ns and held bytes of one microbatch in one stage.

    `kept_bytes` are held from the forward to the backward, `recomputed_bytes` more from the
    recompute to the backward; `between_bytes` of all these stay from the input backward to
    the weight backward:

              F           R            I               W
        0 ──▶ kept ─────▶ kept ──────▶ between ──────▶ 0
                          + recomputed

    `can_split` says whether the backward may be done in two halves, `recompute` whether the stage
    recomputes its forward. With `except_last` it does not for the step's last microbatch: of that
    one `recomputed_bytes` are held from its only forward on, and no `kept_bytes`; nor are there the
    `buffer_copy_bytes`, which a recomputed one keeps until its weight backward.
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
    buffer_copy_bytes: int = 0
    can_split: bool = True
    recompute: bool = False
    except_last: bool = False


@dataclass(frozen=True, slots=True)
class Skip:
    """A tensor sent from one stage directly to a later one that is not its neighbour.

    Its source holds `bytes` until its own backward.
    """

    source: int
    destination: int
    bytes: int
    forward_ns: int
    backward_ns: int


@dataclass(frozen=True, slots=True)
class Network:
    """How messages travel; by default they overlap with compute and with each other.

    With `blocking` the sender computes nothing while it sends. With `shared` the messages from one
    rank to another travel one at a time.
    """

    blocking: bool = False
    shared: bool = False


@dataclass(frozen=True)
class PlacedProblem:
    """Stages on ranks: `placement[s]` is the rank of stage s.

    `caps` are the bytes that each rank may hold, None for any number. `forward_transfer_ns[s]` is
    the time from stage s to s + 1, and `backward_transfer_ns[s]` that of the gradient back; both
    are zero within a rank. `gradient[s]` says whether a gradient flows back over that boundary.
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
            raise InputError(
                f"there are costs of {len(self.costs)} stages, but the placement has "
                f"{boundaries + 1} stages"
            )
        for row in (self.forward_transfer_ns, self.backward_transfer_ns, self.gradient):
            assert len(row) == boundaries, "one entry for each boundary between stages"

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.placement) + 1

    @cached_property
    def recompute(self) -> tuple[bool, ...]:
        """Whether each stage recomputes its forward."""
        return tuple(costs.recompute for costs in self.costs)

    def recomputes(self, action: Action) -> bool:
        """Return whether the stage of an action recomputes the forward of its microbatch."""
        costs, is_last = self.costs[action.stage], action.microbatch == self.microbatches - 1
        # It is the last number of the step, and not the last forward that
        # happens to run on the rank: every order takes the microbatches
        # of a stage in ascending order, so these are the same.
        return costs.recompute and not (costs.except_last and is_last)

    @cached_property
    def can_split(self) -> bool:
        """Whether every stage can do its backward in two halves."""
        return all(costs.can_split for costs in self.costs)

    def held_bytes(self, row: Sequence[Action]) -> tuple[int, ...]:
        """Return what a rank holds from each compute action of its row on.

        In an evaluation, a row without backwards, nothing is held longer than its own action.
        """
        changes = map(self.change_bytes, row)
        # Nothing waits for a backward in an evaluation, so that bytes do not add up.
        # With 4 bytes for each forward a row F0 F1 F2 holds 4 4 4, not 4 8 12.
        trains = any(action.kind in BACKWARDS for action in row)
        return tuple(accumulate(changes) if trains else changes)

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
            activation_changes(
                kept=costs.kept_bytes + skipped,
                recomputed=costs.recomputed_bytes,
                between=costs.between_bytes,
            )
            for costs, skipped in zip(self.costs, self._skipped_bytes, strict=True)
        )

    @cached_property
    def _last_changes(self) -> tuple[dict[Kind, int], ...]:
        """The changes of the step's last microbatch in each stage."""
        # With 3 kept and 38 recomputed bytes the others take F
        # +3, R +38, B −41; this one F +38, B −38.
        last = list(self._changes)
        for stage, costs in enumerate(self.costs):
            if costs.recompute and costs.except_last:
                # The only forward keeps what a recompute would make.
                last[stage] = activation_changes(
                    kept=costs.recomputed_bytes + self._skipped_bytes[stage],
                    recomputed=0,
                    between=costs.between_bytes - costs.buffer_copy_bytes,
                )
        return tuple(last)

    @cached_property
    def _skipped_bytes(self) -> tuple[int, ...]:
        """The bytes that each stage holds for skips."""
        return tuple(
            sum(skip.bytes for skip in self.skips if skip.source == stage)
            for stage in range(self.stages)
        )

    def change_bytes(self, action: Action) -> int:
        """Return the bytes that a compute action adds to what its rank holds.

        A forward and a recompute take them as they start.
        """
        is_last = action.microbatch == self.microbatches - 1
        return (self._last_changes if is_last else self._changes)[action.stage][action.kind]

    def duration_ns(self, action: Action) -> int:
        """Return how long a compute action occupies its rank."""
        return self._durations[action.stage][action.kind]


def placed_problem(
    problem: ScheduleProblem, placement: Sequence[int] | None = None
) -> PlacedProblem:
    """Return the problem of a file with a placement, by default the file's own.

    InputError if neither has one.
    """
    placement = tuple(placement) if placement is not None else problem.placement
    if placement is None:
        raise InputError(
            "the problem leaves the placement open (rank: null); choose one of linear, loop and v"
        )
    transfer_ns = problem.transfer_ns_between
    boundaries = list(pairwise(placement))
    skips = (
        Skip(
            source,
            destination,
            size,
            transfer_ns(placement[source], placement[destination]),
            transfer_ns(placement[destination], placement[source]),
        )
        for source, destination, size in problem.skips
    )
    return PlacedProblem(
        placement=placement,
        microbatches=problem.microbatches,
        costs=tuple(_costs(problem, index) for index in range(len(placement))),
        forward_transfer_ns=tuple(transfer_ns(left, right) for left, right in boundaries),
        backward_transfer_ns=tuple(transfer_ns(right, left) for left, right in boundaries),
        gradient=(True,) * len(boundaries),
        caps=problem.memory_bytes,
        skips=tuple(skips),
        network=Network(problem.blocking_sends, problem.shared_links),
    )


def _costs(problem: ScheduleProblem, index: int) -> StageCosts:
    """Return the costs of a stage of a problem in a file, as schedulers take them."""
    stage = problem.stages[index]
    halves_ns = stage.backward_input_ns + stage.backward_weight_ns
    # The last stage keeps what others recompute, since its backward directly follows its forward.
    recompute = stage.recompute_ns > 0 and index + 1 < len(problem.stages)
    return StageCosts(
        forward_ns=stage.forward_ns,
        backward_ns=halves_ns if stage.backward_ns is None else stage.backward_ns,
        backward_input_ns=stage.backward_input_ns,
        backward_weight_ns=stage.backward_weight_ns,
        recompute_ns=stage.recompute_ns if recompute else 0,
        reduce_ns=stage.reduce_ns,
        kept_bytes=stage.activation_bytes + (0 if recompute else stage.recompute_bytes),
        recomputed_bytes=stage.recompute_bytes if recompute else 0,
        between_bytes=stage.weight_gradient_bytes,
        can_split=problem.split_backward,
        recompute=recompute,
    )
