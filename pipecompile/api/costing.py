"""What one microbatch of a captured model costs: its cost graph, under the cost model that the user names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx

from pipecompile.api.target import Target
from pipecompile.cost_models.flops import Flops
from pipecompile.cost_models.measured import Measured
from pipecompile.cost_models.protocol import CostModel
from pipecompile.errors import InputError
from pipecompile.frontend.capture import Capture
from pipecompile.frontend.signature import Arguments
from pipecompile.ir.graph import CostGraph
from pipecompile.profiling.profile import profile
from pipecompile.profiling.workload import Loss
from pipecompile.runtime.microbatch import split

__all__ = ["Captured", "cost_graph", "cost_model"]

COST_MODELS: dict[str, Callable[[], CostModel]] = {"flops": Flops, "measured": Measured}


@dataclass(frozen=True)
class Captured:
    """A model captured at the size of one microbatch: what it is, the graph for that size, and the microbatch."""

    capture: Capture
    module: fx.GraphModule
    sample: Arguments
    digest: str
    verified: bool


def cost_model(name: str) -> CostModel:
    """The cost model that `--costs NAME` stands for; InputError if there is none."""
    if name not in COST_MODELS:
        raise InputError(f"costs={name!r} is not known; choose one of {', '.join(COST_MODELS)}")
    return COST_MODELS[name]()


def cost_graph(target: Target, costs: str, microbatches: int, captured: Captured) -> CostGraph:
    """What one microbatch costs; with the loss, where a target is at hand or the model has its own."""
    model = cost_model(costs)
    if model.real and not target.has_values:
        raise InputError(
            f"costs={costs!r} runs the model, but it, or its input, is on the meta device or of fake tensors; "
            "use flops or roofline:DEVICE, or give a model that is in memory"
        )
    inputs = [target.on_device(tensor) for tensor in captured.capture.inputs.flatten(captured.sample)]
    loss, targets = loss_of(target, microbatches, captured)
    graph = profile(captured.module, inputs, model, loss=loss, targets=targets)
    return _canonical(graph, captured.capture)


def loss_of(target: Target, microbatches: int, captured: Captured) -> tuple[Loss | None, list[Tensor]]:
    """The loss of a microbatch as a function of flat outputs and target tensors, and these; None without a target."""
    if target.loss_fn is None or target.targets is None:
        return None, []
    leaves, spec = torch.utils._pytree.tree_flatten(split(target.targets, microbatches)[0])

    def loss(outputs: Sequence[Any], given: Sequence[Tensor]) -> Tensor:
        rest = iter(given)
        tree = torch.utils._pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        return target.trained_by(captured.capture.outputs.unflatten(outputs), tree)

    return loss, [target.on_device(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def _canonical(costs: CostGraph, captured: Capture) -> CostGraph:
    """The same with every parameter under its first name in the original model, tied or not."""
    first, aliases = captured.first_names, captured.aliases
    parameters = [
        replace(parameter, name=name, aliases=aliases.get(name, ()))
        for parameter in costs.parameters
        for name in [first.get(parameter.name, parameter.name)]
    ]
    nodes = [
        replace(n, parameters=tuple(sorted({first.get(name, name) for name in n.parameters}))) for n in costs.nodes
    ]
    return replace(costs, nodes=tuple(nodes), parameters=tuple(sorted(parameters, key=lambda p: p.name)))
