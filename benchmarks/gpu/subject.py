"""A subject: a model captured and costed once, for several plans and their stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import Scale, target_on
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.codegen.regions import EncodedRuns
from pipecompile.codegen.stages import emit
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Plan
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.planner.draft import draft
from pipecompile.runtime.stage import EagerStage

__all__ = ["Subject", "subject_of"]


@dataclass(frozen=True)
class Subject:
    """A target with its captured graph, and with its costs under `costs`."""

    target: Target
    captured: Captured
    graph: CostGraph
    costs: str
    microbatches: int

    def plan(self, **choices: Any) -> Plan:
        """Return a plan by the costs of the nodes; whole stages are not measured for it."""
        options = options_for(
            self.target, microbatches=self.microbatches, costs=self.costs, **choices
        )
        inputs = self.captured.capture.inputs.flatten(self.captured.sample)
        return draft(
            self.graph,
            options,
            graph_digest=self.captured.digest,
            capture=self.captured.provenance,
            microbatch_shapes=[tuple(tensor.shape) for tensor in inputs],
        )

    def inputs(self) -> list[list[Tensor]]:
        """Return the input tensors of each microbatch."""
        flatten = self.captured.capture.inputs.flatten
        return [list(flatten(call)) for call in self.target.microbatches(self.microbatches)]

    def targets(self) -> list[Any]:
        """Return the targets of each microbatch."""
        return self.target.cut_targets(self.microbatches)

    def stages(self, plan: Plan, encoded_runs: EncodedRuns | None = None) -> list[EagerStage]:
        """Return the stages of a plan as the runtime runs them; the last one has the loss.

        They are cut out of a copy of the graph, because cutting rewrites it. `encoded_runs` replace
        those of the plan.
        """

        def loss(outputs: Sequence[Tensor], target: Any) -> Any:
            unflatten = self.captured.capture.outputs.unflatten
            return self.target.trained_by(unflatten(outputs), target)

        module = self.captured.capture.instantiate(self.captured.sample)
        apply_passes(module.graph, [Group(plan.options.groups)])
        runs = plan.encoded_runs if encoded_runs is None else encoded_runs
        return [
            EagerStage(
                stage.module,
                gradient_inputs=stage.gradient_inputs,
                loss=loss if stage.index == plan.k - 1 else None,
                buffers=stage.buffers,
                random=stage.random,
            )
            for stage in emit(module, plan.assignment, plan.regions, runs, copied=plan.copied)
        ]


def subject_of(
    bench: Bench,
    factory: Callable[[Scale], dict[str, Any]],
    *,
    microbatches: int,
    costs: str | None = None,
) -> Subject:
    """Return a model of the bench's scale on its device, captured and costed.

    The capture is not proven by a training step: the part `capture` does that. Measured costs are
    not taken from the cache.
    """
    transformers.logging.set_verbosity_error()
    target = target_on(bench.device, factory, bench.scale)
    costs = costs or bench.costs
    options = options_for(target, k=1, microbatches=microbatches, schedule="gpipe", costs=costs)
    captured = capture_target(target, options, verify=False)
    graph = cost_graph(target, costs, microbatches, captured, fresh=True)
    return Subject(target, captured, graph, costs, microbatches)
