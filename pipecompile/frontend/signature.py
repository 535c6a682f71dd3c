"""How a model's arguments and results become flat lists of tensors, and back."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.graph.pytrees import know_dataclasses

__all__ = ["Arguments", "Inputs", "Outputs", "arguments_of"]

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), range, slice, Enum, torch.dtype, torch.device, torch.Size
)  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of(
    model: nn.Module, sample: Any, sample_kwargs: Mapping[str, Any] | None = None
) -> Arguments:
    """A minibatch as its call: a tensor, a tuple of positional arguments, or a mapping of keyword arguments."""
    extra = dict(sample_kwargs or {})
    if isinstance(sample, Arguments):
        call = sample
    elif isinstance(sample, Mapping):
        call = Arguments((), {**sample, **extra})
    else:
        call = Arguments(tuple(sample) if isinstance(sample, (tuple, list)) else (sample,), extra)
    try:
        inspect.signature(model.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(model).__name__}.forward cannot be called with the sample input: {error}; "
            "give a tensor, a tuple of positional arguments or a mapping of keyword arguments"
        ) from error
    return call


@dataclass(frozen=True)
class Inputs:
    """The shape of a model's arguments: their tree, the names of the tensors, and the constants between them."""

    spec: pytree.TreeSpec
    names: tuple[str | None, ...]  # per leaf; None for a constant
    constants: tuple[Any, ...]  # per leaf; None for a tensor

    @staticmethod
    def of(model: nn.Module, call: Arguments) -> Inputs:
        """Learns the tree from one call."""
        know_dataclasses((call.args, call.kwargs))
        leaves, spec = pytree.tree_flatten_with_path((call.args, call.kwargs))
        positional = list(inspect.signature(model.forward).parameters)
        names: list[str | None] = []
        for path, leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise InputError(
                    f"the input {_name(path, positional)!r} requires a gradient, which a pipeline gives to parameters "
                    "alone; detach it, or make it a parameter"
                )
            if isinstance(leaf, Tensor):
                names.append(_name(path, positional))
            elif isinstance(leaf, CONSTANTS):
                names.append(None)
            else:
                raise CaptureError(
                    f"the argument {_name(path, positional)!r} holds a {type(leaf).__name__}; "
                    "inputs are tensors, constants, and tuples, lists, dicts and dataclasses of them"
                )
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for _, leaf in leaves)
        return Inputs(spec, tuple(names), constants)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of the tensors, in order."""
        return tuple(name for name in self.names if name is not None)

    def flatten(self, call: Arguments) -> list[Tensor]:
        """The tensors of `call`; InputError if it differs in its tree or in a constant."""
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        if spec != self.spec:
            raise InputError(
                f"the batch has the structure {spec}, but the plan was made for {self.spec}"
            )
        for leaf, name, constant in zip(leaves, self.names, self.constants, strict=True):
            if name is not None and not isinstance(leaf, Tensor):
                raise InputError(
                    f"{name} is a {type(leaf).__name__}, but the plan was made for a tensor"
                )
            if name is None and (type(leaf) is not type(constant) or leaf != constant):
                raise InputError(
                    f"an argument is {leaf!r}, but the plan was made with {constant!r}; plan again"
                )
        return [leaf for leaf, name in zip(leaves, self.names, strict=True) if name is not None]

    def unflatten(self, tensors: Sequence[Tensor]) -> Arguments:
        """The call whose tensors are `tensors`."""
        source = iter(tensors)
        pairs = zip(self.names, self.constants, strict=True)
        leaves = [constant if name is None else next(source) for name, constant in pairs]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return Arguments(args, kwargs)


@dataclass(frozen=True)
class Outputs:
    """The shape of a model's result: its tree, and the constants between its tensors."""

    spec: pytree.TreeSpec
    is_tensor: tuple[bool, ...]
    constants: tuple[Any, ...]
    batched: tuple[bool, ...]  # per tensor, whether its dimension 0 grows with the batch

    @staticmethod
    def of(result: Any) -> tuple[Outputs, list[Tensor]]:
        """Learns the tree from one result; returns its tensors with it."""
        know_dataclasses(result)
        leaves, spec = pytree.tree_flatten(result)
        for leaf in leaves:
            if isinstance(leaf, SYMBOLS):
                raise UnsupportedError(
                    "the model returns a size of its input, which is another for each batch size"
                )
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise CaptureError(
                    f"the model returns a {type(leaf).__name__}, which cannot travel between stages; "
                    "return tensors (transformers models: set use_cache=False in the config)"
                )
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        batched = tuple(
            value.dim() > 0 and not isinstance(value.shape[0], int) for value in tensors
        )
        return Outputs(spec, is_tensor, constants, batched), tensors

    def alike(self, other: Outputs) -> bool:
        """Whether both have one structure and the same constants."""
        return (self.spec, self.is_tensor, self.constants) == (
            other.spec,
            other.is_tensor,
            other.constants,
        )

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """The result whose tensors are `tensors`."""
        source = iter(tensors)
        pairs = zip(self.is_tensor, self.constants, strict=True)
        return pytree.tree_unflatten([next(source) if t else c for t, c in pairs], self.spec)


def _name(path: Sequence[Any], positional: Sequence[str]) -> str:
    """A readable, valid name for the leaf at `path` of (args, kwargs)."""
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    if keys[0] == 0 and keys[1] < len(positional):
        keys[1] = positional[keys[1]]
    name = re.sub(r"\W", "_", "_".join(map(str, keys[1:])))
    return f"{name}_" if keyword.iskeyword(name) else name
