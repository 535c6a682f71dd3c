"""What a pipeline trains with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Plan
from pipecompile.runtime.action_recorder import ActionRecorder
from pipecompile.runtime.local_share import LocalShare
from pipecompile.training.batch_reader import BatchReader
from pipecompile.training.programs import Programs
from pipecompile.training.runner import Runner
from pipecompile.training.step_loss import StepLoss

__all__ = ["PipelineParts"]


class PipelineParts(NamedTuple):
    """What a pipeline trains with; `recorders` are those of the blocks that record it now."""

    plan: Plan
    target: Target
    share: LocalShare
    programs: Programs
    runner: Runner
    data: BatchReader
    loss: StepLoss
    recorders: Sequence[ActionRecorder]
