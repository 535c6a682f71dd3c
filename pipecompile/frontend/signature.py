"""The signature of a model: how arguments and results become lists of tensors, and back."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import chain, count
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.batch_dims import BatchDim, BatchDims, batch_size, input_dims, output_dim
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.graph.attributes import is_same_constant
from pipecompile.graph.pytrees import is_size, leaves_with_paths, register_dataclasses
from pipecompile.graph.storages import is_irregular, layout_name

__all__ = [
    "Arguments",
    "InputStructure",
    "OutputStructure",
    "arguments_of",
    "call_of",
    "has_loose_keys",
    "with_keys_reversed",
]

BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), range, slice, Enum,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of a model, and where their tensors have the batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_dim: BatchDim = 0


def call_of(
    sample: Any, sample_kwargs: Mapping[str, Any] | None = None, batch_dim: BatchDim = 0
) -> Arguments:
    """Return a minibatch as the arguments of a call.

    `sample` is a tensor, a tuple of positional arguments or a mapping of keyword arguments, to
    which `sample_kwargs` are added. What is a call already is returned as it is.
    """
    extra = dict(sample_kwargs or {})
    if isinstance(sample, Arguments):
        return sample
    if isinstance(sample, Mapping):
        return Arguments((), {**sample, **extra}, batch_dim)
    args = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    return Arguments(args, extra, batch_dim)


def arguments_of(
    model: nn.Module,
    sample: Any,
    sample_kwargs: Mapping[str, Any] | None = None,
    batch_dim: BatchDim = 0,
) -> Arguments:
    """Return what `call_of` does; InputError if the model's forward does not take it."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}, but must be an nn.Module; wrap a function in "
            "the forward of one"
        )
    call = call_of(sample, sample_kwargs, batch_dim)
    for leaf in pytree.tree_leaves((call.args, call.kwargs)):
        if isinstance(leaf, Tensor) and leaf.is_quantized:
            raise InputError(
                "an input is quantized, which no capture knows; give floating-point numbers "
                "(dequantize), and quantize in the forward"
            )
        if isinstance(leaf, Tensor) and is_irregular(leaf):
            raise InputError(
                f"an input is {layout_name(leaf)}, of which no microbatches can be cut; give dense "
                "tensors (to_dense, to_padded_tensor), and make others in the forward"
            )
    try:
        # A wrong call would otherwise fail deep inside the capture.
        inspect.signature(model.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(model).__name__}.forward cannot be called with these inputs: {error}; "
            "give a tensor, a tuple of positional arguments or a mapping of keyword arguments"
        ) from error
    except ValueError as error:
        raise InputError(
            f"the forward of the model, a {type(model).__name__}, is no function of Python; give "
            "the Python module that a traced one was made from, or write the forward as a method"
        ) from error
    return call


