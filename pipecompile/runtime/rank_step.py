"""What one process does in one step: it performs the actions of a schedule, one after the other.

In one process (one_process.py) the actions of all ranks are performed; under torchrun each process
(distributed_pipeline.py) performs its own rank's. Stages of one process hand tensors to each other;
a tensor for a stage elsewhere waits in a table until its SEND:

    0F0 ──▶ values[1, 0] ──▶ 1F0               both stages here
    0F0 ──▶ outgoing ──▶ 0SEND_F0 ··· 1RECV_F0 ──▶ 1F0        stage 1 elsewhere

Observers are told of each action when it begins, when what it waits for is there, and when it has
ended: that is how a run is timed, and how a rank that hangs is found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pipecompile.graph.layout import is_dense
from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.schedule import BACKWARDS, TRANSFERS, Action, Kind
from pipecompile.runtime.messages import Messages
from pipecompile.runtime.stage import BackwardParts, EagerStage, SavedForward, TiedGradients

__all__ = [
    "ActionObserver",
    "Minibatch",
    "RankStep",
    "Reducer",
    "StepResult",
    "recomputed_microbatches",
]


@dataclass(frozen=True)
class Minibatch:
    """The data of one step: input tensors and target of each microbatch, and what is drawn from.

    `loss_gradients` are what the backward of each microbatch begins with, None for 1; without them
    all begin with 1. `first` is the number of the first microbatch among those of all replicas, so
    that each draws its own random numbers. Ranks compare how many `samples` they were given.
    """

    inputs: Sequence[Sequence[Tensor]]
    targets: Sequence[Any]
    seed: int
    step: int
    loss_gradients: Sequence[Tensor | None] = ()
    first: int = 0
    samples: int = 0

    def loss_gradient(self, microbatch: int) -> Tensor | None:
        """Return what the backward of a microbatch begins with, None for 1."""
        return self.loss_gradients[microbatch] if self.loss_gradients else None

    def stream_key(self, microbatch: int) -> StreamKey:
        """Return what random nodes draw from."""
        return StreamKey(self.seed, self.step, self.first + microbatch)


class StepResult(NamedTuple):
    """What the last stage has computed of each microbatch, and what its loss function added.

    `values` are losses, one in a tuple, or the model's output tensors.
    """

    values: Sequence[tuple[Tensor, ...]]
    extras: Sequence[Any]


class ActionObserver(Protocol):
    """What is told of each action of a rank."""

    def begin(self, action: Action) -> None:
        """`action` is next; it may have to wait for a message."""

    def ready(self, action: Action) -> None:
        """All that `action` needs is there."""

    def end(self, action: Action) -> None:
        """`action` is done; on a GPU its kernels may still run."""


class Reducer(Protocol):
    """What sums the gradients of a stage over replicas."""

    def start(self, stage: int) -> None:
        """The gradients of `stage` are complete on this rank."""


class RankStep:
    """The stages of this process during one step, and what they keep and pass to each other.

    `stages` are those of this process by index, and `count` is how many the pipeline has.
    `recomputed` are the pairs of stage and microbatch whose forward will be recomputed. Tables are
    by (stage, microbatch): `_values` are inputs that wait for a forward, `_gradients` those of
    outputs that wait for a backward, and `_outgoing` waits for its SEND.

    Without `trains` there are forwards only, without gradients; `with_loss` says whether the last
    stage then computes the loss. `remainder` are the stages for the last microbatch if that is
    smaller than the others.
    """

    def __init__(
        self,
        stages: Mapping[int, EagerStage],
        count: int,
        batch: Minibatch,
        recomputed: Collection[tuple[int, int | None]],
        *,
        messages: Messages | None = None,
        reducer: Reducer | None = None,
        observers: Sequence[ActionObserver] = (),
        trains: bool = True,
        with_loss: bool = False,
        remainder: Mapping[int, EagerStage] | None = None,
    ) -> None:
        self._stages = stages
        self._remainder = remainder or stages
        self._count = count
        self._batch = batch
        self._recomputed = recomputed
        self._messages = messages
        self._reducer = reducer
        self._observers = observers
        self._trains = trains
        self._with_loss = with_loss
        self._values: dict[tuple[int, int], Sequence[Any]] = {
            (0, microbatch): values for microbatch, values in enumerate(batch.inputs)
        }
        self._gradients: dict[tuple[int, int], Sequence[Tensor | None]] = {}
        self._outgoing: dict[tuple[int, int, Kind], Sequence[Tensor | None]] = {}
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._parts: dict[tuple[int, int], BackwardParts] = {}
        self._tied_gradients: list[TiedGradients] = [{} for _ in batch.inputs]
        self._extras: dict[int, Any] = {}

    def perform(self, action: Action) -> None:
        """Perform one action; the schedule says that all it needs is there or on its way."""
        for observer in self._observers:
            observer.begin(action)
        self._await_message(action)
        for observer in self._observers:
            observer.ready(action)
        self._perform(action)
        for observer in self._observers:
            observer.end(action)

    def result(self) -> StepResult | None:
        """Return what the last stage has computed; None if it is elsewhere."""
        if self._count - 1 not in self._stages:
            return None
        count = range(len(self._batch.inputs))
        values = [tuple(self._values[self._count, microbatch]) for microbatch in count]
        return StepResult(values, [self._extras.get(microbatch) for microbatch in count])

    def finish(self) -> None:
        """Wait until everything is sent."""
        if self._messages is not None:
            self._messages.finish()

    def _await_message(self, action: Action) -> None:
        """Put into the tables what another rank sends for `action`, once it is there."""
        if self._messages is None:
            return
        index, kind, microbatch, _ = action
        # What a stage of this process handed over is in the table already.
        if kind is Kind.FORWARD:
            self._receive_into(self._values, index, Kind.RECEIVE_FORWARD, microbatch)
        elif kind in BACKWARDS and index != self._count - 1:
            self._receive_into(self._gradients, index, Kind.RECEIVE_BACKWARD, microbatch)
        elif kind in TRANSFERS:
            self._messages.settle()

    def _receive_into(
        self,
        table: dict[tuple[int, int], Sequence[Any]],
        index: int,
        kind: Kind,
        microbatch: int | None,
    ) -> None:
        assert self._messages is not None
        assert microbatch is not None
        key = index, microbatch
        if key not in table:
            table[key] = self._messages.wait(Action(index, kind, microbatch))

    def _perform(self, action: Action) -> None:
        if action.kind is Kind.REDUCE:
            if self._reducer is not None:
                self._reducer.start(action.stage)
            return
        assert action.microbatch is not None
        key = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                self._forward(*key)
            case Kind.RECOMPUTE:
                self._stage(*key).recompute(self._saved[key])
            case Kind.BACKWARD:
                self._backward(*key)
            case Kind.BACKWARD_INPUT:
                self._backward_input(*key)
            case Kind.BACKWARD_WEIGHT:
                tied = self._tied_gradients[action.microbatch]
                self._stage(*key).backward_weight(self._parts.pop(key), tied)
            case _:
                self._transfer(action)
        if action.kind in BACKWARDS and self._messages is not None:
            self._messages.free_values(*key)

    def _stage(self, index: int, microbatch: int) -> EagerStage:
        """Return the stage `index` for the size of `microbatch`."""
        is_last = microbatch == len(self._batch.inputs) - 1
        return (self._remainder if is_last else self._stages)[index]

    def _transfer(self, action: Action) -> None:
        assert self._messages is not None, f"{action} is not a compute action"
        assert action.microbatch is not None
        if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            self._messages.receive(action)
        else:
            values = self._outgoing.pop((action.stage, action.microbatch, action.kind))
            self._messages.send(action, values)

    def _forward(self, index: int, microbatch: int) -> None:
        stage, stream_key = self._stage(index, microbatch), self._batch.stream_key(microbatch)
        values = self._values.pop((index, microbatch))
        target = self._batch.targets[microbatch]
        outputs: Sequence[Tensor]
        if self._trains:
            is_recomputed = (index, microbatch) in self._recomputed
            outputs, self._saved[index, microbatch] = stage.forward(
                values, stream_key, target, recompute=is_recomputed
            )
            if index + 1 == self._count:
                self._end_forward(index, microbatch)
        elif self._with_loss and index + 1 == self._count:
            outputs, self._extras[microbatch] = stage.evaluate_loss(values, stream_key, target)
        else:
            outputs = stage.evaluate(values, stream_key)
        if index + 1 in self._stages or index + 1 == self._count:
            self._values[index + 1, microbatch] = outputs
        else:
            self._outgoing[index, microbatch, Kind.SEND_FORWARD] = outputs

    def _end_forward(self, index: int, microbatch: int) -> None:
        """Keep what came with the loss, and begin the backward."""
        self._extras[microbatch] = self._saved[index, microbatch].extras
        loss_gradient = self._batch.loss_gradient(microbatch)
        if loss_gradient is not None:
            self._gradients[index, microbatch] = [loss_gradient]

    def _backward(self, index: int, microbatch: int) -> None:
        # What was saved and received is popped within the call. No variable here holds it, so it is
        # freed before `_pass_back` copies gradients.
        gradients = self._stage(index, microbatch).backward(
            self._saved.pop((index, microbatch)),
            self._gradients.pop((index, microbatch), ()),
            self._tied_gradients[microbatch],
        )
        self._pass_back(index, microbatch, gradients)

    def _backward_input(self, index: int, microbatch: int) -> None:
        gradients, self._parts[index, microbatch] = self._stage(index, microbatch).backward_input(
            self._saved.pop((index, microbatch)), self._gradients.pop((index, microbatch), ())
        )
        self._pass_back(index, microbatch, gradients)

    def _pass_back(self, index: int, microbatch: int, gradients: list[Tensor | None]) -> None:
        if not index:
            return
        if index - 1 in self._stages and self._messages is None:
            # In one process autograd may hand on views: nothing is sent, so nothing is copied.
            self._gradients[index - 1, microbatch] = gradients
            return
        # The list is filled in place, so that each gradient is freed as soon as its copy is there.
        for position, gradient in enumerate(gradients):
            gradients[position] = None if gradient is None else own_storage(gradient)
        if index - 1 in self._stages:
            self._gradients[index - 1, microbatch] = gradients
        else:
            self._outgoing[index, microbatch, Kind.SEND_BACKWARD] = gradients


def own_storage(gradient: Tensor) -> Tensor:
    """Return the gradient without gaps, and not as a part of a larger storage, which it would keep.

    It lies in the order of dimensions that it has: sums over it are rounded by that.
    """
    if gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes:
        return gradient
    return gradient.clone() if is_dense(gradient) else gradient.contiguous()


def recomputed_microbatches(actions: Sequence[Action]) -> frozenset[tuple[int, int | None]]:
    """Return the pairs of stage and microbatch that `actions` recompute."""
    return frozenset(
        (action.stage, action.microbatch) for action in actions if action.kind is Kind.RECOMPUTE
    )
