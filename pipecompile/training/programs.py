"""The programs of a pipeline: one for each set of modes (training or evaluation) that the model's
modules are used in, for each shape of batches and for each size of microbatches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import fx, nn

from pipecompile.codegen.transfer import (
    transfer,
    transfer_copied,
    transfer_encodings,
    transfer_regions,
)
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_for_remainder, capture_target
from pipecompile.graph.model_state import named_state
from pipecompile.ir.plan import Plan
from pipecompile.runtime.local_share import LocalShare
from pipecompile.training.materialisation import bind, on_meta
from pipecompile.training.program import Program

__all__ = ["DeclaredShape", "Programs"]

logger = logging.getLogger("pipecompile.training")


class DeclaredShape(NamedTuple):
    """A shape of batches besides the planned one: the target with a minibatch of it, captured."""

    target: Target
    captured: Captured


class Programs:
    """The planned program, those of other declared shapes, one for each other set of modes that the
    model's modules were put into, and for smaller microbatches.

    A forward may do something else in another mode or shape, so the model is captured once more in
    it, and cut where the planned graph was cut. `self_check` says whether a capture that is made
    here is proven. The graph for a smaller microbatch comes from the capture of its mode and shape,
    and is cut at the same places. `declared` are the programs for the modes of the plan, by shape.
    Captures run in `model_as_built()`.
    """

    def __init__(
        self, plan: Plan, captured: Captured, target: Target, share: LocalShare, *, self_check: bool
    ) -> None:
        self._plan = plan
        self._targets = [target]
        self._share = share
        self._self_check = self_check
        self.model_as_built: Callable[[], AbstractContextManager[None]] = nullcontext
        self.planned = Program(
            captured.capture,
            captured.module,
            plan.assignment,
            plan.regions,
            plan.encoded_runs,
            plan.options.batch_norm,
            share.device_for_meta,
            plan.copied,
        )
        self.declared = [self.planned]
        self._programs = {(self.planned.modes, 0): self.planned}
        self._remainders: dict[tuple[tuple[bool, ...], int, int], Program] = {}

    def declare(self, shape: DeclaredShape) -> None:
        """Cut the graph for one more shape; CaptureError if it cannot be cut like the plan."""
        index, captured = len(self.declared), shape.captured
        program = self._cut_like_the_plan(captured.capture, captured.module)
        self._targets.append(shape.target)
        self.declared.append(program)
        self._programs[program.modes, index] = program

    def current(self, shape: int) -> Program:
        """Return the program for a declared shape and the modes that the modules are in now."""
        modes = self.planned.current_modes()
        if (modes, shape) not in self._programs:
            # A graph of the changed model could not be cut where the planned one was.
            self.planned.check_unchanged()
            logger.info(
                "the model is captured once more: its modules are in other modes than planned"
            )
            captured = self._capture(shape)
            program = self._cut_like_the_plan(captured.capture, captured.module)
            self._programs[modes, shape] = program
        return self._programs[modes, shape]

    def for_remainder(self, program: Program, samples: int | None, shape: int) -> Program | None:
        """Return what runs a last microbatch of so many samples beside `program`, which is for this
        declared shape; None for None.

        InputError if the model cannot be captured for that size.
        """
        if samples is None:
            return None
        # A model in train mode and in eval mode, each for full microbatches of 4 and for a last
        # one of 2, is four graphs: two programs and two remainders.
        key = program.modes, shape, samples
        if key not in self._remainders:
            options, verify = self._plan.options, self._proves
            # `program` may be that of the eval mode while modules are in train mode: what runs
            # beside it is captured in its modes.
            with program.mode():
                with self.model_as_built(), on_meta(self._model):
                    capture, module = capture_for_remainder(
                        program.captured, self._targets[shape], samples, options, verify=verify
                    )
                self._remainders[key] = self._cut_like_the_plan(capture, module)
        return self._remainders[key]

    def in_eval_mode(self, shape: int) -> Program:
        """Return the program for a declared shape in eval mode; the modules are left in the modes
        that they have.
        """
        # `current` captures in the modes that modules are in, so they are set for that moment.
        flags = {module: module.training for module in self._model.modules()}
        for module in flags:  # a model may override `.eval()` to do more than this
            module.training = False
        try:
            return self.current(shape)
        finally:
            for module, flag in flags.items():
                module.training = flag

    @property
    def _model(self) -> nn.Module:
        return self._targets[0].model

    def _capture(self, shape: int) -> Captured:
        with self.model_as_built(), on_meta(self._model):
            return capture_target(self._targets[shape], self._plan.options, verify=self._proves)

    @property
    def _proves(self) -> bool:
        """Whether captures are proven: not over ranks, since none has the model on its device."""
        return self._self_check and not self._share.is_distributed

    def bind(self, program: Program) -> None:
        """Let the stages of this process have the model's own tensors: those that it had when it
        was captured may lie on another device, or on the meta device.
        """
        for index in self._share.stages:
            bind(program.stages[index].module, self._targets[0].model_with_loss)

    def _cut_like_the_plan(self, capture: Capture, module: fx.GraphModule) -> Program:
        plan, graph = self._plan, self._planned_graph
        holders = self._holders(module)
        # Each of these needs those before it: a copied node belongs to the stages that read it,
        # and regions and encoded runs are of the nodes of a stage, copies included.
        stages = transfer(plan.assignment, graph, module, holders)
        copied = transfer_copied(plan.copied, graph, module, stages, holders)
        regions = transfer_regions(plan.regions, graph, module, stages, copied)
        encodings = transfer_encodings(plan.encoded_runs, graph, module, stages, copied)
        batch_norm = plan.options.batch_norm
        device = self._share.device_for_meta
        program = Program(capture, module, stages, regions, encodings, batch_norm, device, copied)
        self.bind(program)
        return program

    def _holders(self, module: fx.GraphModule) -> dict[str, tuple[int, ...]]:
        """Return the stages that hold what a graph reads; over ranks the first stage holds what no
        planned stage reads.
        """
        # In one process the first name decides nothing: all stages have all tensors at hand.
        names = named_state(module) if self._share.is_distributed else ()
        return {**{name: (0,) for name, _ in names}, **self._share.holders}

    @property
    def _planned_graph(self) -> fx.Graph:
        """The planned graph before it was cut: the nodes that the plan names, in order."""
        return self.planned.captured.graph
