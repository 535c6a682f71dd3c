"""Where a graph is first seen not to be its model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from pipecompile.frontend.signature import Arguments
from pipecompile.graph.ties import reads_of

__all__ = ["first_leaf", "reader"]

Same = Callable[[Tensor, Tensor], bool]


class _FoundError(Exception):
    """Ends a run at the first node that differs."""


def reader(module: fx.GraphModule, name: str) -> fx.Node | None:
    """The first node that reads a parameter or buffer."""
    for node in module.graph.nodes:
        if name in reads_of(module, node):
            user: fx.Node = next(iter(node.users), node) if node.op == "get_attr" else node
            return user
    return None


def first_leaf(
    model: nn.Module, module: fx.GraphModule, inputs: Sequence[Tensor], call: Arguments, same: Same
) -> fx.Node | None:
    """The first node that calls a module and gets another result than in the model's own forward; None if none does.

    Both run from one seed.
    """
    torch.manual_seed(0)
    expected = _results(model, module, call)
    torch.manual_seed(0)
    run = _Compared(module, expected, same)
    try:
        run.run(*inputs)
    except _FoundError:
        return run.current
    return None


def _results(
    model: nn.Module, module: fx.GraphModule, call: Arguments
) -> dict[nn.Module, list[list[Tensor]]]:
    """By module that is a node the results of its calls."""
    found: dict[nn.Module, list[list[Tensor]]] = defaultdict(list)

    def note(part: nn.Module, _: Any, result: Any) -> None:
        found[part].append(
            [
                leaf.detach().clone()
                for leaf in pytree.tree_leaves(result)
                if isinstance(leaf, Tensor)
            ]
        )

    leaves = {
        module.get_submodule(str(node.target))
        for node in module.graph.nodes
        if node.op == "call_module"
    }
    with ExitStack() as stack:
        for part in leaves:
            stack.callback(part.register_forward_hook(note).remove)
        model(*call.args, **call.kwargs)
    return found


class _Compared(fx.Interpreter):
    def __init__(
        self, module: fx.GraphModule, expected: dict[nn.Module, list[list[Tensor]]], same: Same
    ) -> None:
        super().__init__(module)
        self.expected, self.same = expected, same
        self.current: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_module":
            self.current = n
            calls = self.expected[self.fetch_attr(str(n.target))]
            wanted = calls.pop(0) if calls else []
            got = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            if len(got) != len(wanted) or not all(map(self.same, got, wanted)):
                raise _FoundError
        return result
