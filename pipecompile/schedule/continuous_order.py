"""1F1B without end: the actions of stages through which minibatches follow each other.

A run that never empties the pipeline has no last microbatch, so its order is not a schedule but
the rule by which each stage goes on. With p stages, stage s keeps p − s microbatches in flight:

    fewer are in flight, and another one has been read     the next forward
    else                                                   the next backward
    none is in flight                                      nothing: the pipeline is empty

Over ranks a message and its receive stand where both ends of a link have all messages in one order,
so neither waits for the other in vain. A receive of values is posted one forward ahead:

    rank 0    SEND_F0 SEND_F1 RECV_B0 SEND_F2 RECV_B1 …       (F0, F1, B0, F2, B1)
    rank 1    RECV_F0 RECV_F1 SEND_B0 RECV_F2 SEND_B1 …

A stage closes an update behind the last backward of it (REDUCE: its gradients are complete), and
steps at once; or it defers the step until a forward needs the version that the step makes.

Replicas of a stage take its microbatches in turns. Each goes on by the same rule with its own ones,
of which it keeps `PipelineSize.depth` in flight (replicated_order.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipecompile.ir.schedule import Action, Kind
from pipecompile.schedule.asynchronous_versions import PipelineSize, VersionRule

__all__ = ["ContinuousOrder", "UpdatedWeights"]


@dataclass
class UpdatedWeights:
    """The weights of stage `owner` that a stage updates: its own, or those of an earlier one that
    it reads too, of which its rank has a copy. `steps` counts what has been stepped.
    """

    owner: int
    deferred: bool
    steps: int = 0


@dataclass
class _StageOrder:
    """How far one stage is: counts of its forwards, backwards, posted receives, closed updates.

    They count the microbatches that this process has of the stage: every `stride`-th from `turn`
    on, of which it keeps `depth` in flight.
    """

    stage: int
    weights: Sequence[UpdatedWeights]
    depth: int
    turn: int
    stride: int
    forwards: int
    backwards: int
    received: int
    closed: int

    def microbatch(self, index: int) -> int:
        """Return the number of the index-th microbatch of the stage here."""
        return self.turn + index * self.stride

    @property
    def unfinished(self) -> int:
        """The first microbatch here that has not gone back."""
        return self.microbatch(self.backwards)


@dataclass
class ContinuousOrder:
    """The order of the `stages` of this process, by index with the weights that each updates.

    `recomputed` are pairs of a stage and a microbatch, numbered in its minibatch, whose forward is
    recomputed. With `messages` all other stages are on other ranks, and this one has one stage;
    else this process has all. A stage with replicas is alone too, and this is the one with the
    number `replica`. The order begins at `first`, up to which all microbatches have gone back, in
    whole minibatches.
    """

    size: PipelineSize
    rule: VersionRule
    stages: Mapping[int, Sequence[UpdatedWeights]]
    recomputed: Collection[tuple[int, int | None]] = ()
    messages: bool = False
    first: int = 0
    replica: int = 0
    _orders: dict[int, _StageOrder] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        updates = self.rule.update(self.size, self.first)
        for weights in (each for stage in self.stages.values() for each in stage):
            weights.steps = updates
        self._orders = {stage: self._order(stage, updates) for stage in self.stages}

    def _order(self, stage: int, updates: int) -> _StageOrder:
        weights, depth = self.stages[stage], self.size.depth(stage)
        stride = self.size.replicas[stage]
        begun = self.first // stride
        return _StageOrder(
            stage, weights, depth, self.replica, stride, begun, begun, begun, closed=updates
        )

    @property
    def unfinished(self) -> int:
        """The first microbatch of this process that has not gone back through all stages here."""
        return min(order.unfinished for order in self._orders.values())

    def until(self, done: int, read: int) -> Iterator[Action]:
        """Yield actions until `done` microbatches have gone back, of the `read` ones that may
        begin.

        Each action is to be performed before the next one is asked for. `1STEP4@5` is the step
        that makes version 5, after microbatch 4 was the last one to go back through the stage.
        """
        while self.unfinished < done:
            moved = False
            for order in self._orders.values():
                if self._is_ready(order, read):
                    moved = True
                    yield from self._next(order, read)
            assert moved, "no stage can go on, although microbatches are left"

    def deferred_steps(self) -> Iterator[Action]:
        """Yield the steps that wait for a forward that needs them; the pipeline must be empty."""
        for order in self._orders.values():
            for weights in order.weights:
                while weights.steps < order.closed:
                    yield self._step(order, weights)

    def _is_forward(self, order: _StageOrder, read: int) -> bool:
        # Stage 1 of 3 keeps two in flight: F0 F1 │ B0 F2 │ B1 F3 │ … Only the counts of the
        # stage itself decide, and not what has arrived. So the order, and with it the version
        # of the weights that a microbatch reads, is the same however slow a message is.
        in_flight = order.forwards - order.backwards
        return order.microbatch(order.forwards) < read and in_flight < order.depth

    def _is_ready(self, order: _StageOrder, read: int) -> bool:
        """Return whether a stage has a next action and what that needs of a stage beside it, if
        that is in this process; a message is waited for.
        """
        if self._is_forward(order, read):
            before = self._orders.get(order.stage - 1)
            return before is None or before.forwards > order.forwards
        behind = self._orders.get(order.stage + 1)
        is_there = behind is None or behind.backwards > order.backwards
        return order.backwards < order.forwards and is_there

    def _next(self, order: _StageOrder, read: int) -> Iterator[Action]:
        if self._is_forward(order, read):
            return self._forward(order, read)
        return self._backward(order)

    def _forward(self, order: _StageOrder, read: int) -> Iterator[Action]:
        microbatch = order.microbatch(order.forwards)
        # A deferred step is made now, since this forward reads what it makes.
        for weights in order.weights:
            while self.rule.version(self.size, weights.owner, microbatch) > weights.steps:
                yield self._step(order, weights)
        yield from self._receives(order, microbatch + 1)
        yield self._action(order, Kind.FORWARD, microbatch)
        order.forwards += 1
        if self.messages and order.stage + 1 < self.size.stages:
            yield Action(order.stage, Kind.SEND_FORWARD, microbatch)
        # One ahead, so that the next values arrive while this stage computes.
        # Stage 1 of 3 posts 1RECV_F2 before it waits for the gradient that lets it come to 1F2:
        #
        #     1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1RECV_B0 1B0 1SEND_B0 … 1F2
        #
        # Never beyond what is read, though: nobody would send
        # that, and the receive would never end.
        yield from self._receives(order, min(read, order.microbatch(order.forwards) + 1))

    def _receives(self, order: _StageOrder, end: int) -> Iterator[Action]:
        """Yield the receives of the microbatches before `end` that are not posted yet."""
        while self.messages and order.stage and order.microbatch(order.received) < end:
            yield Action(order.stage, Kind.RECEIVE_FORWARD, order.microbatch(order.received))
            order.received += 1

    def _backward(self, order: _StageOrder) -> Iterator[Action]:
        microbatch, stage = order.unfinished, order.stage
        if self.messages and stage + 1 < self.size.stages:
            yield Action(stage, Kind.RECEIVE_BACKWARD, microbatch)
        if (stage, microbatch % self.size.microbatches) in self.recomputed:
            yield self._action(order, Kind.RECOMPUTE, microbatch)
        yield self._action(order, Kind.BACKWARD, microbatch)
        order.backwards += 1
        if self.messages and stage:
            yield Action(stage, Kind.SEND_BACKWARD, microbatch)
        # `order.backwards` has gone up: the first unfinished microbatch belongs to a
        # later update exactly when this backward was the last one of its update here.
        if self.rule.update(self.size, order.unfinished) > order.closed:
            # Sums first and steps then: a rank that holds a copy waits for the sum alone.
            for weights in order.weights:
                yield Action(weights.owner, Kind.REDUCE, None, order.closed + 1)
            order.closed += 1
            for weights in order.weights:
                if not weights.deferred:
                    yield self._step(order, weights)

    def _action(self, order: _StageOrder, kind: Kind, microbatch: int) -> Action:
        version = self.rule.version(self.size, order.stage, microbatch)
        return Action(order.stage, kind, microbatch, version)

    def _step(self, order: _StageOrder, weights: UpdatedWeights) -> Action:
        weights.steps += 1
        last = order.microbatch(order.backwards - 1)
        return Action(weights.owner, Kind.STEP, last, weights.steps)
