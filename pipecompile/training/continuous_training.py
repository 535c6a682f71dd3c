"""Training that never empties the pipeline: minibatches follow each other through the stages.

The plan's schedule says which weights a microbatch reads. What a caller sees is an iterator of
losses; between two of them each process performs actions until one more minibatch has gone back:

    for loss in pipeline.train(…)     0F0 0F1 0F2 0B0 0STEP0@1 │ 0F3 0B1 0STEP1@2 │ …
                                                    first loss ┘       second loss ┘

All processes read as many minibatches ahead as the first stage needs, so that they agree on where
the pipeline would be emptied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.microbatch import MicrobatchSizes
from pipecompile.runtime.in_flight import MinibatchesInFlight
from pipecompile.runtime.messages import Messages
from pipecompile.runtime.rank_step import Minibatch, recomputed_microbatches
from pipecompile.runtime.weight_updates import WeightUpdates
from pipecompile.schedule.continuous_order import ContinuousOrder
from pipecompile.schedule.replicated_order import ReplicatedOrder
from pipecompile.training.batch_reader import input_and_target
from pipecompile.training.pipeline_parts import PipelineParts
from pipecompile.training.run_conditions import refuse_hooks_in_flight
from pipecompile.training.run_weights import RunWeights
from pipecompile.training.stage_optimizers import StageOptimizers, owned_parameters
from pipecompile.training.training_run import TrainingRun

__all__ = ["ContinuousTraining"]


class ContinuousTraining(Iterator[Any]):
    """The losses of `batches`, pairs of an input and a target, as a pipeline trains on them.

    Without `batches` they come one by one, by `step`. `optimizers` step the weights of each stage.
    With `max_norm` all gradients of an update are scaled to a norm of at most that. `run` counts
    the minibatches that have been trained on. A training that `has_failed` cannot go on, since what
    was in flight is lost: over ranks also after a batch that was refused, which others may have
    begun. One that `is_over` has no batches left, and keeps the newest weights only.
    """

    def __init__(
        self,
        parts: PipelineParts,
        run: TrainingRun,
        batches: Iterable[Any] | None,
        optimizers: StageOptimizers,
        max_norm: float | None = None,
    ) -> None:
        self.optimizers = optimizers
        self._parts = parts
        self._run = run
        self._batches = _GivenMinibatches() if batches is None else iter(batches)
        self._program = parts.programs.current(0)
        self._max_norm = max_norm
        owned = owned_parameters(self._program, parts.target.model_with_loss, parts.share)
        self.weights = RunWeights(parts.plan, parts.share, owned, optimizers, max_norm)
        self._rule, self._size = self.weights.rule, self.weights.size
        self._flow: _MinibatchFlow | None = None
        self._done = self._read = 0  # minibatches since training began
        self._filled = 0  # and those that had gone back when the pipeline was last empty
        self._losses: deque[Any] = deque()
        self._is_reading = False
        self.has_failed = self.is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the loss of the next minibatch, where the last stage runs, and None elsewhere."""
        # Two stages and two microbatches in a minibatch, so that one minibatch is read ahead:
        #
        #     first loss     read 0 and 1, perform until 0 has gone back
        #     second loss    read 2, perform until 1 has gone back
        #     …
        #     last loss      nothing to read, perform until the pipeline is empty
        #
        if not self._losses and not self.is_over:
            with self._watched(f"minibatch {self._run.steps}"):
                self._read_ahead()
                if self._done < self._read:
                    self._finish_minibatch()
                else:
                    self._end()
        if not self._losses:
            raise StopIteration
        return self._losses.popleft()

    def step(self, batch: Any, target: Any) -> Any:
        """Train on one more minibatch; return the loss of the one that was given `read_ahead` steps
        before, or None while the pipeline fills. InputError if `batches` were given, or it is over.
        """
        if not isinstance(self._batches, _GivenMinibatches) or self.is_over:
            raise InputError(
                "the run that train(batches, factory) has begun reads its own batches, and one "
                "that is over takes no more; call train(optimizer=factory), and step() after it"
            )
        with self._watched(f"minibatch {self._run.steps}"):
            self._batches.waiting.append((batch, target))
            self._read_ahead()
            if self._read == self._done + 1 + self._size.read_ahead:
                self._finish_minibatch()
        return self._losses.popleft() if self._losses else None

    def drain(self) -> None:
        """Let all minibatches that have been read go back, and begin no other ones meanwhile.

        What the run computes afterwards does not change: versions that it still reads are kept.
        """
        if self._done < self._read:
            with self._watched(f"the drain after {self._run.steps} minibatches"):
                while self._done < self._read:
                    self._finish_minibatch()

    def end(self) -> None:
        """Let all minibatches that have been read go back, and read no other ones."""
        if self.has_failed:
            self._free()
        elif not self.is_over:
            self.drain()
            with self._watched("the end of the run"):
                self._end()

    @property
    def done(self) -> int:
        """The number of minibatches that have gone back since training began with version 0."""
        return self._done

    def restore(self, done: int, older: Mapping[int, Mapping[int, tuple[Tensor, ...]]]) -> None:
        """Go on after `done` minibatches: the parameters are the newest version, and `older` ones
        are given by owner and by how many updates they lie before it. InputError if this training
        has begun.
        """
        if self._flow is not None:
            raise InputError(
                "a checkpoint can be loaded before the first minibatch only, but this training has "
                "begun; load it right after train(batches, factory)"
            )
        self._done = self._read = done
        self.weights.restore(done, older)

    def _end(self) -> None:
        if self._flow is not None and self._flow.messages is not None:
            self._flow.messages.finish()
        self._free()
        self.is_over = True

    def _free(self) -> None:
        """Free what only minibatches in flight need: all versions but the newest, and messages."""
        self._flow = None
        self.weights.forget_older()

    # -- minibatches

    def _read_ahead(self) -> None:
        """Read as many minibatches as the first stage begins before the next one has gone back."""
        while self._read < self._done + 1 + self._size.read_ahead:
            # Steps that the run took before, perhaps by another training, count too: what is
            # drawn at random follows from this number.
            number = self._run.steps - self._done + self._read
            self._is_reading = True
            try:
                batch, target = input_and_target(next(self._batches))
            except StopIteration:
                self._is_reading = False
                return
            minibatch, sizes = self._minibatch(batch, target, number)
            self._is_reading = False
            if self._flow is None:
                self._flow = self._begun(minibatch)
            else:
                # Only the first minibatch begins with an agreement. Of later ones the values are
                # compared, and seldom: in such an exchange each rank waits for all.
                self._parts.runner.compare_in_flight(minibatch)
            if self._done == self._read:
                self._begin_recording(self._flow.minibatches)
            self._flow.minibatches.begin(self._read, minibatch)
            self._flow.sizes[self._read] = sizes
            self._read += 1

    def _minibatch(self, batch: Any, target: Any, number: int) -> tuple[Minibatch, MicrobatchSizes]:
        """Return a batch cut into microbatches; InputError unless it is like `sample_input`."""
        parts = self._parts
        cut = parts.data.read_planned(batch)
        sizes = cut.sizes
        planned = parts.plan.microbatches
        if cut.shape or len(cut.rows) != planned or sizes.remainder is not None:
            raise InputError(
                f"the batch has {sizes.samples} samples, but under schedule "
                f"{parts.plan.schedule.name!r} all of them have the shape and size of "
                "sample_input: they share the pipeline; drop the last batch if it is smaller "
                "(drop_last=True)"
            )
        with parts.target.precision():
            if parts.programs.current(0) is not self._program:
                raise InputError(
                    "modules are in other modes than when the run began; put them back, or call "
                    "train(batches, factory) once more to train in these"
                )
            self._program.check_unchanged()
        refuse_hooks_in_flight(parts.target.model_with_loss, parts.plan.schedule.name)
        cut.check(self._program, None)
        minibatch = Minibatch(
            cut.rows,
            parts.data.targets(sizes, target),
            self._run.seed,
            number,
            first=parts.share.place.replica * planned,
            samples=sizes.samples,
        )
        return minibatch, sizes

    def _finish_minibatch(self) -> None:
        """Perform actions until one more minibatch has gone back through the stages here."""
        flow, number, each = self._flow, self._done, self._size.microbatches
        assert flow is not None, "minibatches that were read have begun"
        if flow.messages is not None:
            flow.messages.go_on(self._parts.runner.deadline)
        with self._program.mode(), torch.enable_grad():
            for action in flow.order.until((number + 1) * each, self._read * each):
                flow.minibatches.perform(action)
            if number + 1 == self._read:
                # No forward follows that would need these versions, so nothing else would make
                # them.
                for action in flow.order.deferred_steps():
                    flow.minibatches.perform(action)
        result = flow.minibatches.end(number)
        self._losses.append(self._parts.loss.joined(result, flow.sizes.pop(number)))
        self._done += 1
        self._run.steps += 1
        if self._done == self._read:
            self._end_recording()

    def _begin_recording(self, minibatches: MinibatchesInFlight) -> None:
        """The pipeline is filled: what recorders see from here on, until it is empty, belongs
        together.
        """
        self._filled = self._done
        minibatches.first_recorded = self._done * self._size.microbatches
        for recorder in self._parts.recorders:
            recorder.begin_step()

    def _end_recording(self) -> None:
        passed = self._done - self._filled
        count = passed * self._size.microbatches
        for recorder in self._parts.recorders:
            recorder.end_step(
                self._run.steps - passed, count, lambda: [self._program.boundary_shapes()] * count
            )

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Trace a failure in the block to the rank at fault. After one the training is over, unless
        a batch was refused in one process: then what is in flight is as it was.

        An evaluation under torch.inference_mode drains too, by backwards, which it would forbid.
        """
        watch = self._parts.runner.watch
        if watch is not None:
            watch.refuse_after_loss()
        if self.has_failed:
            raise InputError(
                "a minibatch of this run has failed, and those in flight with it; begin a run once "
                "more with train(), and load the last checkpoint before its first loss"
            )
        self._is_reading = False
        with nullcontext() if watch is None else watch.watched(name), torch.inference_mode(False):
            try:
                yield
            except BaseException:  # also Ctrl+C
                # In one process a batch that is refused while it is read has touched nothing.
                # Over ranks others may have read theirs, and gone on.
                self.has_failed = watch is not None or not self._is_reading
                if watch is not None and self._flow is not None:
                    watch.lose_messages()
                raise

    # -- the flow through the stages

    def _begun(self, first: Minibatch) -> _MinibatchFlow:
        """Return an empty flow, once all ranks agree on the first minibatch."""
        parts, program = self._parts, self._program
        stages = parts.runner.untied_stages(program)
        flags = {"max_norm": self._max_norm is not None, **parts.loss.flags}
        messages = parts.runner.begin_continuous(program, first, flags)
        each = self._size.microbatches
        update = partial(self._rule.update, self._size)
        recomputed = recomputed_microbatches(list(chain(*parts.plan.schedule.rows)))
        # The microbatches of one update. Of four in a minibatch PipeDream makes four updates,
        # each of one microbatch, and 2BW one of four.
        divisor = each // update(each) * parts.share.place.replicas
        updates = WeightUpdates(
            self.weights.by_owner,
            divisor if parts.target.loss_reduction == "mean" else 1,
            parts.runner.exchange(),
            self._max_norm,
        )
        minibatches = MinibatchesInFlight(
            stages,
            self._size.stages,
            each,
            recomputed,
            updates,
            {index: self.weights.owners(stage.module) for index, stage in stages.items()},
            update,
            turns=self.weights.turns,
            messages=messages,
            observers=[] if parts.runner.watch is None else [parts.runner.watch],
            recorders=parts.recorders,
        )
        order = self._order(recomputed, has_messages=messages is not None)
        return _MinibatchFlow(order, minibatches, messages, {})

    def _order(
        self, recomputed: Collection[tuple[int, int | None]], *, has_messages: bool
    ) -> ContinuousOrder | ReplicatedOrder:
        share, first = self._parts.share, self._done * self._size.microbatches
        weights = {stage: self.weights.updated_by(stage) for stage in share.stages}
        if self._size.has_replicas:
            rank = share.place.rank if share.is_distributed else None
            return ReplicatedOrder(self._size, self._rule, weights, recomputed, rank, first)
        return ContinuousOrder(
            self._size, self._rule, weights, recomputed, messages=has_messages, first=first
        )


class _GivenMinibatches(Iterator[Any]):
    """Minibatches that are given one by one: after the last of those `waiting` more may come."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()

    def __next__(self) -> Any:
        if not self.waiting:
            raise StopIteration
        return self.waiting.popleft()


@dataclass
class _MinibatchFlow:
    """Minibatches on their way: the order of actions, and what performs them.

    `sizes` are those of the microbatches of each minibatch.
    """

    order: ContinuousOrder | ReplicatedOrder
    minibatches: MinibatchesInFlight
    messages: Messages | None
    sizes: dict[int, MicrobatchSizes]
