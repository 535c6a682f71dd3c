"""The workload of a profile: a graph, one microbatch for it, and the loss that ends its forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from pipecompile.graph.loss_module import held_loss, hold_loss
from pipecompile.graph.model_state import (
    named_state,
    swapped_state,
    tensor_attributes,
    without_values,
)
from pipecompile.profiling.backward_hooks import stop_at_reads

__all__ = ["Loss", "Workload"]

Loss = Callable[[Sequence[Any], Sequence[Tensor]], Tensor]
"""From the graph's flat outputs and the targets to the scalar that is differentiated."""


@dataclass(frozen=True)
class Workload:
    """One microbatch's forward through `graph`, whose modules and parameters `module` holds.

    `inputs` are the values of the placeholders, in order. Without a `loss` the forward ends with
    the outputs. Tensors may be real or fake.
    """

    module: fx.GraphModule
    graph: fx.Graph
    inputs: tuple[Tensor, ...]
    loss: Loss | None
    targets: tuple[Tensor, ...]

    @cached_property
    def names(self) -> dict[int, str]:
        """The first name of each parameter and buffer, by the id of the tensor."""
        names: dict[int, str] = {}
        for name, value in named_state(self.module):
            # Tied tensors have several names; the first one is their canonical name everywhere.
            names.setdefault(id(value), name)
        return names

    @contextmanager
    def faked(self) -> Iterator[Workload]:
        """The same workload on fake CPU tensors with a storage each, which the loss has in the
        block.

        Call it under the FakeTensorMode that is to own them.
        """
        # Constants of the graph may name the device of the captured model.
        graph = _on_cpu(self.graph)
        unused = self._unused_attributes()
        # `deepcopy` takes what is in the memo for copied already. With fake tensors there, it
        # copies the modules around them and never a real tensor.
        skipped = {id(value) for each in unused for value in _tensors(each)}
        state = (value for _, value in named_state(self.module))
        memo: dict[int, Any] = {
            id(value): without_values(value, "cpu")
            for value in (*state, *tensor_attributes(self.module))
            if id(value) not in skipped
        }
        # The loss is called as it is, so it is not copied: it gets the tensors of the copy.
        loss, fakes = held_loss(self.module), dict(memo)
        memo |= {id(each): each for each in (*unused, loss)} | {id(self.module.graph): graph}
        with _CopiesWithoutValues():
            module = _copied(self.module, memo)
        stop_at_reads(module)
        hold_loss(module, loss)
        with nullcontext() if loss is None else swapped_state(loss, fakes):
            yield replace(
                self,
                module=module,
                graph=graph,
                inputs=tuple(without_values(value, "cpu") for value in self.inputs),
                targets=tuple(without_values(value, "cpu") for value in self.targets),
            )

    def _unused_attributes(self) -> list[nn.Module | Tensor]:
        """Return what only nodes outside of `graph` call or read, without what shares tensors."""
        used = _attribute_names(self.graph)
        others = _attribute_names(self.module.graph) - used
        held = {id(value) for name in used for value in _tensors(attrgetter(name)(self.module))}
        loss = held_loss(self.module)
        held |= set() if loss is None else {id(value) for value in _tensors(loss)}
        unused = (attrgetter(name)(self.module) for name in others)
        return [each for each in unused if not held & {id(value) for value in _tensors(each)}]


class _CopiesWithoutValues(TorchFunctionMode):
    """Lets `deepcopy` make a fake of each tensor that it comes to, such as one in an object that a
    module has: no memo names these.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        value, memo = args
        # Once for all that refer to it.
        fake = memo[id(value)] = without_values(value, "cpu")
        return fake


def _copied(module: fx.GraphModule, memo: dict[int, Any]) -> fx.GraphModule:
    """Return a copy of `module`, which shares what nobody can copy, such as a lock or a generator
    of random numbers.
    """
    known = dict(memo)
    try:
        return copy.deepcopy(module, memo)
    except Exception:
        held = chain.from_iterable(vars(each).values() for each in module.modules())
        known |= {id(value): value for value in held if not _can_be_copied(value, known)}
        return copy.deepcopy(module, known)


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _attribute_names(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}


def _tensors(attribute: nn.Module | Tensor | None) -> tuple[Tensor, ...]:
    """Return an attribute of a graph's module if it is a tensor, else those that it holds."""
    if isinstance(attribute, nn.Module):
        return (*attribute.parameters(), *attribute.buffers(), *tensor_attributes(attribute))
    return () if attribute is None else (attribute,)


def _on_cpu(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph that creates its tensors on the CPU.

    Devices among the constants of a captured graph are those of the captured model.
    """
    copies: dict[fx.Node, fx.Node] = {}
    moved = fx.Graph()
    for node in graph.nodes:
        new = copies[node] = moved.node_copy(node, copies.__getitem__)
        new.args, new.kwargs = map_aggregate((new.args, new.kwargs), _device_on_cpu)
    return moved


def _device_on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument
