"""What running an operation does besides returning: random numbers drawn, tensors written to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Watch"]

RUNNING = ("running_mean", "running_var")
HALVES = (torch.bfloat16, torch.float16)


class Watch(TorchDispatchMode):
    """Sees every operator below autograd.

    `random` tells whether one drew random numbers. `averages` are the running statistics that batch normalisation
    updated: it does so without a trace in the tensors' version counters, which show all other writes. What it gives
    back is laid out as on a real device. `casts` are the trainable parameters that were cast from float32, by autocast
    or by a call.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Forgets what was seen."""
        self.random = False
        self.averages: list[Tensor] = []
        self.casts: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Attention kernels carry the tag whatever their dropout is.
            self.random = self.random or _named(func, args, kwargs).get("dropout_p") != 0.0
        if (
            func is torch.ops.aten._to_copy.default
            and _is_weight(args[0])
            and kwargs.get("dtype") in HALVES
        ):
            self.casts.append(args[0])
        out = func(*args, **kwargs)
        if (
            func.__name__.split(".")[0].endswith("batch_norm")
            or "batch_norm_legit" in func.__name__
        ):
            self.averages.extend(_updated(_named(func, args, kwargs)))
            if isinstance(out, tuple):
                return (_laid_out(out[0], args[0]), *out[1:])
        return out


def _is_weight(tensor: Tensor) -> bool:
    return (
        isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor.dtype == torch.float32
    )


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults included."""
    schema = func._schema.arguments
    defaults = {
        argument.name: argument.default_value for argument in schema if argument.has_default_value()
    }
    return {
        **defaults,
        **dict(zip((argument.name for argument in schema), args, strict=False)),
        **kwargs,
    }


def _laid_out(result: Tensor, given: Tensor) -> Tensor:
    """A fake result of batch normalisation as the CPU's kernel lays it out; torch's fake is laid out as its input."""
    if not isinstance(result, FakeTensor) or result.device.type != "cpu":
        return result
    real = torch.empty_like(result, memory_format=suggest_memory_format(given))
    return result if real.stride() == result.stride() else real


def _updated(arguments: dict[str, Any]) -> Iterator[Tensor]:
    if arguments.get("training", arguments.get("train", False)):
        yield from (arguments[name] for name in RUNNING if isinstance(arguments.get(name), Tensor))
