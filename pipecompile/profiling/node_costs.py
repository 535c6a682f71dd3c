"""The costs of nodes: one forward in which a cost model is asked about every node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipecompile.cost_models.protocol import FREE_CALL, CallCost, CostModel, NodeCall
from pipecompile.profiling.node_caller import NodeCaller
from pipecompile.profiling.observation import StepObservation
from pipecompile.profiling.progress import progress
from pipecompile.profiling.workload import Workload

__all__ = ["costs_of_nodes"]


def costs_of_nodes(
    workload: Workload, observation: StepObservation, cost_model: CostModel
) -> dict[str, CallCost]:
    """Return the cost of every node but `get_attr`, by name.

    Placeholders are free, and so is the output node if there is no loss. Buffers change as in any
    forward.
    """
    # The inputs are copied, because a node may write to them.
    own = replace(workload, inputs=tuple(value.clone() for value in workload.inputs))
    with progress(f"{cost_model.name} costs", len(observation.nodes)) as advance:
        collector = _CostCollector(own, observation, cost_model, advance)
        # The forward only brings values to each node; the model
        # turns gradients on for its own runs.
        with torch.no_grad():
            collector.interpret()
    return collector.costs


class _CostCollector(NodeCaller):
    """Interprets a workload and asks `model` for the cost of each call."""

    def __init__(
        self,
        workload: Workload,
        observation: StepObservation,
        model: CostModel,
        advance: Callable[[], None],
    ) -> None:
        super().__init__(workload)
        self.observation = observation
        self.model = model
        self.advance = advance
        self.costs: dict[str, CallCost] = {}

    def perform(self, call: NodeCall) -> Any:
        # This forward runs without gradients, so only the observation knows what needs one.
        if observed := self.observation.nodes.get(call.node.name):
            call = replace(call, differentiable=observed.differentiable, mutates=observed.mutates)
        # The model is asked before the node runs, which may write to its arguments.
        self.costs[call.node.name] = self._cost(call)
        self.advance()
        if call.node.op == "output":
            return None  # Nobody reads the loss; one that differentiates needs gradients here.
        if call.node.op == "call_module" and not call.mutates:
            return self._performed_with_gradients(call)
        return super().perform(call)

    def _performed_with_gradients(self, call: NodeCall) -> Any:
        """Return the value of a called module, detached: forward hooks, which may put hooks on its
        outputs, ran as in a step.
        """
        with torch.enable_grad():
            value = call.bind(call.fresh_arguments())()
        # A parameter that passes through, as through an Identity, is one for its readers too.
        names = self.workload.names
        return tree_map_only(
            Tensor, lambda each: each if id(each) in names else each.detach(), value
        )

    def _cost(self, call: NodeCall) -> CallCost:
        if call.node.op == "placeholder" or (
            call.node.op == "output" and self.workload.loss is None
        ):
            return FREE_CALL
        with torch.enable_grad():
            return self.model.cost(call)
