"""A synchronous step on a minibatch: it leaves gradients on the parameters, for an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch.amp.grad_scaler import GradScaler

from pipecompile.errors import InputError
from pipecompile.frontend.microbatch import MicrobatchSizes
from pipecompile.runtime.batch_statistics import MinibatchStatistics
from pipecompile.runtime.gradients import StepGradients, divide_gradients
from pipecompile.runtime.messages import Boundaries
from pipecompile.runtime.rank_step import Minibatch, StepResult
from pipecompile.runtime.update_rule import UpdateRule
from pipecompile.training.pipeline_parts import PipelineParts
from pipecompile.training.program import Program, modes_of_both
from pipecompile.training.run_conditions import refuse_frozen, refuse_without_gradients
from pipecompile.training.training_run import TrainingRun

__all__ = ["MinibatchStep"]


class MinibatchStep:
    """Steps with the `parts` of a pipeline, and keeps what steps that accumulate put aside.

    `run` counts the steps.
    """

    def __init__(self, parts: PipelineParts, run: TrainingRun) -> None:
        self._parts = parts
        self._run = run
        self._gradients = StepGradients()
        self._batch_norms = MinibatchStatistics(parts.share.place.replica_group)

    def take(
        self,
        batch: Any,
        target: Any,
        validate: Callable[[], bool] | None = None,
        rule: UpdateRule | None = None,
        *,
        accumulate: bool = False,
        scaler: GradScaler | None = None,
        everywhere: bool = False,
    ) -> Any:
        """Take one step and return what `Pipeline.step` does.

        `validate` makes the weights right after the leading forwards. Ranks compare the `rule` by
        which they will update them.
        """
        runner, loss, name = self._parts.runner, self._parts.loss, f"step {self._run.steps}"
        # Before anything is sent: ranks that ran on would wait for one that has refused its batch.
        with runner.refusing_together(name):
            ready = self._ready(batch, target, scaler)
        with runner.watched(name):
            flags = {
                "accumulate=True": accumulate,
                "a scaler": scaler is not None,
                "everywhere=True": everywhere,
                **({} if rule is None else {str(rule): True}),
                "a communication hook": runner.has_communication_hook,
                **loss.flags,
            }
            result = self._train(ready, flags, validate)
            # A scaler skips the update where a gradient overflowed, on every rank or on none.
            if scaler is not None and not accumulate:
                runner.spread_overflow(ready.program.parameters, scaler)
            # A step that fails does not count: taken once more it draws the same random numbers.
            self._run.steps += 1
            returned = loss.joined(result, ready.sizes)
            return runner.everywhere(returned) if everywhere else returned

    def clear(self) -> None:
        """Drop what steps have put aside."""
        self._gradients.clear()
        self._parts.loss.clear()
        self._batch_norms.clear()

    def check_none_aside(self) -> None:
        """Raise InputError while gradients are put aside, which no checkpoint has."""
        self._gradients.check_none_aside()

    def _ready(self, batch: Any, target: Any, scaler: GradScaler | None) -> _Ready:
        """Return what the ranks need for a step; InputError where the step cannot be right."""
        parts = self._parts
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise InputError(
                f"scaler is a {type(scaler).__name__}, but it is a torch.amp.GradScaler"
            )
        refuse_without_gradients(parts.plan.schedule)
        refuse_frozen(parts.programs.planned.parameters)
        for recorder in parts.recorders:
            recorder.begin_step()
        cut = parts.data.read_planned(batch)
        sizes = cut.sizes
        minibatch = Minibatch(
            cut.rows,
            parts.data.targets(sizes, target),
            self._run.seed,
            self._run.steps,
            parts.loss.gradients(sizes, scaler),
            first=parts.share.place.replica * len(cut.rows),
            samples=sizes.samples,
        )
        with parts.target.precision():
            program = parts.programs.current(cut.shape)
            program.check_unchanged()
            program.refuse_hooks()
            remainder = parts.programs.for_remainder(program, sizes.remainder, cut.shape)
        cut.check(program, remainder)
        return _Ready(program, remainder, minibatch, sizes)

    def _train(
        self, ready: _Ready, flags: Mapping[str, bool], validate: Callable[[], bool] | None
    ) -> StepResult | None:
        """Leave the gradients of a minibatch on the parameters; return what the last stage does."""
        program, remainder, minibatch, sizes = ready
        plan, runner, loss = self._parts.plan, self._parts.runner, self._parts.loss
        parameters, microbatches = program.parameters, len(minibatch.inputs)
        accumulate = flags["accumulate=True"]
        summed = [*parameters, *runner.whole_parameters]
        gradients = self._gradients.of_step(summed, loss.count(sizes), accumulate=accumulate)
        with modes_of_both(program, remainder), self._statistics(accumulate), gradients:
            result = runner.train(
                program,
                plan.schedule.first_microbatches(microbatches),
                minibatch,
                flags,
                reduces=not accumulate,
                observers=self._parts.recorders,
                remainder=remainder,
                validate=None if validate is None else partial(self._validate, validate),
            )
            divisor = loss.divisor(result, sizes, accumulate=accumulate)
            # Within the block: gradients from before the step, which it adds, are divided already.
            if not accumulate:
                divide_gradients(parameters, divisor)
        loss.put_aside(divisor if accumulate else 0.0)
        for recorder in self._parts.recorders:
            recorder.end_step(
                self._run.steps,
                microbatches,
                partial(_boundaries, program, remainder, microbatches),
            )
        return result

    def _validate(self, validate: Callable[[], bool]) -> bool:
        """Validate the weights; a step that begins once more is recorded from there on."""
        is_right = validate()
        for recorder in () if is_right else self._parts.recorders:
            recorder.begin_step()
        return is_right

    def _statistics(self, accumulate: bool) -> AbstractContextManager[None]:
        """Return the context in which a step collects the batch statistics of the minibatch."""
        if self._parts.plan.options.batch_norm == "minibatch":
            deadline = self._parts.runner.deadline
            return self._batch_norms.of_step(accumulate=accumulate, deadline=deadline)
        return nullcontext()


class _Ready(NamedTuple):
    """A minibatch, and the programs that it runs on: of the planned size, and of the remainder."""

    program: Program
    remainder: Program | None
    minibatch: Minibatch
    sizes: MicrobatchSizes


def _boundaries(
    program: Program, remainder: Program | None, microbatches: int
) -> Sequence[Boundaries]:
    """Return what enters each stage in each of so many microbatches."""
    # Samples that do not fill a microbatch of the planned size are the last one.
    last = program if remainder is None else remainder
    return [program.boundary_shapes()] * (microbatches - 1) + [last.boundary_shapes()]
