"""What a pipeline trains with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured
from pipecompile.ir.plan import Plan
from pipecompile.runtime.action_recorder import ActionRecorder
from pipecompile.runtime.distributed_pipeline import Engine
from pipecompile.runtime.local_share import LocalShare
from pipecompile.training.batch_reader import BatchReader
from pipecompile.training.materialisation import allocate, lacks_values
from pipecompile.training.programs import DeclaredShape, Programs
from pipecompile.training.run_conditions import (
    refuse_shared_memory,
    refuse_unequal_arrays,
    warn_of_written_buffers,
)
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
    recorders: list[ActionRecorder]

    @classmethod
    def made(
        cls,
        plan: Plan,
        captured: Captured,
        target: Target,
        share: LocalShare,
        shapes: Sequence[DeclaredShape],
        step_timeout: float | None,
        engine: Engine,
        *,
        self_check: bool,
    ) -> PipelineParts:
        """Cut the stages of this process, and put them on its device. A model on the meta device
        gets memory for them, but no values yet.
        """
        model = target.model_with_loss
        programs = Programs(plan, captured, target, share, self_check=self_check)
        planned = programs.planned
        if share.is_distributed:
            refuse_shared_memory(plan, model, planned)
            refuse_unequal_arrays(planned.array_digests())
            warn_of_written_buffers(plan, model, planned, share.place)
        if lacks_values(model):
            allocate(model, share, share.device_for_meta)
            programs.bind(planned)
            planned.remember()
        runner = Runner(plan, target, share, planned, step_timeout, engine)
        # Now that the stages are on the devices where they stay.
        for shape in shapes:
            programs.declare(shape)
        data = BatchReader(plan, programs, runner, target.target_batch_dims)
        loss = StepLoss(target.loss_reduction, share.place, runner)
        return cls(plan, target, share, programs, runner, data, loss, [])
