"""What is profiled: a graph, one microbatch for it, and the loss that ends its forward; real or fake."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipecompile.passes.propagate import named_state

__all__ = ["Loss", "Workload"]

Loss = Callable[[Sequence[Any], Sequence[Tensor]], Tensor]
"""From the graph's flat outputs and the targets to the scalar that is differentiated."""


@dataclass(frozen=True)
class Workload:
    """One microbatch's forward through `graph`, whose modules and parameters `module` holds.

    `inputs` are the values of the placeholders, in order; without a `loss` the outputs are where it ends.
    """

    module: fx.GraphModule
    graph: fx.Graph
    inputs: tuple[Tensor, ...]
    loss: Loss | None
    targets: tuple[Tensor, ...]

    @cached_property
    def names(self) -> dict[int, str]:
        """Parameters and buffers: the id of each tensor and its first name."""
        found: dict[int, str] = {}
        for name, value in named_state(self.module):
            found.setdefault(id(value), name)
        return found

    def faked(self) -> Workload:
        """The same on fake CPU tensors, one storage each; call it under the FakeTensorMode that is to own them."""
        # Copying with the fakes already in the memo copies the modules around them and never a real tensor.
        memo: dict[int, Any] = {id(value): _fake(value) for _, value in named_state(self.module)}
        return replace(
            self,
            module=copy.deepcopy(self.module, memo),
            inputs=tuple(map(_fake, self.inputs)),
            targets=tuple(map(_fake, self.targets)),
        )


def _fake(value: Tensor) -> Tensor:
    fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake.requires_grad_(value.requires_grad)
