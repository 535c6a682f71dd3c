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

import torch
from torch import Tensor, fx

from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.deterministic_kernels import deterministic_kernels
from pipecompile.frontend.kept_state import holders_of_user, nodes_of_user
from pipecompile.frontend.other_data import FAR, enlarged, other_data
from pipecompile.frontend.self_check import with_autograd_contexts
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.training_step import SEED, restored_state
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.random_streams import seed_generators
from pipecompile.graph.restored_state import is_same_tensor, tensors_restored

__all__ = ["depends_on_later_forwards"]


def depends_on_later_forwards(capture: Capture, module: fx.GraphModule, call: Arguments) -> bool:
    """Return whether a graph returns something else for a call once it has run for another one.
    Buffers are put back in between, as a recomputed region does.
    """
    if not any(nodes_of_user(module)):
        return False
    tensors, dims = capture.inputs.flatten(call), capture.inputs.batch_dims
    others = other_data(tensors, dims)
    # A maximum is changed by larger numbers alone, which not every model takes.
    for between in (enlarged(others, dims, FAR), enlarged(others, dims), others):
        with suppress(Exception):
            return _is_changed(capture, module, tensors, between)
    return False


@torch.enable_grad()
def _is_changed(
    capture: Capture, module: fx.GraphModule, tensors: Sequence[Tensor], between: Sequence[Tensor]
) -> bool:
    model, runnable = capture.model, with_autograd_contexts(module)

    def outputs(inputs: Sequence[Tensor]) -> list[Tensor]:
        seed_generators(SEED)
        with tensors_restored(model, model.buffers()):
            return [each.detach().clone() for each in tensor_leaves(runnable(*inputs))]

    kept = callable_restored(*holders_of_user(model))
    with restored_state(model), kept, deterministic_kernels():
        before, _, after = outputs(tensors), outputs(between), outputs(tensors)
    return not all(map(is_same_tensor, before, after))
