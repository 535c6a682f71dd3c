"""SM3 in its plain form, which plans count: torch has none of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SM3"]


class SM3(torch.optim.Optimizer):
    """SM3-II without momentum (Anil, Gupta, Koren and Singer, "Memory-Efficient Adaptive
    Optimization", arXiv 1901.11150, algorithm 2). The sets that cover a tensor are its slices along
    each dimension, of which each has one accumulator.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group["lr"])

    def _step(self, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        shape = parameter.shape or (1,)
        state = self.state[parameter]
        if not state:
            for dim, size in enumerate(shape):
                along = [size if each == dim else 1 for each in range(len(shape))]
                state[f"accumulator_{dim}"] = parameter.new_zeros(along)
        accumulators = list(state.values())
        squares = accumulators[0].expand(shape).clone()
        for accumulator in accumulators[1:]:
            torch.minimum(squares, accumulator, out=squares)
        squares.addcmul_(gradient.view(shape), gradient.view(shape))
        for dim, accumulator in enumerate(accumulators):
            others = [each for each in range(len(shape)) if each != dim]
            accumulator.copy_(squares.amax(others, keepdim=True) if others else squares)
        # What has never had a gradient does not move.
        squares.sqrt_().clamp_(min=torch.finfo(squares.dtype).tiny)
        parameter.view(shape).addcdiv_(gradient.view(shape), squares, value=-rate)
