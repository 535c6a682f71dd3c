"""Side effects of operators: the random numbers that they draw and the tensors that they write to.

`propagate` and the frontend's recorder run operators under a `SideEffectTracker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.graph.model_state import has_values
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import storage_key

__all__ = ["SideEffectTracker", "versions_of_lists"]

RUNNING_STATISTICS = ("running_mean", "running_var")
NEW = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default)
"""What makes a fake of a tensor that the forward has just made of numbers."""
HALF_TYPES = (torch.bfloat16, torch.float16)


class SideEffectTracker(TorchDispatchMode):
    """A mode that sees every operator below autograd and notes its side effects.

    `is_random` tells whether an operator drew random numbers. `running_statistics` are the buffers
    that batch normalisation updated; it does so without raising their version counters, which show
    all other writes. `cast_parameters` are the trainable float32 parameters that were cast to a
    half type, by autocast or by a call. `writes_outside` tells whether an operator wrote to a
    tensor that has values, while all others of this forward are fake; a view of one is a fake too,
    in another storage than those of the model's `state`.

    On fake tensors the mode also corrects the strides of batch normalisation's results, and raises
    the versions of tensors that an operator on lists, as `_foreach_mul_`, writes to.
    """

    def __init__(self, state: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = set(map(storage_key, state))
        self.reset()

    def reset(self) -> None:
        """Forget all side effects that were seen so far."""
        self.is_random = False
        self.running_statistics: list[Tensor] = []
        self.cast_parameters: list[Tensor] = []
        self.writes_outside = False
        # Fakes that stand for views of tensors with values, by storage: they must live until
        # `reset`, since another storage may get the number of one that is gone.
        self._outside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Most of what is dispatched on fake tensors only asks for their device.
        if func is torch.ops.prim.device.default:
            return _device_of(args[0])
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Attention kernels carry the tag even if their dropout probability is 0.
            dropout = _arguments_by_name(func, args, kwargs).get("dropout_p")
            self.is_random = self.is_random or dropout != 0.0
        # Autocast casts between a call and its kernel: only here, below it, the cast is an
        # operator.
        if _is_cast_to_half(func, args, kwargs):
            self.cast_parameters.append(args[0])
        if func._schema.is_mutable and not self.writes_outside:
            self.writes_outside = any(map(self._is_outside, _written(func, args, kwargs)))
        with versions_of_lists(func, args, kwargs):
            result = func(*args, **kwargs)
        if func.is_view and func not in NEW and has_values(args[0]):
            views = {storage_key(each): each for each in tensor_leaves(result)}
            self._outside |= {key: each for key, each in views.items() if key not in self._own}
        if _is_batch_norm(func):
            self.running_statistics.extend(
                _updated_statistics(_arguments_by_name(func, args, kwargs))
            )
            # Only the result is corrected; saved statistics are one-dimensional.
            if isinstance(result, tuple):
                return (_with_cpu_strides(result[0], args[0]), *result[1:])
        return result

    def _is_outside(self, tensor: Tensor) -> bool:
        return has_values(tensor) or storage_key(tensor) in self._outside


def _device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor, of a fake one as its own handler does, without a dispatch."""
    if not isinstance(tensor, FakeTensor):
        return tensor.device
    is_in_kernel = tensor.fake_mode.in_kernel_invocation
    return torch.device("meta") if is_in_kernel else tensor.fake_device


def _is_cast_to_half(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call casts a trainable float32 parameter to a half type."""
    if func is not torch.ops.aten._to_copy.default or kwargs.get("dtype") not in HALF_TYPES:
        return False
    source = args[0]
    return (
        isinstance(source, nn.Parameter) and source.requires_grad and source.dtype == torch.float32
    )


def _is_batch_norm(func: Any) -> bool:
    name = func.__name__
    return name.split(".")[0].endswith("batch_norm") or "batch_norm_legit" in name


def _arguments_by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name, defaults included."""
    schema = func._schema.arguments
    defaults = {
        argument.name: argument.default_value for argument in schema if argument.has_default_value()
    }
    positional = dict(zip((argument.name for argument in schema), args, strict=False))
    return {**defaults, **positional, **kwargs}


@contextmanager
def versions_of_lists(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> Iterator[None]:
    """Raise the versions of tensors in lists that the operator, which runs in the block, writes to.

    The kernels of `_foreach_mul_` and its kind do it themselves, their fakes do not.
    """
    written = [(tensor, tensor._version) for tensor in _written_lists(func, args, kwargs or {})]
    yield
    # Real kernels have raised theirs already.
    unnoted = [tensor for tensor, version in written if tensor._version == version]
    torch.autograd.graph.increment_version(unnoted)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call writes to, by the operator's schema."""
    given = _arguments_by_name(func, args, kwargs)
    for argument in func._schema.arguments:
        if argument.is_write:
            value = given.get(argument.name)
            values = value if isinstance(value, list | tuple) else (value,)
            yield from (each for each in values if isinstance(each, Tensor))


def _written_lists(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors in lists that a call writes to, by the operator's schema."""
    if not func._schema.is_mutable:
        return []
    lists = [
        argument.name
        for argument in func._schema.arguments
        if argument.is_write and isinstance(argument.type, torch.ListType)
    ]
    given = _arguments_by_name(func, args, kwargs) if lists else {}
    return [tensor for name in lists for tensor in given[name]]


def _with_cpu_strides(result: Tensor, source: Tensor) -> Tensor:
    """Return a fake result of batch normalisation with the strides that the CPU kernel gives it.

    Torch's own fake has the strides of the input `source`, which may have gaps.
    """
    if not isinstance(result, FakeTensor) or result.device.type != "cpu":
        return result
    expected = torch.empty_like(result, memory_format=suggest_memory_format(source))
    return result if expected.stride() == result.stride() else expected


def _updated_statistics(arguments: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the running statistics that batch normalisation writes to: in training only."""
    if arguments.get("training", arguments.get("train", False)):
        for name in RUNNING_STATISTICS:
            if isinstance(arguments.get(name), Tensor):
                yield arguments[name]
