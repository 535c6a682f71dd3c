"""Runs a graph node by node, each as a Call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx

from pipecompile.cost_models.protocol import NodeCall
from pipecompile.graph.data_answers import node_conditions
from pipecompile.profiling.operator import configuration, operator_name
from pipecompile.profiling.workload import Workload

__all__ = ["NodeCaller"]


class NodeCaller(fx.Interpreter):
    """Interprets a workload: every node but `get_attr` becomes a Call, and `perform` gives its value.

    The output node calls the loss on (outputs, targets). Values are freed after their last use.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload.module, graph=workload.graph)
        self.workload = workload

    def interpret(self) -> None:
        """Runs the whole graph."""
        self.run(*self.workload.inputs, enable_io_processing=False)

    def perform(self, call: NodeCall) -> Any:
        """The value of the call's node."""
        return call.bind(call.arguments)()

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, through `perform`."""
        return super().run_node(n) if n.op == "get_attr" else self.perform(self._call(n))

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The loss, or the outputs where there is none."""
        outputs, targets = args
        return outputs if self.workload.loss is None else self.workload.loss(outputs, targets)

    def _call(self, node: fx.Node) -> NodeCall:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.op == "output":
            args = (args[0], self.workload.targets)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if self._is_argument(leaf)]

        def bind(arguments: Sequence[Tensor]) -> Callable[[], Any]:
            filled = list(leaves)
            for place, argument in zip(places, arguments, strict=True):
                filled[place] = argument
            return partial(self._execute, node, *pytree.tree_unflatten(filled, spec))

        return NodeCall(
            node=node,
            operator=operator_name(node, self.workload.module),
            configuration=(configuration(node, self.workload.module, leaves), str(spec)),
            bind=bind,
            arguments=tuple(leaves[place] for place in places),
            differentiable=tuple(leaves[place].requires_grad for place in places),
            parameters=tuple({id(value): value for value in self._read(node, leaves)}.values()),
            mutates=False,
        )

    def _execute(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with node_conditions(node, (args, kwargs)):
            return getattr(self, node.op)(node.target, args, kwargs)

    def _is_argument(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and id(leaf) not in self.workload.names

    def _read(self, node: fx.Node, leaves: Iterable[Any]) -> Iterator[Tensor]:
        """The parameters and buffers among the arguments, and those of the module that is called."""
        yield from (leaf for leaf in leaves if id(leaf) in self.workload.names)
        if node.op == "call_module":
            module = self.workload.module.get_submodule(str(node.target))
            yield from (*module.parameters(), *module.buffers())
