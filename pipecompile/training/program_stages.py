"""The stages of this process as the runtime runs them, made once for each program."""

from __future__ import annotations

import torch

from pipecompile.frontend.target import Target
from pipecompile.runtime.distributed_pipeline import DistributedPipeline, Engine, SizedStages
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.stage import EagerStage
from pipecompile.training.eager_stages import local_stages, rank_stages
from pipecompile.training.parallel_stages import ParallelStages
from pipecompile.training.program import Program

__all__ = ["ProgramStages"]


class ProgramStages:
    """The stages that this process has made of programs; `planned` is the program of the plan."""

    def __init__(
        self,
        target: Target,
        share: LocalShare,
        planned: Program,
        device: torch.device,
        engine: Engine,
    ) -> None:
        self._target = target
        self._share = share
        self._planned = planned
        self._device = device
        self._engine = engine
        self._parallel: ParallelStages | None = None
        self._local: dict[Program, list[EagerStage]] = {}
        self._own: dict[Program, SizedStages] = {}
        self._pipelines: dict[Program, DistributedPipeline] = {}

    def divide(self, parallel: ParallelStages) -> None:
        """Make the stages of a rank anew, since their parameters are others now."""
        self._parallel = parallel
        self._own.clear()

    def distributed(self, program: Program) -> DistributedPipeline:
        """Return the stages of this rank, for the microbatches of the planned size."""
        if program not in self._pipelines:
            stages, boundaries = self.own(program)
            group = self._share.place.pipeline_group
            self._pipelines[program] = DistributedPipeline(
                stages, self._device, boundaries, group, self._engine
            )
        return self._pipelines[program]

    def own(self, program: Program) -> SizedStages:
        """Return the stages of this rank, and what crosses the boundaries of all."""
        if program not in self._own:
            if self._parallel is not None and program is not self._planned:
                # A graph of another mode or shape has modules and tables of its own, but must
                # compute with the very parameters that FSDP2 gathers.
                self._parallel.adopt(program, self._share.stages)
            own = rank_stages(program, self._target, self._share.stages)
            self._own[program] = SizedStages(own, program.boundary_shapes())
        return self._own[program]

    def local(self, program: Program) -> list[EagerStage]:
        """Return all stages of `program`, for one process."""
        if program not in self._local:
            self._local[program] = local_stages(program, self._target)
        return self._local[program]
