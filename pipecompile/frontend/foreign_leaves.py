"""Tensors that a backward gives gradients to, and that are no parameters of the model.

    self.scale = torch.ones(8, requires_grad=True)     no nn.Parameter
    self.experts = [nn.Linear(8, 8)]                   no nn.ModuleList
    SCALE = nn.Parameter(torch.ones(8))                a global that the forward reads

No stage divides their gradients by the number of microbatches, or sends them to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.errors import CaptureError

__all__ = ["foreign_leaves", "refuse_foreign_leaves", "refuse_recorded_leaves"]


def foreign_leaves(model: nn.Module, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the leaves of the autograd graph behind `outputs` that are no parameters of `model`;
    those that its forward has made itself are among them.
    """
    seen: set[Any] = {None}
    leaves = {id(value): value for value in outputs if value.is_leaf and value.requires_grad}
    waiting: list[Any] = [value.grad_fn for value in outputs]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves[id(node.variable)] = node.variable
        waiting.extend(before for before, _ in node.next_functions)
    own = set(map(id, model.parameters()))
    return tuple(leaf for key, leaf in leaves.items() if key not in own)


def refuse_foreign_leaves(
    model: nn.Module, first: Sequence[Tensor], second: Sequence[Tensor]
) -> None:
    """Raise CaptureError if two steps have the same leaf: their forwards have not made it."""
    lasting = set(map(id, first)) & set(map(id, second))
    _refuse(model, (each for each in first if id(each) in lasting))


def refuse_recorded_leaves(model: nn.Module, outputs: Sequence[Tensor]) -> None:
    """Raise CaptureError for a leaf behind the `outputs` of a forward on fake tensors, which has
    not made it: a buffer, or a tensor with values. `model` has fakes in its tables.
    """
    buffers = set(map(id, model.buffers()))
    leaves = foreign_leaves(model, outputs)
    _refuse(model, (e for e in leaves if id(e) in buffers or not isinstance(e, FakeTensor)))


def _refuse(model: nn.Module, leaves: Iterable[Tensor]) -> None:
    for leaf in leaves:
        raise CaptureError(
            f"{_name(model, leaf)} of shape {tuple(leaf.shape)} gets a gradient, but is no "
            "parameter of the model, so its gradient would be summed over the microbatches of one "
            "rank; register it (nn.Parameter, or a submodule in nn.ModuleList), or compute with a "
            "detached one, or under no_grad"
        )


def _name(model: nn.Module, leaf: Tensor) -> str:
    for path, module in model.named_modules():
        for name, value in (*vars(module).items(), *module._buffers.items()):
            if value is leaf:
                return f"{path}.{name}".lstrip(".")
    return "a tensor"
