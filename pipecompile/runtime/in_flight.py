"""The minibatches in flight through the stages of this process, which no step empties.

Each minibatch is a `RankStep` of its own, so that all of rank_step.py holds for it. Microbatches
are numbered through; with two in each minibatch:

    0F0@0 0F1@0 0F2@0 0B0@0 0STEP0@1 0F3@1
    └ minibatch 0 ┘└1┘└ minibatch 0 ┘└1 ┘

Around each action the parameters of its stage are replaced by those of its weight version: also
around backwards, which may run forwards of recomputed regions once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from pipecompile.ir.schedule import TRANSFERS, Action, Kind
from pipecompile.runtime.messages import Messages
from pipecompile.runtime.rank_step import ActionObserver, Minibatch, RankStep, StepResult
from pipecompile.runtime.stage import EagerStage
from pipecompile.runtime.weight_updates import WeightUpdates

__all__ = ["MinibatchesInFlight"]


class MinibatchesInFlight:
    """The stages of this process, of `count`, and the minibatches that are on their way through.

    Each minibatch has `microbatches`, of which stages recompute those in `recomputed`. `owners` are
    the stages to which the weights of each stage belong. `update(microbatch)` is the number of the
    update that its gradients are part of. So many processes take `turns`: this one has every
    `turns`-th microbatch. `observers` are told of actions with microbatches numbered within their
    minibatch, and of updates; `recorders` likewise, with numbers from `first_recorded` on.
    """

    def __init__(
        self,
        stages: Mapping[int, EagerStage],
        count: int,
        microbatches: int,
        recomputed: Collection[tuple[int, int | None]],
        updates: WeightUpdates,
        owners: Mapping[int, Sequence[int]],
        update: Callable[[int], int],
        *,
        turns: int = 1,
        messages: Messages | None = None,
        observers: Sequence[ActionObserver] = (),
        recorders: Sequence[ActionObserver] = (),
    ) -> None:
        self._stages = stages
        self._count = count
        self._microbatches = microbatches
        self._recomputed = recomputed
        self._updates = updates
        self._owners = owners
        self._update = update
        self._turns = turns
        self._messages = messages
        self._observers = observers
        self._recorders = recorders
        self.first_recorded = 0
        self._steps: dict[int, RankStep] = {}
        self._leaves: dict[tuple[int, int], dict[nn.Parameter, Tensor]] = {}

    def begin(self, number: int, batch: Minibatch) -> None:
        """Let minibatch `number` begin."""
        first = number * self._microbatches - self.first_recorded
        recorders = [_NumberedThrough(each, first) for each in self._recorders]
        self._steps[number] = RankStep(
            self._stages,
            self._count,
            batch,
            self._recomputed,
            messages=self._messages,
            observers=[*self._observers, *recorders],
        )

    def end(self, number: int) -> StepResult | None:
        """Return what the last stage has computed of minibatch `number`, whose microbatches have
        all gone back here; None if that stage is elsewhere.
        """
        return self._steps.pop(number).result()

    def perform(self, action: Action) -> None:
        """Perform one action; its microbatch is numbered through all minibatches."""
        stage, kind, microbatch, _ = action
        if kind in (Kind.REDUCE, Kind.STEP):
            with self._recorded(action):
                self._update_weights(action)
            return
        assert microbatch is not None
        # With two in each minibatch microbatch 5 is the second one, 1, of minibatch 2. Its step
        # knows no versions: here its stage gets the weights that it is to see.
        number, within = divmod(microbatch, self._microbatches)
        own = action._replace(microbatch=within, version=None)
        if kind in TRANSFERS:
            self._steps[number].perform(own)
        else:
            self._compute(stage, microbatch, self._steps[number], own)

    def _update_weights(self, action: Action) -> None:
        stage, kind, microbatch, version = action
        assert version is not None
        if kind is Kind.REDUCE:
            self._updates.close(stage, version)
        else:
            assert microbatch is not None
            self._updates.step(stage, version, unfinished=microbatch + self._turns)

    @contextmanager
    def _recorded(self, action: Action) -> Iterator[None]:
        """Tell all of an update, which waits for nothing before it begins."""
        recorders: list[ActionObserver] = [*self._observers]
        recorders += [_NumberedThrough(each, -self.first_recorded) for each in self._recorders]
        for recorder in recorders:
            recorder.begin(action)
            recorder.ready(action)
        yield
        for recorder in recorders:
            recorder.end(action)

    def _compute(self, stage: int, microbatch: int, step: RankStep, own: Action) -> None:
        leaves = self._leaves_of(stage, microbatch)
        # Version 0 is what training begins with, and update 0 makes version 1.
        version = self._update(microbatch) + 1
        is_backward = own.kind is Kind.BACKWARD
        # Each microbatch has leaves of its own, but autograd adds to one sum, in the order of
        # microbatches: it moves from leaf to leaf.
        if is_backward:
            self._updates.continue_sums(stage, version, leaves)
        by_identity = {id(parameter): leaf for parameter, leaf in leaves.items()}
        with self._stages[stage].swapped(by_identity):
            step.perform(own)
        if is_backward:
            self._updates.keep_sums(stage, version, leaves)
            del self._leaves[stage, microbatch]

    def _leaves_of(self, stage: int, microbatch: int) -> dict[nn.Parameter, Tensor]:
        """Return the leaves on which a microbatch runs in a stage, from its forward on."""
        # Kept until the backward, since autograd leaves gradients on the leaves of the forward.
        key = stage, microbatch
        if key not in self._leaves:
            # A tied parameter has its versions where it is owned, beside others that this stage
            # lacks.
            read = set(self._stages[stage].module.parameters())
            self._leaves[key] = {
                parameter: leaf
                for owner in self._owners[stage]
                for parameter, leaf in self._updates.weights[owner].versions.leaves(microbatch)
                if parameter in read
            }
        return self._leaves[key]


@dataclass(frozen=True)
class _NumberedThrough:
    """Tells `observer` of actions whose microbatches are `first` further than they are called."""

    observer: ActionObserver
    first: int

    def begin(self, action: Action) -> None:
        """`action` is next."""
        self.observer.begin(self._renumbered(action))

    def ready(self, action: Action) -> None:
        """All that `action` needs is there."""
        self.observer.ready(self._renumbered(action))

    def end(self, action: Action) -> None:
        """`action` is done."""
        self.observer.end(self._renumbered(action))

    def _renumbered(self, action: Action) -> Action:
        if action.microbatch is None:
            return action
        return action._replace(microbatch=action.microbatch + self.first)
