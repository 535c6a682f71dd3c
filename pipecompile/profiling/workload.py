"""The workload of a profile: a graph, one microbatch for it, and the loss that ends its forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pipecompile.graph.loss_module import held_loss, hold_loss
from pipecompile.graph.model_state import (
    named_state,
    swapped_state,
    tensor_attributes,
    without_values,
)

__all__ = ["Loss", "Workload"]

Loss = Callable[[Sequence[Any], Sequence[Tensor]], Tensor]
"""From the graph's flat outputs and the targets to the scalar that is differentiated."""


@dataclass(frozen=True)
class Workload:
    """One microbatch's forward through `graph`, whose modules and parameters `module` holds.

    `inputs` are the values of the placeholders, in order. Without a `loss` the forward ends with
    the outputs. Tensors may be real or fake.
    """

    module: fx.GraphModule
    graph: fx.Graph
    inputs: tuple[Tensor, ...]
    loss: Loss | None
    targets: tuple[Tensor, ...]

    @cached_property
    def names(self) -> dict[int, str]:
        """The first name of each parameter and buffer, by the id of the tensor."""
        names: dict[int, str] = {}
        for name, value in named_state(self.module):
            names.setdefault(id(value), name)
        return names

    @contextmanager
    def faked(self) -> Iterator[Workload]:
        """The same workload on fake CPU tensors with a storage each, which the loss has in the
        block.

        Call it under the FakeTensorMode that is to own them.
        """
        # `deepcopy` takes what is in the memo for copied already. With fake tensors there, it
        # copies the modules around them and never a real tensor.
        state = (value for _, value in named_state(self.module))
        memo: dict[int, Any] = {
            id(value): without_values(value, "cpu")
            for value in (*state, *tensor_attributes(self.module))
        }
        # The loss is called as it is, so it is not copied: it gets the tensors of the copy.
        loss, fakes = held_loss(self.module), dict(memo)
        module = copy.deepcopy(self.module, memo)
        hold_loss(module, loss)
        with nullcontext() if loss is None else swapped_state(loss, fakes):
            yield replace(
                self,
                module=module,
                # Constants of the graph may name the device of the captured model.
                graph=_on_cpu(self.graph),
                inputs=tuple(without_values(value, "cpu") for value in self.inputs),
                targets=tuple(without_values(value, "cpu") for value in self.targets),
            )


def _on_cpu(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph that creates its tensors on the CPU.

    Devices among the constants of a captured graph are those of the captured model.
    """
    copies: dict[fx.Node, fx.Node] = {}
    moved = fx.Graph()
    for node in graph.nodes:
        new = copies[node] = moved.node_copy(node, copies.__getitem__)
        new.args, new.kwargs = map_aggregate((new.args, new.kwargs), _device_on_cpu)
    return moved


def _device_on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument
