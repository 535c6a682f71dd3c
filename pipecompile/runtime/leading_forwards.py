"""The forwards that a step begins with before the weights of the last update are validated.

    all ranks   leading forwards ─ validate ─┬─ right: go on behind them
                                             └─ wrong: forget them, and begin the step once more

What they have sent is on its way, though. So a rank whose weights were wrong first receives, and
drops, what it has not read of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.runtime.messages import Messages
from pipecompile.runtime.rank_step import RankStep

__all__ = ["LeadingForwards"]


class LeadingForwards(NamedTuple):
    """The first actions of a step, `counts` of the row of each rank.

    `validate` makes the weights right. It returns whether they were right before, which is the same
    on all ranks.
    """

    counts: Sequence[int]
    validate: Callable[[], bool]

    def perform(
        self,
        rank_step: RankStep,
        row: Sequence[Action],
        rank: int,
        written: Sequence[Tensor],
        agree: Callable[[], None],
    ) -> bool:
        """Perform those of `rank`, wait until ranks `agree`, and validate the weights. Return
        whether they were right; if not, the buffers that forwards have `written` are restored.
        """
        # A batch norm's running averages: repeated forwards would move them a second time.
        before = [buffer.clone() for buffer in written]
        for action in row[: self.counts[rank]]:
            rank_step.perform(action)
        agree()
        if self.validate():
            return True
        for buffer, value in zip(written, before, strict=True):
            buffer.copy_(value)
        return False

    def drop_messages(self, schedule: Schedule, rank: int, messages: Messages) -> None:
        """Receive what others have sent to `rank` and none of its own leading actions has read."""
        leading = [row[:count] for row, count in zip(schedule.rows, self.counts, strict=True)]
        sent = {
            (action.stage + 1, action.microbatch)
            for row in leading
            for action in row
            if action.kind is Kind.SEND_FORWARD
        }
        # Say rank 0 leads with two forwards and rank 1 with one: then the second message of rank 0
        # is on its way, and 1RECV_F1 is not among what rank 1 has performed.
        for action in self._unread(schedule.rows[rank], leading[rank]):
            if (action.stage, action.microbatch) in sent:
                # A receive that leads is posted already; another one is posted now. Either way
                # the message is read: messages have no names, and the forward that is repeated
                # would take it for its own.
                if action not in leading[rank]:
                    messages.receive(action)
                messages.wait(action)

    @staticmethod
    def _unread(row: Sequence[Action], leading: Sequence[Action]) -> Iterator[Action]:
        """Yield the receives of a row whose forward is not among the `leading` actions."""
        read = {(a.stage, a.microbatch) for a in leading if a.kind is Kind.FORWARD}
        for action in row:
            key = action.stage, action.microbatch
            if action.kind is Kind.RECEIVE_FORWARD and key not in read:
                yield action
