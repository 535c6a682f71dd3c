"""An interpreter that runs a graph node by node, each as a `NodeCall`.

The observer and the collector of node costs are two of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from pipecompile.cost_models.protocol import NodeCall
from pipecompile.errors import CaptureError, PipecompileError, reason_of
from pipecompile.graph.data_answers import node_conditions
from pipecompile.graph.loss_module import called_path
from pipecompile.profiling.operator_configuration import configuration, operator_name
from pipecompile.profiling.workload import Workload

__all__ = ["NodeCaller"]

DERIVATIVE = "it computes a derivative; write that out, or compute it in the loss function"
SPARSE = "it computes with sparse tensors, which have no bytes to count; use dense ones (to_dense)"
LIMITS = {
    "torch.func": DERIVATIVE,
    "autograd.grad": DERIVATIVE,
    "does not have a grad_fn": DERIVATIVE,
    "Cannot access storage": SPARSE,
}
"""What nodes do that torch refuses here with these words."""


class NodeCaller(fx.Interpreter):
    """Interprets a workload: `perform` runs each node but `get_attr` as a `NodeCall`.

    The output node calls the loss with (outputs, targets). Values are freed after their last use.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload.module, graph=workload.graph)
        self.workload = workload
        self.extra_traceback = False  # of torch, below each message

    def interpret(self) -> None:
        """Run the whole graph."""
        self.run(*self.workload.inputs, enable_io_processing=False)

    def perform(self, call: NodeCall) -> Any:
        """Run the call and return the value of its node; subclasses do more."""
        return call.bind(call.arguments)()

    def run_node(self, n: fx.Node) -> Any:
        """Return the value of a node, from `perform`."""
        return super().run_node(n) if n.op == "get_attr" else self.perform(self._call(n))

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss, or the outputs if there is no loss."""
        outputs, targets = args
        return outputs if self.workload.loss is None else self.workload.loss(outputs, targets)

    def _call(self, node: fx.Node) -> NodeCall:
        """Return the node as a function of the tensors that flow into it."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        # The loss is a part of the output node, which therefore reads the targets too.
        if node.op == "output":
            args = (args[0], self.workload.targets)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # Tensors are replaced in `bind`; parameters, buffers and constants stay as they are.
        positions = [index for index, leaf in enumerate(leaves) if self._is_argument(leaf)]

        def bind(arguments: Sequence[Tensor]) -> Callable[[], Any]:
            # A copy for each run: a call may be run many times, on other arguments each time.
            filled = list(leaves)
            for position, argument in zip(positions, arguments, strict=True):
                filled[position] = argument
            return partial(self._execute, node, *pytree.tree_unflatten(filled, spec))

        return NodeCall(
            node=node,
            operator=operator_name(node, self.workload.module),
            configuration=(configuration(node, self.workload.module, leaves), str(spec)),
            bind=bind,
            arguments=tuple(leaves[position] for position in positions),
            differentiable=tuple(leaves[position].requires_grad for position in positions),
            # A tied parameter of a module counts once.
            parameters=tuple({id(value): value for value in self._read(node, leaves)}.values()),
            mutates=False,
        )

    def _execute(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a node; CaptureError in one line if it cannot run by itself. What the
        loss raises is its own.
        """
        try:
            with node_conditions(node, (args, kwargs)):
                return getattr(self, node.op)(node.target, args, kwargs)
        except (PipecompileError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if node.op == "output":
                raise
            raise CaptureError(_why_not_alone(node, error)) from error

    def _is_argument(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and id(leaf) not in self.workload.names

    def _read(self, node: fx.Node, leaves: Iterable[Any]) -> Iterator[Tensor]:
        """Yield the parameters and buffers among the arguments, and those of a called module; the
        output node calls the loss.
        """
        yield from (leaf for leaf in leaves if id(leaf) in self.workload.names)
        path = called_path(node)
        if path is not None:
            module = self.workload.module.get_submodule(path)
            yield from (*module.parameters(), *module.buffers())


def _why_not_alone(node: fx.Node, error: Exception) -> str:
    """Return why a node that runs in the model cannot be run by itself."""
    line = f" ({node.meta['source']})" if node.meta.get("source") else ""
    where = f"{node.meta.get('module') or 'the forward'}{line}"
    if node.target is torch.autograd.grad:
        return (
            f"{where}: the forward calls torch.autograd.grad, which goes back through other "
            "operators, and costs run each of them by itself; compute what needs a gradient in "
            "the loss function"
        )
    reason = reason_of(error)
    unknown = f"{type(error).__name__}: {reason}; write it with other operations"
    known = next((text for words, text in LIMITS.items() if words in reason), unknown)
    return f"{where}: this cannot be run by itself, which costs and memory need: {known}"
