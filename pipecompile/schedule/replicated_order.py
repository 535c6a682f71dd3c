"""1F1B-RR without end: stages whose replicas take microbatches in turns, as minibatches follow each
other.

Each rank goes on by continuous_order.py. Where its messages and sums stand is another question: a
rank meets several others, which have no common order by themselves. So every process follows all
ranks, one action of each after the other, and all have one global order of these:

    rank 0 of stage 0   F0 SEND          F2 SEND               RECV B0 …
    rank 1 of stage 0           F1 SEND          F3 SEND
    rank 2 of stage 1   RECV F0 B0 SEND RECV F1 …

A receive stands where the message is sent, and a rank that closes an update (REDUCE) goes on when
all replicas of its stage have. So the order of all actions is a linear extension of what each waits
for, and cannot deadlock, even if every send blocks until it is received (as in transfers.py).

There is always a rank that can go on, as a backward waits for that of its microbatch in the next
stage, and else for earlier microbatches only. On its rank the forward of the one that is
(depth − 1) × replicas further comes before it, which is less than the ranks from the stage on
(`PipelineSize.depth`): the stages before begin that one when earlier ones than this have gone back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipecompile.ir.action_order import message_of
from pipecompile.ir.schedule import COMPUTE, Action, Kind
from pipecompile.schedule.asynchronous_versions import PipelineSize, VersionRule
from pipecompile.schedule.continuous_order import ContinuousOrder, UpdatedWeights

__all__ = ["ReplicatedOrder"]

_INPUTS = {Kind.FORWARD: -1, Kind.BACKWARD: 1}
"""By kind how many stages further the action is, of the same kind, that it waits for."""


@dataclass
class _Rank:
    """A rank of `stage`: its order, of which `head` is the next action, and what it has done.

    `last` has by kind the last microbatch that is done, and `closed` is the last closed update.
    """

    stage: int
    order: ContinuousOrder
    last: dict[Kind, int]
    closed: int
    head: Action | None = None
    _actions: Iterator[Action] = field(default_factory=lambda: iter(()), repr=False)

    def begin(self, done: int, read: int) -> None:
        """Go on until microbatches up to `done` have gone back, of `read`."""
        self._actions = self.order.until(done, read)
        self.head = next(self._actions, None)

    def advance(self) -> None:
        """Note that the next action is done."""
        assert self.head is not None, "a rank at its end is not asked to go on"
        stage, kind, microbatch, version = self.head
        if microbatch is not None:
            self.last[kind] = microbatch
        elif stage == self.stage and version is not None:
            self.closed = version
        self.head = next(self._actions, None)


@dataclass
class ReplicatedOrder:
    """The order of one rank, with its messages, or without a `rank` that of a process which has all
    stages.

    `weights` are those that each stage of this process updates; in one process once, when all
    replicas have closed the update. `recomputed` and `first` are those of `ContinuousOrder`.
    """

    size: PipelineSize
    rule: VersionRule
    weights: Mapping[int, Sequence[UpdatedWeights]]
    recomputed: Collection[tuple[int, int | None]] = ()
    rank: int | None = None
    first: int = 0
    _ranks: list[_Rank] = field(init=False, repr=False)
    _updated: dict[tuple[int, Kind], int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ranks = [
            self._at(stage, replica)
            for stage, replicas in enumerate(self.size.replicas)
            for replica in range(replicas)
        ]
        # In one process, by owner and kind the last version that was closed or made.
        self._updated = {}

    def _at(self, stage: int, replica: int) -> _Rank:
        # What ranks elsewhere update besides their own weights does not matter here.
        weights = self.weights.get(stage, [UpdatedWeights(stage, deferred=False)])
        updated = [replace(each) for each in weights]
        order = ContinuousOrder(
            self.size,
            self.rule,
            {stage: updated},
            self.recomputed,
            first=self.first,
            replica=replica,
        )
        before = self.first - 1
        last = {Kind.FORWARD: before, Kind.BACKWARD: before}
        return _Rank(stage, order, last, self.rule.update(self.size, self.first))

    def until(self, done: int, read: int) -> Iterator[Action]:
        """Yield actions until `done` microbatches have gone back, of the `read` ones that may
        begin. Each is to be performed before the next one is asked for.
        """
        for rank in self._ranks:
            rank.begin(done, read)
        while any(rank.head is not None for rank in self._ranks):
            # Two ranks of stage 0 and one of stage 1, minibatches of 2. The turns give
            #
            #     0F0 0F1 1F0 0F2 0F3 1B0 0B0 1F1 1B1 0B1 1REDUCE 1STEP …
            #
            # on every process, which keeps of it what its own rank does and where its messages are.
            heads = [rank.head for rank in self._ranks]
            for rank in self._ranks:
                yield from self._turn(rank)
            assert heads != [rank.head for rank in self._ranks], "ranks wait for each other"

    def deferred_steps(self) -> Iterator[Action]:
        """Yield the steps that wait for a forward that needs them; the pipeline must be empty."""
        for rank in self._ranks if self.rank is None else [self._ranks[self.rank]]:
            for action in rank.order.deferred_steps():
                yield from self._own(rank, action)

    def _turn(self, rank: _Rank) -> Iterator[Action]:
        """Yield what this process does while a rank performs one compute action, if it can, and the
        updates before it.
        """
        while rank.head is not None and self._is_possible(rank, rank.head):
            action = rank.head
            yield from self._own(rank, action)
            rank.advance()
            if action.kind in COMPUTE:
                return

    def _is_possible(self, rank: _Rank, action: Action) -> bool:
        """Return whether all that an action waits for is done on other ranks."""
        # Every process keeps these books alike, without a message: the question is whether
        # ranks have come as far in the common order, and not whether they have in time.
        if action.kind is Kind.REDUCE and action.stage == rank.stage:
            # Those that have gone on by now have closed it.
            waiting = [each for each in self._replicas(rank.stage) if each.closed == rank.closed]
            return all(each.head == action for each in waiting)
        # What a rank has of earlier stages is summed beside its next actions.
        source = rank.stage + _INPUTS.get(action.kind, 0)
        if source in (rank.stage, -1, self.size.stages):
            return True
        assert action.microbatch is not None, "compute actions name their microbatch"
        return self._having(source, action.microbatch).last[action.kind] >= action.microbatch

    def _own(self, rank: _Rank, action: Action) -> Iterator[Action]:
        """Yield what this process does of an action of some rank, and of its message."""
        if self.rank is None:
            yield from self._of_all(rank, action)
            return
        own = self._ranks[self.rank]
        if rank is own:
            yield action
        message = message_of(action, self.size.stages, (True,) * self.size.stages)
        if message is not None:
            send, receive = message
            assert receive.microbatch is not None, "messages are of one microbatch"
            if rank is own:
                yield send
            elif self._having(receive.stage, receive.microbatch) is own:
                yield receive

    def _of_all(self, rank: _Rank, action: Action) -> Iterator[Action]:
        """Yield an action of a process that has all stages, which updates the weights of each once:
        as soon as a replica does.
        """
        if action.kind in COMPUTE:
            yield action
            return
        key, version = (action.stage, action.kind), action.version or 0
        if self._updated.get(key, 0) >= version:
            return
        self._updated[key] = version
        if action.kind is Kind.STEP:
            unfinished = min(each.order.unfinished for each in self._replicas(rank.stage))
            action = action._replace(microbatch=unfinished - 1)
        yield action

    def _replicas(self, stage: int) -> list[_Rank]:
        start = sum(self.size.replicas[:stage])
        return self._ranks[start : start + self.size.replicas[stage]]

    def _having(self, stage: int, microbatch: int) -> _Rank:
        """Return the rank of a stage that has a microbatch."""
        return self._ranks[sum(self.size.replicas[:stage]) + microbatch % self.size.replicas[stage]]
