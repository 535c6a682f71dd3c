"""What a rank holds by kind in a snapshot of its row; rank.py says what each kind is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Kind
from pipecompile.memory_model.action_workspace import between_halves, workspace_of_action
from pipecompile.memory_model.allocator import Allocator
from pipecompile.memory_model.messages import StageMessages
from pipecompile.memory_model.snapshots import Snapshot, StageState

__all__ = [
    "RankHoldings",
    "activations_of",
    "counted_once",
    "has_copies",
    "kv_cache_of",
    "minibatch_of",
    "steps_on_copies",
    "summed",
]


@dataclass(frozen=True)
class RankHoldings:
    """What a rank holds in any snapshot: what no snapshot changes is added up once."""

    stages: Mapping[int, Footprint]
    microbatches: int
    allocator: Allocator
    known_gradients: dict[tuple[int, ...], Amount] = field(default_factory=dict)

    def at(self, snapshot: Snapshot) -> RankMemory:
        """Return by kind what is held in a snapshot, with the most that lives in its action."""
        stages = self.stages
        pairs = [(stage, snapshot.states[index]) for index, stage in sorted(stages.items())]
        is_copied = has_copies(stages, snapshot)
        messages = (self.messages[i].held(state) for i, state in snapshot.states.items())
        copies = (stage.gradient_copies * state.has_all_gradients for stage, state in pairs)
        parameters, optimizer = self._of_all["parameters"], self._of_all["optimizer"]
        return RankMemory(
            # Gradients are as large as the parameters that are trained.
            parameters=parameters + self._of_all["gradients"] if is_copied else parameters,
            gradients=self._gradients(snapshot, is_copied)
            * (1 + steps_on_copies(stages, snapshot)),
            optimizer=optimizer * (1 + is_copied),
            activations=summed(activations_of(stage, state) for stage, state in pairs),
            buffers=self._minibatch + summed(messages) + summed(copies),
            workspace=workspace_of_action(stages, snapshot, self.allocator),
            kv_cache=self._kv_cache,
        )

    @cached_property
    def messages(self) -> dict[int, StageMessages]:
        """The messages of each stage."""
        return {index: StageMessages(self.stages, index) for index in self.stages}

    def _gradients(self, snapshot: Snapshot, is_copied: bool) -> Amount:
        """Return the gradients of the stages that have some, counted once."""
        states = snapshot.states
        held = tuple(i for i in self.stages if states[i].has_gradients or is_copied)
        # A row has thousands of snapshots, but gradients of few different sets of stages.
        if held not in self.known_gradients:
            stages = [self.stages[index] for index in held]
            self.known_gradients[held] = counted_once(stages, "gradients")
        return self.known_gradients[held]

    @cached_property
    def _of_all(self) -> dict[str, Amount]:
        kinds = ("parameters", "gradients", "optimizer")
        return {kind: counted_once(self.stages.values(), kind) for kind in kinds}

    @cached_property
    def _minibatch(self) -> Amount:
        return minibatch_of(self.stages, self.microbatches)

    @cached_property
    def _kv_cache(self) -> Amount:
        return kv_cache_of(self.stages)


def has_copies(stages: Mapping[int, Footprint], snapshot: Snapshot) -> bool:
    """Return whether copies are held of what the last update has overwritten: from the step to the
    first backward after it.
    """
    if not any(stage.is_validated_later for stage in stages.values()):
        return False
    is_leading = snapshot.kind is Kind.FORWARD and snapshot.is_before_backwards
    return snapshot.kind is Kind.STEP or is_leading


def steps_on_copies(stages: Mapping[int, Footprint], snapshot: Snapshot) -> bool:
    """Return whether an optimizer steps on copies of gradients, which it may write to."""
    is_validated_later = any(stage.is_validated_later for stage in stages.values())
    return is_validated_later and snapshot.kind is Kind.STEP


def summed(amounts: Iterable[Amount]) -> Amount:
    """Return all amounts together."""
    return sum(amounts, ZERO)


def counted_once(stages: Collection[Footprint], kind: str) -> Amount:
    """Return a kind of all these stages of a rank: what several of them share is there once."""
    shared = {share.name: getattr(share, kind) for stage in stages for share in stage.shared}
    # Each stage's own figure has its shares: subtract all of them, and add each parameter once. For
    # an embedding of 400 MB in a stage of 500, tied to the head in one of 450 on the same rank,
    # that is 950 − 800 + 400 = 550.
    counted = summed(getattr(share, kind) for stage in stages for share in stage.shared)
    return summed(getattr(stage, kind) for stage in stages) - counted + summed(shared.values())


def activations_of(stage: Footprint, state: StageState) -> Amount:
    """Return what a stage's microbatches in flight keep.

    Between input and weight backward a microbatch keeps what the first of them left: with
    activations of 41, of which it frees 5 and to which it adds 7, that is 43.
    """
    held = stage.activations * state.with_activations
    if state.with_outputs:
        held += stage.outputs * state.with_outputs
    if state.with_buffer_copies:
        held += stage.buffer_copies * state.with_buffer_copies
    if state.between_backwards:
        between = between_halves(stage) - stage.outputs_freed_by_input_backward
        held += between * state.between_backwards
    return held


def minibatch_of(stages: Mapping[int, Footprint], microbatches: int) -> Amount:
    """Return what the stages read of the whole minibatch."""
    return summed(stage.inputs for stage in stages.values()) * microbatches


def kv_cache_of(stages: Mapping[int, Footprint]) -> Amount:
    """Return the KV caches of all stages."""
    return summed(stage.kv_cache for stage in stages.values())
