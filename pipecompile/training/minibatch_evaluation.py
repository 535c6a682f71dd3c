"""An evaluation of a minibatch: the outputs of the model, or its loss, without gradients."""

from __future__ import annotations

from typing import Any

from pipecompile.runtime.rank_step import Minibatch
from pipecompile.training.pipeline_parts import PipelineParts
from pipecompile.training.program import modes_of_both
from pipecompile.training.training_run import TrainingRun

__all__ = ["MinibatchEvaluation"]


class MinibatchEvaluation:
    """Evaluations with the `parts` of a pipeline; `run` counts the steps between them."""

    def __init__(self, parts: PipelineParts, run: TrainingRun) -> None:
        self._parts = parts
        self._run = run
        self._taken = 0

    def take(self, batch: Any, target: Any) -> Any:
        """Evaluate once and return what `Pipeline.evaluate` does."""
        parts, runner = self._parts, self._parts.runner
        name = f"the evaluation after {self._run.steps} steps"
        # Each evaluation draws other numbers, and none that a step draws. It is counted before
        # anything is refused, so that all ranks count alike.
        self._taken += 1
        with_loss = target is not None
        everyone = runner.evaluates_with_everyone(with_loss=with_loss)
        with runner.refusing_together(name, everyone=everyone):
            cut = parts.data.read(batch)
            sizes = cut.sizes
            with parts.target.precision():
                program = parts.programs.in_eval_mode(cut.shape)
                program.check_unchanged()
                remainder = parts.programs.for_remainder(program, sizes.remainder, cut.shape)
            cut.check(program, remainder)
            targets = parts.data.targets(sizes, target)
            number = -self._taken
            minibatch = Minibatch(cut.rows, targets, self._run.seed, number, samples=sizes.samples)
        # An evaluation of many samples may take as long as steps with all of them.
        steps = -(-len(cut.rows) // parts.plan.microbatches)
        watched = runner.watched(name, steps)
        with watched, modes_of_both(program, remainder):
            result = runner.evaluate(program, minibatch, with_loss=with_loss, remainder=remainder)
            if with_loss:
                return parts.loss.joined(result, sizes)
        return None if result is None else program.joined(result.values, sizes)