@dataclass(frozen=True)
class InputStructure:
    """The pytree of a model's arguments: names of its tensors, and the constants between them.

    `names` and `constants` have an entry for each leaf: the name is None for a constant, and the
    constant is None for a tensor. `batch_dims` has one for each tensor: see `input_dims`. If it
    `is_ordered`, keys of dicts must come in this order.
    """

    spec: pytree.TreeSpec
    names: tuple[str | None, ...]
    constants: tuple[Any, ...]
    batch_dims: tuple[int | None, ...]
    is_ordered: bool = False

    @staticmethod
    def of(model: nn.Module, call: Arguments) -> InputStructure:
        """Return the structure of one call.

        InputError if a tensor requires a gradient or has no such dimension as `call` says,
        CaptureError for leaves of another kind.
        """
        register_dataclasses((call.args, call.kwargs))
        # A torch.Size is one constant here: torch would take it apart into its numbers.
        spec = pytree.tree_structure((call.args, call.kwargs), is_leaf=is_size)
        leaves = list(leaves_with_paths((call.args, call.kwargs), is_size))
        parameters = tuple(inspect.signature(model.forward).parameters.values())
        names: list[str | None] = []
        for path, leaf in leaves:
            name = _distinct(_leaf_name(path, parameters), names)
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise InputError(
                    f"the input {name!r} requires a gradient, but a pipeline computes gradients "
                    "for parameters only; detach it, or make it a parameter"
                )
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise CaptureError(
                    f"the argument {name!r} holds a {type(leaf).__name__}; inputs are tensors, "
                    "constants, and tuples, lists, dicts and dataclasses of them"
                )
            names.append(name if isinstance(leaf, Tensor) else None)
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for _, leaf in leaves)
        named = zip(names, leaves, strict=True)
        tensors = {name: leaf for name, (_, leaf) in named if name is not None}
        dims = input_dims(call.batch_dim, tensors)
        return InputStructure(spec, tuple(names), constants, dims)

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of the tensors, in order."""
        return tuple(name for name in self.names if name is not None)

    def batch_size(self, tensors: Sequence[Tensor]) -> int:
        """Return how many samples `tensors` have; InputError if they disagree."""
        return batch_size(self.tensor_names, tensors, self.batch_dims)

    def flatten(self, call: Arguments) -> list[Tensor]:
        """Return the tensors of `call`, whose dicts may have their keys in any order, unless these
        are ordered.

        InputError if its structure or a constant differs.
        """
        if self._has_plain_tensors(call):
            return list(call.args)
        given = call.args, call.kwargs
        # torch's pytree takes the keys of a dict as they come, and another collate function may
        # yield them in another order. Most forwards look them up by name, so that the order says
        # nothing.
        ordered = given if self.is_ordered else _ordered_like(given, self._numbered)
        leaves, spec = pytree.tree_flatten(ordered, is_size)
        if spec != self.spec:
            raise InputError(
                "the batch has another structure than the plan was made for: "
                f"{_difference(given, self._numbered)}"
            )
        for leaf, name, constant in zip(leaves, self.names, self.constants, strict=True):
            if name is not None and not isinstance(leaf, Tensor):
                raise InputError(
                    f"{name} is a {type(leaf).__name__}, but the plan was made for a tensor"
                )
            # A constant is part of the graph: with `scale=2.0` recorded, one of 3.0 would be
            # computed with 2.0.
            if name is None and not is_same_constant(leaf, constant):
                shown = f"a tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
                raise InputError(
                    f"an argument is {shown}, but the plan was made with {constant!r}; plan again"
                )
        return [leaf for leaf, name in zip(leaves, self.names, strict=True) if name is not None]

    def _has_plain_tensors(self, call: Arguments) -> bool:
        """Return whether the planned arguments are tensors in their order, and those of `call` too:
        a step of a small model takes as long as torch does to flatten them.
        """
        # Arguments (x, y) are numbered ((0, 1), {}), which (a, b) of tensors fits without being
        # flattened.
        is_plain = self._numbered == (tuple(range(len(call.args))), {}) and not call.kwargs
        return is_plain and None not in self.names and all(isinstance(a, Tensor) for a in call.args)

    @cached_property
    def _numbered(self) -> Any:
        """The arguments with a number in the place of each leaf."""
        return pytree.tree_unflatten(range(len(self.names)), self.spec)

    def unflatten(self, tensors: Sequence[Tensor]) -> Arguments:
        """Return the call whose tensors are `tensors`."""
        values = iter(tensors)
        pairs = zip(self.names, self.constants, strict=True)
        leaves = [constant if name is None else next(values) for name, constant in pairs]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return Arguments(args, kwargs, dict(zip(self.tensor_names, self.batch_dims, strict=True)))


@dataclass(frozen=True)
class OutputStructure:
    """The pytree of a model's result: which leaves are tensors, and the constants between them.

    `is_tensor` and `constants` have an entry for each leaf, `batch_dims` one for each tensor: the
    dimension that grows with the batch, see `output_dim`.
    """

    spec: pytree.TreeSpec
    is_tensor: tuple[bool, ...]
    constants: tuple[Any, ...]
    batch_dims: tuple[int | None, ...]

    @staticmethod
    def of(result: Any, input_dims: BatchDims) -> tuple[OutputStructure, list[Tensor]]:
        """Return the structure of one result, and the tensors of this result. Caches of
        transformers are left out. `input_dims` are where the inputs have the batch.

        UnsupportedError for symbolic sizes, CaptureError for leaves of another kind.
        """
        register_dataclasses(result)
        leaves, spec = pytree.tree_flatten(result)
        # A cache of keys and values is for generation, and would be sent through all stages.
        leaves = [None if _is_cache(leaf) else leaf for leaf in leaves]
        for leaf in leaves:
            if isinstance(leaf, SYMBOLS):
                raise UnsupportedError(
                    "the model returns a size of its input, which differs between batch sizes"
                )
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise CaptureError(
                    f"the model returns a {type(leaf).__name__}, which cannot travel between "
                    "stages; return tensors"
                )
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # While a forward is recorded, a size that grows with the batch is symbolic.
        batch_dims = tuple(output_dim(value, input_dims) for value in tensors)
        return OutputStructure(spec, is_tensor, constants, batch_dims), tensors

    def is_like(self, other: OutputStructure) -> bool:
        """Return whether both have the same pytree and the same constants."""
        is_like = (self.spec, self.is_tensor) == (other.spec, other.is_tensor)
        return is_like and all(map(is_same_constant, self.constants, other.constants))

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result whose tensors are `tensors`."""
        values = iter(tensors)
        pairs = zip(self.is_tensor, self.constants, strict=True)
        leaves = [next(values) if is_tensor else constant for is_tensor, constant in pairs]
        return pytree.tree_unflatten(leaves, self.spec)


