"""Fake runs of a graph: they find what every node returns without reading a real parameter.

The frontend calls `propagate` when it instantiates a capture. Passes, code generation and profiling
read what it leaves in `node.meta`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile.graph.attributes import attributes_restored
from pipecompile.graph.autograd_context import current_context
from pipecompile.graph.data_answers import node_conditions
from pipecompile.graph.model_state import distinct_tensors, fake_state, swapped_state
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.side_effects import SideEffectTracker
from pipecompile.graph.torch_repairs import new_fake_mode

__all__ = ["propagate"]


class _Propagator(fx.Interpreter):
    """Runs a graph and notes on each node its value, its state and its side effects."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["state"] = tuple(self._state(n))
        versions = [(tensor, tensor._version) for tensor in self._reachable_tensors(n)]
        conditions = node_conditions(n, self.fetch_args_kwargs_from_env(n))
        with conditions, SideEffectTracker() as tracker:
            # Under an autocast around the whole model the cache would hide the casts of this node
            # that an earlier node made.
            torch.clear_autocast_cache()
            n.meta["val"] = super().run_node(n)
            is_autocast = current_context().is_autocast
            n.meta["cast_parameters"] = tuple(tracker.cast_parameters) if is_autocast else ()
        written = [tensor for tensor, version in versions if tensor._version != version]
        # A data-dependent module may behave differently on other data: it may draw random numbers
        # there, and write to its buffers.
        depends_on_data = n.meta.get("data_answers") is not None
        suspected = self.fetch_attr(str(n.target)).buffers() if depends_on_data else ()
        n.meta["mutates"] = (*written, *tracker.running_statistics, *suspected)
        n.meta["random"] = n.meta.get("random", False) or tracker.is_random or depends_on_data
        return n.meta["val"]

    def _reachable_tensors(self, n: fx.Node) -> Iterator[Tensor]:
        """Yield the tensors that `n` may write to: its arguments and its module's state."""
        for source in n.all_input_nodes:
            yield from tensor_leaves(self.env[source])
        yield from n.meta["state"]

    def _state(self, n: fx.Node) -> Iterator[Tensor]:
        """Yield the parameters and buffers of the module that `n` calls, if it calls one."""
        if n.op == "call_module":
            leaf_module = self.fetch_attr(str(n.target))
            yield from (*leaf_module.parameters(), *leaf_module.buffers())


@torch.enable_grad()
def propagate(
    module: fx.GraphModule, inputs: Sequence[Tensor], mode: FakeTensorMode | None = None
) -> None:
    """Run the graph on fakes of `inputs`, one tensor a placeholder, and annotate every node.

    It sets on each node:

        meta["val"]              the fake value
        meta["state"]            fake parameters and buffers of the module that the node calls
        meta["mutates"]          fake tensors that the node writes to in place
        meta["cast_parameters"]  fake parameters that autocast casts for the node
        meta["random"]           whether the node draws random numbers

    Attributes of modules and the random state are restored.
    """
    mode = mode or new_fake_mode()
    state = fake_state(module, mode)
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in distinct_tensors(inputs)]
    propagator = _Propagator(module, garbage_collect_values=False)
    propagator.extra_traceback = False  # of torch, below each message
    # The graph may seed the generator, or draw on tensors that are not fake.
    random_state = torch.get_rng_state()
    try:
        with mode, attributes_restored(module), swapped_state(module, state):
            propagator.run(*fakes)
    finally:
        torch.set_rng_state(random_state)
