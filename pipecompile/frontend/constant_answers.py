"""Answers that a forward reads out of tensors which it computes from sizes, or from masks.

Fake tensors have no values, but positions and masks often come from `arange` and shapes:

    positions = torch.arange(tokens.shape[1])                 no input's values, no weights
    if ((positions.diff() != 1).cumsum(-1) == 0).all():       so its value is known: True

The nodes that led there are kept: at another batch size they are run again, and the recording holds
if the answer is the same. Where nothing else can express the forward, inputs of whole numbers or
booleans may lead there as well, such as a mask of padding, and each step runs the nodes again:

    if attention_mask.all():                                  True on the sample; a batch with
        attention_mask = None                                 padding is then refused

A branch on chance may be certain too, such as that of a layer drop which is switched off:

    if torch.rand([]) < self.layerdrop:                       False for 0.0: draws are in [0, 1)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from pipecompile.frontend.recording import SymbolicNumber

__all__ = ["ConstantAnswer", "certain_outcome", "has_gradient_type"]

CPU = torch.device("cpu")
COMPARISONS = {
    "lt": operator.lt,
    "less": operator.lt,
    "le": operator.le,
    "less_equal": operator.le,
    "gt": operator.gt,
    "greater": operator.gt,
    "ge": operator.ge,
    "greater_equal": operator.ge,
}
Sizes = Mapping[sympy.Symbol, sympy.Integer]


@dataclass(frozen=True)
class ConstantAnswer:
    """What `read`, such as `Tensor.item`, gave of the last node of `graph`, and where that was.

    `inputs` are the names of the model's inputs that the graph depends on.
    """

    graph: fx.Graph
    read: Callable[[Tensor], Any]
    answer: Any
    where: str
    inputs: tuple[str, ...]

    @staticmethod
    def of(
        node: fx.Node,
        read: Callable[[Tensor], Any],
        sizes: Sizes,
        where: str,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> ConstantAnswer | None:
        """Return the answer where symbolic sizes and some of the inputs have these values.

        None if `node` depends on another input, on the model's tensors or on chance, or if
        something writes to what it depends on.
        """
        # Whole numbers and truth values are masks or indices, which are often alike from batch to
        # batch; that numbers with a fraction are, nobody would expect.
        readable = {name for name, value in inputs.items() if not has_gradient_type(value)}
        graph = _computation(node, readable)
        if graph is None:
            return None
        read_inputs = tuple(str(each.target) for each in graph.nodes if each.op == "placeholder")
        return ConstantAnswer(graph, read, _answer(graph, read, sizes, inputs), where, read_inputs)

    def holds(self, sizes: Sizes, inputs: Mapping[str, Tensor]) -> bool:
        """Return whether the answer is the same for other sizes and inputs."""
        return bool(_answer(self.graph, self.read, sizes, inputs) == self.answer)


def certain_outcome(node: fx.Node) -> bool | None:
    """Return what `node` compares a draw from [0, 1) with a number to, whatever is drawn; None if
    it is another node, or if that depends on the draw.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    match node.args:
        # In the type of the draw, a bound just below 0 may be -0.0.
        case (fx.Node(target=torch.rand) as draw, int() | float() as bound) if bound >= 0:
            compare = COMPARISONS.get(name)
            if compare is not None and not _is_written(draw):
                # The least and the greatest draw decide for all between: `rand < 0.0` is False
                # for both, `rand < 1.0` True, and `rand < 0.1` depends on the draw.
                outcomes = {compare(each, bound) for each in (0.0, math.nextafter(1.0, 0.0))}
                return outcomes.pop() if len(outcomes) == 1 else None
    return None


def has_gradient_type(tensor: Tensor) -> bool:
    """Return whether elements of a tensor are numbers that gradients can be taken of."""
    return tensor.is_floating_point() or tensor.is_complex()


def _computation(node: fx.Node, inputs: Collection[str]) -> fx.Graph | None:
    """Return a copy of `node` and all that it depends on; None if that is more than sizes and these
    inputs.
    """
    needed: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in needed:
            continue
        # Neither reads of parameters nor calls of modules: weights change in each step.
        is_call = current.op in ("call_function", "call_method")
        is_input = current.op == "placeholder" and current.target in inputs
        if not (is_call or is_input) or current.meta.get("random") or _is_written(current):
            return None
        needed.add(current)
        stack += current.all_input_nodes
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    # In the order of the graph, in which each node stands behind what it reads.
    for each in node.graph.nodes:
        if each in needed:
            copies[each] = graph.node_copy(each, copies.__getitem__)
    return graph


def _is_written(node: fx.Node) -> bool:
    """Return whether an operator writes to what `node` returned, or to a view of it."""
    seen, stack = set[fx.Node](), [node]
    while stack:
        current = stack.pop()
        # A module writes to its own buffers.
        if current.meta.get("mutates") and current.op != "call_module":
            return True
        if current not in seen:
            seen.add(current)
            stack += current.users
    return False


def _answer(
    graph: fx.Graph, read: Callable[[Tensor], Any], sizes: Sizes, inputs: Mapping[str, Tensor]
) -> Any:
    """Run the graph on the CPU, also for a model on the meta device, and read its last node."""
    values: dict[fx.Node, Any] = {}

    def concrete(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        if isinstance(argument, SymbolicNumber):
            return argument.value_for(dict(sizes))
        return CPU if isinstance(argument, torch.device) else argument

    # This may run amid a recording, whose modes would record it or make its tensors fake.
    with _disable_current_modes(), torch.device(CPU):
        for node in graph.nodes:
            args = map_aggregate(node.args, concrete)
            kwargs = map_aggregate(node.kwargs, concrete)
            if node.op == "placeholder":
                values[node] = inputs[str(node.target)].to(CPU)
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            else:
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        return read(values[node])
