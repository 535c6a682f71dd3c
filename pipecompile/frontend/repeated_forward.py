"""May a forward run once more, as one that is recomputed does? By then those of later microbatches
have run, and code of the user may have kept something of these:

    self.largest = max(self.largest, x.abs().max().item())
    return x / self.largest

    in a loop      F0 B0 F1 B1
    recomputed     F0 F1 F0 B0     the second F0 divides by the maximum of both
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.deterministic_kernels import deterministic_kernels
from pipecompile.frontend.kept_state import nodes_of_user, reached_by_user
from pipecompile.frontend.other_data import FAR, other_data
from pipecompile.frontend.self_check import with_autograd_contexts
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.training_step import SEED, restored_state
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.random_streams import seed_generators
from pipecompile.graph.restored_state import is_same_tensor, tensors_restored

__all__ = ["depends_on_later_forwards"]

FACTORS = (1.0, FAR, 1 / FAR, 0.0, *[None] * 6)
"""By what the numbers that such code is given are multiplied, or None for random ones: a maximum
grows by larger numbers alone, and a minimum, also of what a layer makes of them, falls by some.
"""


def depends_on_later_forwards(capture: Capture, module: fx.GraphModule, call: Arguments) -> bool:
    """Return whether a graph returns something else for a call once its nodes with code of the user
    have run for other numbers. Buffers are put back in between, as a recomputed region does.
    """
    if not any(nodes_of_user(module)):
        return False
    model, runnable = capture.model, with_autograd_contexts(module)
    tensors = capture.inputs.flatten(call)
    others = other_data(tensors, capture.inputs.batch_dims)

    def outputs(
        inputs: Sequence[Tensor], factor: float | None = 1.0, seed: int = SEED
    ) -> list[Tensor]:
        seed_generators(seed)
        with torch.enable_grad(), tensors_restored(model, model.buffers()):
            # A node may write to its inputs.
            returned = _Scaling(runnable, factor).run(*map(torch.clone, inputs))
            return [each.detach().clone() for each in tensor_leaves(returned)]

    kept = callable_restored(*reached_by_user(model, module))
    with restored_state(model), kept, deterministic_kernels():
        before = outputs(tensors)
        for index, factor in enumerate(FACTORS):
            with suppress(Exception):  # not every model takes such numbers
                outputs(others, factor, SEED + index)
        return not all(map(is_same_tensor, before, outputs(tensors)))


class _Scaling(fx.Interpreter):
    """Runs a graph, but gives code of the user other numbers, see `FACTORS`."""

    def __init__(self, module: fx.GraphModule, factor: float | None) -> None:
        super().__init__(module)
        self.factor, self.of_user = factor, set(nodes_of_user(module))

    def run_node(self, n: fx.Node) -> Any:
        self.is_scaled = n in self.of_user and self.factor != 1.0
        return super().run_node(n)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        found = super().fetch_args_kwargs_from_env(n)
        return tree_map_only(Tensor, self._scaled, found) if self.is_scaled else found

    def _scaled(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or not value.numel():
            return value  # whole numbers may be indices
        if self.factor is None:
            return torch.randn_like(value) * value.abs().max()
        return value * self.factor