def _is_cache(leaf: Any) -> bool:
    """Return whether an object is a cache of transformers, as its models return by default."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(leaf).__mro__)


def _leaf_name(path: Sequence[Any], parameters: Sequence[inspect.Parameter]) -> str:
    """Return a readable, valid name for the leaf at `path` of (args, kwargs).

    With parameters (x, mask, *rest), the leaf at args[1]["left"] is named "mask_left", and that at
    args[3] "rest_1".
    """
    # Each kind of key in a pytree's path has an attribute of its own: `key`, `idx` or `name`.
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    if keys[0] == 0:
        last = len(parameters) - 1
        variadic = (i for i, each in enumerate(parameters) if each.kind is each.VAR_POSITIONAL)
        rest = next(variadic, last + 1)
        # The leaf at args[3] of (x, mask, *rest) has the path (0, 3): rest is 2, so it becomes
        # ("rest", 1).
        index = keys[1]
        keys[1:2] = [parameters[min(index, rest, last)].name, *[index - rest] * (index >= rest)]
    # ASCII, since Python takes "¼" for a letter of a word, and not of a name.
    name = re.sub(r"\W", "_", "_".join(map(str, keys[1:])), flags=re.ASCII)
    if keyword.iskeyword(name) or name == "self":
        return f"{name}_"
    return name if name.isidentifier() else f"input_{name}"


def _distinct(name: str, names: Collection[str | None]) -> str:
    """Return `name`, with a number if it is among `names`."""
    numbered = (f"{name}_{number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in names)


def has_loose_keys(model: nn.Module, call: Arguments) -> bool:
    """Return whether a forward can go by the order of keys: in a dict among its arguments, or in
    keywords that it takes all together, as **kwargs.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    # A keyword that is the name of a parameter has its place whatever the order; those that
    # **kwargs takes are in a dict, over which the forward may iterate.
    names = {each.name for each in parameters if each.kind in BY_KEYWORD}
    values = (*call.args, *call.kwargs.values())
    return len(call.kwargs.keys() - names) > 1 or any(map(_has_keys, values))


def _has_keys(value: Any) -> bool:
    items = value.values() if type(value) is dict else value
    is_inner = type(value) in (dict, tuple, list)
    return (type(value) is dict and len(value) > 1) or (is_inner and any(map(_has_keys, items)))


def with_keys_reversed(call: Arguments) -> Arguments:
    """Return the same call, with the keys of all dicts in the opposite order."""
    return replace(call, args=_reversed(call.args), kwargs=_reversed(call.kwargs))


def _reversed(value: Any) -> Any:
    if type(value) is dict:
        return {key: _reversed(value[key]) for key in reversed(value)}
    return type(value)(map(_reversed, value)) if type(value) in (tuple, list) else value


def _ordered_like(value: Any, planned: Any) -> Any:
    """Return `value` with the keys of its dicts in the order of those of `planned`."""
    if type(value) is not type(planned):
        return value
    if type(value) is dict and value.keys() == planned.keys():
        return {key: _ordered_like(value[key], planned[key]) for key in planned}
    if type(value) in (tuple, list) and len(value) == len(planned):
        return type(value)(map(_ordered_like, value, planned))
    return value


def _difference(value: Any, planned: Any) -> str:
    """Return in words how the structure of two pairs of arguments and keywords differs."""
    own, wanted = _leaf_paths(value), _leaf_paths(planned)
    missing = [path for path in wanted if path not in own]
    new = [path for path in own if path not in wanted]
    parts = [f"it lacks {', '.join(missing)}"] * bool(missing)
    parts += [f"it has {', '.join(new)} as well"] * bool(new)
    return (
        " and ".join(parts)
        or _other_type(value, planned)
        or "its keys are in another order, by which the forward goes"
    )


def _other_type(value: Any, planned: Any) -> str:
    """Return which container in a structure is of another type, "" if none is."""
    are_containers = isinstance(value, (dict, list, tuple)) and isinstance(
        planned, (dict, list, tuple)
    )
    if are_containers and type(value) is not type(planned):
        return f"it has {_kind(value)} in place of {_kind(planned)}"
    pairs: Iterable[tuple[Any, Any]] = ()
    if are_containers and isinstance(value, dict):
        pairs = ((value[key], planned[key]) for key in value)
    elif are_containers:
        pairs = zip(value, planned, strict=True)
    return next(filter(None, (_other_type(*pair) for pair in pairs)), "")


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _leaf_paths(call: Any) -> list[str]:
    """Return where the leaves of a pair of arguments and keywords are: "keyword['mask'][0]"."""
    args, kwargs = call
    return [
        f"{kind}{pytree.keystr(path)}"
        for kind, values in (("argument", args), ("keyword", kwargs))
        for path, _ in leaves_with_paths(values, is_size)
    ]
