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
of which it keeps `PipelineSize.depth` in flight, and closes an update when all of its ranks do. A
rank that waits there holds up nobody whom the others wait for: what one of its backwards waits for
are the backward of the same microbatch in the next stage, and others of earlier microbatches.
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

    They count the microbatches that this process has of the stage: all of them, `per_round` in a
    round, or every `stride`-th from `turn` on. It keeps those of `depth` rounds in flight.
    """

    stage: int
    weights: Sequence[UpdatedWeights]
    depth: int
    turn: int = 0
    stride: int = 1
    per_round: int = 1
    forwards: int = 0
    backwards: int = 0
    received: int = 0
    closed: int = 0

    def microbatch(self, index: int) -> int:
        """Return the number of the index-th microbatch of the stage here."""
        return self.turn + index * self.stride

    @property
    def is_full(self) -> bool:
        """Whether as many are in flight as may be."""
        return self.forwards // self.per_round >= self.backwards // self.per_round + self.depth

    @property
    def unfinished(self) -> int:
        """The first microbatch here that has not gone back."""
        return self.microbatch(self.backwards)


@dataclass
class ContinuousOrder:
    """The order of the `stages` of this process, by index with the weights that each updates.

    `recomputed` are pairs of a stage and a microbatch, numbered in its minibatch, whose forward is
    recomputed. With a `replica` this is that one of the ranks of its only stage, and all others are
    elsewhere; else this process has all microbatches of all stages. With `messages` it exchanges
    these. The order begins at `first`, up to which all microbatches have gone back, in whole
    minibatches.
    """

    size: PipelineSize
    rule: VersionRule
    stages: Mapping[int, Sequence[UpdatedWeights]]
    recomputed: Collection[tuple[int, int | None]] = ()
    replica: int | None = None
    messages: bool = False
    first: int = 0
    _orders: dict[int, _StageOrder] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        updates = self.rule.update(self.size, self.first)
        for weights in (each for stage in self.stages.values() for each in stage):
            weights.steps = updates
        self._orders = {stage: self._order(stage, updates) for stage in self.stages}

    def _order(self, stage: int, updates: int) -> _StageOrder:
        replicas, depth = self.size.replicas[stage], self.size.depth(stage)
        order = _StageOrder(stage, self.stages[stage], depth, per_round=replicas, closed=updates)
        if self.replica is not None:
            order.turn, order.stride, order.per_round = self.replica, replicas, 1
        order.forwards = order.backwards = order.received = self.first // order.stride
        return order

    def until(self, done: int, read: int) -> Iterator[Action]:
        """Yield actions until `done` microbatches have gone back, of the `read` ones that may
        begin.

        Each action is to be performed before the next one is asked for. `1STEP4@5` is the step
        that makes version 5, after microbatch 4 was the last one to go back through the stage.
        """
        while any(order.unfinished < done for order in self._orders.values()):
            moved = False
            for order in self._orders.values():
                actions = self._next(order, read)
                if actions is not None:
                    moved = True
                    yield from actions
            assert moved, "no stage can go on, although microbatches are left"

    def deferred_steps(self) -> Iterator[Action]:
        """Yield the steps that wait for a forward that needs them; the pipeline must be empty."""
        for order in self._orders.values():
            for weights in order.weights:
                while weights.steps < order.closed:
                    yield self._step(order, weights)

    def _next(self, order: _StageOrder, read: int) -> Iterator[Action] | None:
        """Return the next actions of a stage; None if they need what a stage beside it in this
        process has not done yet. A message is waited for.
        """
        before, behind = self._orders.get(order.stage - 1), self._orders.get(order.stage + 1)
        if order.microbatch(order.forwards) < read and not order.is_full:
            if before is None or before.forwards > order.forwards:
                return self._forward(order, read)
            if order.per_round == 1:
                return None
            # A round may be longer than the stage before has begun: some of its ranks go on.
        is_there = behind is None or behind.backwards > order.backwards
        return self._backward(order) if order.backwards < order.forwards and is_there else None

    def _forward(self, order: _StageOrder, read: int) -> Iterator[Action]:
        microbatch = order.microbatch(order.forwards)
        for weights in order.weights:
            while self.rule.version(self.size, weights.owner, microbatch) > weights.steps:
                yield self._step(order, weights)
        yield from self._receives(order, microbatch + 1)
        yield self._action(order, Kind.FORWARD, microbatch)
        order.forwards += 1
        if self.messages and order.stage + 1 < self.size.stages:
            yield Action(order.stage, Kind.SEND_FORWARD, microbatch)
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
        if self.rule.update(self.size, order.unfinished) > order.closed:
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
