"""The runtime under torchrun: each rank performs its row of the schedule.

The rows are those that were simulated and checked. rank_step.py performs their actions, with the
messages of messages.py, one after the other:

    row of rank 0      0F0  0SEND_F0  0F1  0SEND_F1  0RECV_B0  0B0  …
    row of rank 1      1RECV_F0  1F0  1B0  1SEND_B0  …

With `engine="torch"` the runtime of torch.distributed.pipelining walks through the same rows
(torch_engine.py), as an oracle of the loop here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from pipecompile.ir.schedule import BACKWARDS, TRANSFERS, Action, Kind, Schedule
from pipecompile.memory_model.unread_gradients import unread_gradients
from pipecompile.runtime.agreement import Agreement
from pipecompile.runtime.leading_forwards import LeadingForwards
from pipecompile.runtime.messages import Boundaries, CountUnread, Messages
from pipecompile.runtime.peers import peers_at
from pipecompile.runtime.rank_step import (
    ActionObserver,
    Minibatch,
    RankStep,
    Reducer,
    StepResult,
    recomputed_microbatches,
)
from pipecompile.runtime.stage import EagerStage
from pipecompile.runtime.watch import StepWatch

__all__ = ["DistributedPipeline", "Engine", "SizedStages"]

Engine = Literal["own", "torch"]
"""What walks through the actions of a rank."""


class SizedStages(NamedTuple):
    """The stages of this rank for one size of microbatches, and what enters each stage of all."""

    stages: Mapping[int, EagerStage]
    boundaries: Boundaries


class DistributedPipeline:
    """The stages of this rank; they perform schedules with the other ranks of the pipeline.

    `boundaries[s]` are the tensors that enter stage s, for stage 0 the model's inputs. `group` is
    the process group of the pipeline, None for all ranks.
    """

    def __init__(
        self,
        stages: Mapping[int, EagerStage],
        device: torch.device,
        boundaries: Boundaries,
        group: dist.ProcessGroup | None = None,
        engine: Engine = "own",
    ) -> None:
        self._stages = dict(stages)
        self._device = device
        self._boundaries = boundaries
        self._group = group
        self._torch = None
        if engine == "torch":
            # Here: our own engine does not depend on torch's private names.
            from pipecompile.runtime.torch_engine import TorchEngine

            self._torch = TorchEngine(self._stages, len(boundaries), device, group)
        self._messages_by_placement: dict[tuple[int, ...], Messages] = {}

    def run(
        self,
        schedule: Schedule,
        batch: Minibatch,
        agreement: Agreement,
        watch: StepWatch,
        *,
        reducer: Reducer | None = None,
        observers: Sequence[ActionObserver] = (),
        with_loss: bool = False,
        remainder: SizedStages | None = None,
        leading: LeadingForwards | None = None,
    ) -> StepResult | None:
        """Perform this rank's row of `schedule`, with no message before the ranks' `agreement`.

        Return what the last stage returns; None on ranks without it. `reducer` is told when the
        gradients of a stage are complete. A schedule without backwards returns the model's output
        tensors, or if it is `with_loss` losses. `remainder` are the stages for the last microbatch
        if that is smaller than the others. With `leading` forwards ranks agree only after these.
        Where it fails with messages on their way that nobody receives, `watch` is told.
        """
        # A replica of a stage may have no microbatch of a small minibatch, and yet trains.
        trains = any(action.kind in BACKWARDS for _, action in schedule)
        early = agreement if leading is None else None
        messages = self._begun_messages(schedule, watch, early, remainder, trains=trains)
        left = deque(schedule.rows[dist.get_rank(self._group)])
        begin_step = partial(
            RankStep,
            self._stages,
            len(self._boundaries),
            batch,
            recomputed_microbatches(left),
            messages=messages,
            reducer=reducer,
            observers=[watch, *observers],
            trains=trains,
            with_loss=with_loss,
            remainder=None if remainder is None else remainder.stages,
        )
        lost = _noted_loss(watch, left, agreement, leading, has_sums=reducer is not None)
        with lost, torch.set_grad_enabled(trains):
            rank_step = self._led(begin_step, left, schedule, messages, agreement, leading)
            self._perform(left, rank_step, schedule)
        watch.actions_are_done()
        rank_step.finish()
        return rank_step.result()

    def _begun_messages(
        self,
        schedule: Schedule,
        watch: StepWatch,
        agreement: Agreement | None,
        remainder: SizedStages | None,
        *,
        trains: bool,
    ) -> Messages:
        """Return the messages of a step or an evaluation that begins, without an `agreement` where
        ranks agree later.
        """
        # To agree is to wait for all ranks, which leading forwards are there to avoid: their
        # messages go out before it, and ranks agree before the weights are validated.
        messages, unread = self._messages(schedule), unread_gradients(schedule)
        messages.begin(
            watch.deadline,
            agreement,
            None if remainder is None else (schedule.microbatches - 1, remainder.boundaries),
            trains=trains,
            unread=lambda send: unread[send.stage, send.microbatch],
        )
        return messages

    def _perform(self, left: deque[Action], rank_step: RankStep, schedule: Schedule) -> None:
        """Perform the actions that are `left` of this rank's row, and take away what is done."""
        if self._torch is not None:
            self._torch.perform(schedule, rank_step)
            left.clear()
        while left:
            # It is taken away when it is done and not before: one that fails may have sent half
            # of its tensors.
            rank_step.perform(left[0])
            left.popleft()

    def _led(
        self,
        begin_step: Callable[[], RankStep],
        left: deque[Action],
        schedule: Schedule,
        messages: Messages,
        agreement: Agreement,
        leading: LeadingForwards | None,
    ) -> RankStep:
        """Return a step that has begun: with its `leading` forwards, which are taken away from the
        row that is `left`, if the weights were right.
        """
        rank_step = begin_step()
        if leading is None:
            return rank_step
        rank = dist.get_rank(self._group)
        written = [buffer for stage in self._stages.values() for buffer in stage.buffers]
        agree = partial(messages.agree, agreement)
        if leading.perform(rank_step, tuple(left), rank, written, agree):
            for _ in range(leading.counts[rank]):
                left.popleft()
            return rank_step
        # On wrong weights: all are performed once more, with tables that hold nothing of the first
        # time.
        rank_step = begin_step()
        leading.drop_messages(schedule, rank, messages)
        return rank_step

    def begin(
        self,
        schedule: Schedule,
        agreement: Agreement,
        watch: StepWatch,
        unread: CountUnread,
    ) -> Messages:
        """Return the messages of a run that has no end, on the ranks of `schedule`; none is
        exchanged before the ranks' `agreement`. As many gradients are kept as are `unread`.
        """
        messages = self._messages(schedule)
        messages.begin(watch.deadline, agreement, unread=unread)
        return messages

    @property
    def history(self) -> int:
        """The number of training steps that its messages have ended."""
        return sum(messages.steps for messages in self._messages_by_placement.values())

    def _messages(self, schedule: Schedule) -> Messages:
        """Return the messages between the ranks of a placement."""
        if schedule.placement not in self._messages_by_placement:
            group = self._group or dist.group.WORLD
            assert group is not None
            peers = peers_at(schedule.placement, range(schedule.ranks))
            messages = Messages(self._boundaries, peers, self._device, group)
            self._messages_by_placement[schedule.placement] = messages
        return self._messages_by_placement[schedule.placement]


@contextmanager
def _noted_loss(
    watch: StepWatch,
    left: Collection[Action],
    agreement: Agreement,
    leading: LeadingForwards | None,
    *,
    has_sums: bool,
) -> Iterator[None]:
    """Tell `watch` if the block fails with messages on their way that nobody receives."""
    try:
        yield
    except BaseException:  # also Ctrl+C, after which a notebook may go on
        # Where all ranks have refused the step before its first message, none is on its way. What
        # is left of the row says whether others still wait for this rank: a failure behind its last
        # message and sum is its own, and the next step may begin as usual.
        has_begun = leading is not None or not agreement.is_refused
        if has_begun and _exchanges(left, has_sums=has_sums):
            watch.lose_messages()
        raise


def _exchanges(actions: Iterable[Action], *, has_sums: bool) -> bool:
    """Return whether one of the actions needs other ranks; sums do if it `has_sums`."""
    return any(
        action.kind in TRANSFERS or (has_sums and action.kind is Kind.REDUCE) for action in actions
    )
