"""The state of a model: its parameters and buffers, their fake counterparts, and how to swap them.

A module may hold one tensor under several names (tied parameters), and one submodule may lie at
several paths. Whoever needs the state therefore goes by the identity of the tensors.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Container, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pipecompile.graph.pytrees import tensor_leaves

__all__ = [
    "copied_model",
    "distinct_tensors",
    "fake_state",
    "has_values",
    "named_state",
    "named_tensor_attributes",
    "swapped_state",
    "tensor_attributes",
    "without_values",
]

Model = TypeVar("Model", bound=nn.Module)
INTERNAL = frozenset(vars(nn.Module()))


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every name of every parameter and buffer, tied names included, parameters first."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def has_values(tensor: Tensor) -> bool:
    """Return whether `tensor` lies in memory: it is neither a meta tensor nor a fake one."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def without_values(tensor: Tensor, device: torch.device | str = "meta") -> Tensor:
    """Return a tensor of the same shape, strides and type whose elements are not set.

    For a parameter it is a parameter.
    """
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def tensor_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules hold in plain attributes, as a weight that a hook computes."""
    for part in module.modules():
        yield from (tensor for _, tensor in named_tensor_attributes(part))


def named_tensor_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in plain attributes of one module, and in containers there, each with the
    name of the attribute.
    """
    for name, value in vars(module).items():
        if name not in INTERNAL:
            yield from ((name, tensor) for tensor in tensor_leaves(value))


def copied_model(model: Model) -> Model:
    """Return a copy of a model, which `deepcopy` refuses if a hook has computed its weight."""
    memo: dict[int, Any] = {
        id(value): value.detach().clone() for value in tensor_attributes(model) if not value.is_leaf
    }
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def swapped_state(module: nn.Module, replacement: dict[int, Tensor]) -> Iterator[list[str]]:
    """Replace parameters and buffers by `replacement[id(tensor)]` in the block, then put them back.

    The context yields a list. After the block it holds the names of the tensors that the block
    itself replaced by new ones; such an update would be lost.
    """
    slots = list(_slots_of(module, replacement))
    lost: list[str] = []
    try:
        for _, table, key, tensor in slots:
            table[key] = replacement[id(tensor)]
        yield lost
    finally:
        for path, table, key, tensor in slots:
            # The block put another tensor there.
            if table.get(key) is not replacement[id(tensor)]:
                lost.append(f"{path}.{key}".lstrip("."))
            table[key] = tensor


def _slots_of(
    module: nn.Module, tensors: Container[int]
) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Yield the entries of tables that hold `tensors`, by id: path, table, key and tensor."""
    # `named_modules` yields a shared module once, so each entry of a table is swapped once.
    for path, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) in tensors:
                    yield path, table, key, tensor


def fake_state(module: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Return, by the id of each real parameter and buffer, a fake of static shape."""
    tensors = {id(tensor): tensor for _, tensor in named_state(module)}
    fakes: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        # A mode refuses fakes of another mode; it accepts meta tensors.
        source = without_values(tensor) if isinstance(tensor, FakeTensor) else tensor
        # Otherwise torch would make symbols of their sizes too, and guards of what the forward
        # does with those: only the batch is open.
        fake = fakes[key] = mode.from_tensor(source, static_shapes=True)
        # A forward may read attributes that somebody has set on a parameter.
        vars(fake).update(
            {name: own for name, own in vars(tensor).items() if name not in vars(fake)}
        )
    return fakes


def distinct_tensors(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors in order, and a copy for each one that was already yielded.

    A fake mode has one fake for each tensor, but each input of a graph needs a fake of its own.
    """
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) in seen:
            yield tensor.detach().clone().requires_grad_(tensor.requires_grad)
        else:
            yield tensor
        seen.add(id(tensor))
