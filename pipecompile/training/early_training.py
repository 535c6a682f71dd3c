"""Training by steps whose updates are made before all ranks have said that they are right.

Between two steps no rank waits for all others, so one that is done early begins the next step
(runtime/early_update.py, runtime/leading_forwards.py):

    for loss in pipeline.train(…)     step 0 ─ update │ leading forwards ─ validate ─ rest of step 1
                                            first loss ┘

Whether the update after the last loss was right is known when the next loss is there, or after
`drain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pipecompile.runtime.early_update import EarlyUpdate
from pipecompile.runtime.update_rule import UpdateRule
from pipecompile.training.batch_reader import input_and_target
from pipecompile.training.stage_optimizers import StageOptimizers
from pipecompile.training.synchronous_training import PipelineSteps

__all__ = ["EarlyTraining"]


class EarlyTraining:
    """Trains by `steps`, with updates by the `rule`, and keeps the one that is not validated."""

    def __init__(self, optimizers: StageOptimizers, steps: PipelineSteps, rule: UpdateRule) -> None:
        self._optimizers = optimizers
        self._steps = steps
        self._rule = rule
        self._update: EarlyUpdate | None = None

    def losses(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield what a step returns for each pair of an input and a target."""
        for item in batches:
            batch, target = input_and_target(item)
            self._steps.zero_grad()
            # The last update is validated within this step, behind its leading forwards, and the
            # next one is begun behind the step.
            loss = self._steps.step(batch, target, self.validate, self._rule)
            self._update = self._begun()
            yield loss
        self.drain()

    def drain(self) -> None:
        """Validate the last update, outside of a step."""
        if self._update is not None:
            with self._steps.watched():
                self.validate()

    def _begun(self) -> EarlyUpdate:
        norm = None
        if self._rule.needs_norm:
            with self._steps.watched():
                norm = self._steps.begin_norm()
        return EarlyUpdate([*self._optimizers.optimizers.values()], norm, self._rule)

    def validate(self) -> bool:
        """Make the last update the right one, if that has not been done. Return whether it was."""
        update, self._update = self._update, None
        if update is None:
            return True
        was_right = update.validate(self._steps.wait_for_norm)
        # Only now: an update that is made once more needs the rate that it had.
        self._optimizers.step_schedulers()
        return was_right
