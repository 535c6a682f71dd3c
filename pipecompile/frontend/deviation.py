"""Deviations of a graph from its model: the node at which a failed self-check first sees one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipecompile.frontend.signature import Arguments
from pipecompile.graph.autograd_context import entered_contexts_left
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.random_streams import seed_generators
from pipecompile.graph.ties import names_of_read_state

__all__ = ["difference_text", "first_deviating_call", "first_reader"]

IsSame = Callable[[Tensor, Tensor], bool]


class _DeviationError(Exception):
    """Ends a run at the first node that deviates."""


def difference_text(model: Tensor | None, graph: Tensor | None) -> str:
    """Return in words how far the graph's tensor is from the model's, None where there is none."""
    if model is None or graph is None:
        return f"only the {'graph' if model is None else 'model'} has it"
    if (model.shape, model.dtype) != (graph.shape, graph.dtype):
        kinds = [f"{each.dtype} of shape {tuple(each.shape)}" for each in (model, graph)]
        return f"{kinds[0]} in the model, {kinds[1]} in the graph"
    # Integers and booleans too, whose difference would wrap around or not be defined.
    wide = torch.promote_types(model.dtype, torch.float64)
    expected = model.to(wide)
    difference = (expected - graph.to(wide)).abs().max().item()
    return f"by up to {difference:.1e} where values reach {expected.abs().max().item():.1e}"


def first_reader(module: fx.GraphModule, name: str) -> fx.Node | None:
    """Return the first node that uses a parameter or buffer, None if no node does."""
    for node in module.graph.nodes:
        if name in names_of_read_state(module, node):
            user: fx.Node = next(iter(node.users), node) if node.op == "get_attr" else node
            return user
    return None


def first_deviating_call(
    model: nn.Module,
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    call: Arguments,
    is_same: IsSame,
    seed: int,
) -> fx.Node | None:
    """Return the first node that calls a module and gets another result than the model's forward.

    None if no such node deviates. Graph and model run from one `seed`.
    """
    seed_generators(seed)
    expected = _results_by_leaf(model, module, call)
    seed_generators(seed)
    comparison = _ComparingInterpreter(module, expected, is_same)
    try:
        with entered_contexts_left():
            comparison.run(*inputs)
    except _DeviationError:
        return comparison.current
    return None


def _results_by_leaf(
    model: nn.Module, module: fx.GraphModule, call: Arguments
) -> dict[nn.Module, list[list[Tensor]]]:
    """Return, by module that is a node, the tensors that each of its calls returns."""
    results: dict[nn.Module, list[list[Tensor]]] = defaultdict(list)

    def note(leaf: nn.Module, _: Any, result: Any) -> None:
        # A copy, because a later node may write to the result.
        results[leaf].append([value.detach().clone() for value in tensor_leaves(result)])

    # Nodes of functions are not compared: the model does not tell what it computes between its
    # modules.
    leaves = {
        module.get_submodule(str(node.target))
        for node in module.graph.nodes
        if node.op == "call_module"
    }
    with ExitStack() as stack:
        for leaf in leaves:
            stack.callback(leaf.register_forward_hook(note).remove)
        model(*call.args, **call.kwargs)
    return results


class _ComparingInterpreter(fx.Interpreter):
    """Runs a graph until a module call returns another result than expected."""

    def __init__(
        self,
        module: fx.GraphModule,
        expected: dict[nn.Module, list[list[Tensor]]],
        is_same: IsSame,
    ) -> None:
        super().__init__(module)
        self.expected, self.is_same = expected, is_same
        self.current: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_module":
            self.current = n
            # A module may be called several times: its results are compared in order.
            calls = self.expected[self.fetch_attr(str(n.target))]
            wanted = calls.pop(0) if calls else []
            values = tensor_leaves(result)
            if len(values) != len(wanted) or not all(map(self.is_same, values, wanted)):
                raise _DeviationError
        return result
