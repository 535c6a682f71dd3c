"""The programs of a pipeline: the model's graph cut into stages, for each set of modes that it is
used in.
"""

from __future__ import annotations

from torch import fx

from pipecompile.api.capture import Captured, capture_target, log_on_first_rank
from pipecompile.api.local_share import LocalShare
from pipecompile.api.program import Program, modes_of
from pipecompile.api.target import Target
from pipecompile.codegen.transfer import transfer, transfer_encodings, transfer_regions
from pipecompile.graph.model_state import named_state
from pipecompile.ir.plan import Plan

__all__ = ["Programs"]


class Programs:
    """The planned program, and one for each other set of modes that the model's modules were put
    into.

    A forward may do something else in another mode, so the model is captured once more in it, and
    cut where the planned graph was cut. `self_check` says whether that capture is proven.
    """

    def __init__(
        self, plan: Plan, captured: Captured, target: Target, share: LocalShare, *, self_check: bool
    ) -> None:
        self._plan = plan
        self._target = target
        self._share = share
        self._self_check = self_check
        self.planned = Program(
            captured.capture, captured.module, plan.assignment, plan.regions, plan.encoded_runs
        )
        self._by_modes = {self.planned.modes: self.planned}

    def current(self) -> Program:
        """Return the program for the modes that the modules are in now."""
        modes = modes_of(self._target.model)
        if modes not in self._by_modes:
            self.planned.check_unchanged()
            log_on_first_rank(
                ["the model is captured once more: its modules are in other modes than planned"]
            )
            self._by_modes[modes] = self._cut_like_the_plan(self._capture())
        return self._by_modes[modes]

    def in_eval_mode(self) -> Program:
        """Return the program for eval mode; the modules are left in the modes that they have."""
        flags = {module: module.training for module in self._target.model.modules()}
        for module in flags:  # a model may override `.eval()` to do more than this
            module.training = False
        try:
            return self.current()
        finally:
            for module, flag in flags.items():
                module.training = flag

    def _capture(self) -> Captured:
        # Over ranks it is not proven: no rank has the whole model on its device.
        verify = self._self_check and not self._share.is_distributed
        return capture_target(self._target, self._plan.options, verify=verify)

    def _cut_like_the_plan(self, captured: Captured) -> Program:
        plan, graph, module = self._plan, self._planned_graph, captured.module
        stages = transfer(plan.assignment, graph, module, self._holders(captured))
        regions = transfer_regions(plan.regions, graph, module, stages)
        encodings = transfer_encodings(plan.encoded_runs, graph, module, stages)
        return Program(captured.capture, module, stages, regions, encodings)

    def _holders(self, captured: Captured) -> dict[str, tuple[int, ...]]:
        """The stages that hold what a graph reads; over ranks the first stage holds what no planned
        stage reads.
        """
        names = named_state(captured.module) if self._share.is_distributed else ()
        return {**{name: (0,) for name, _ in names}, **self._share.holders}

    @property
    def _planned_graph(self) -> fx.Graph:
        """The planned graph before it was cut: the nodes that the plan names, in order."""
        return self.planned.captured.graph
