"""What optimizers hold: state that stays from step to step, and scratch while they step.

As `torch.optim` keeps it: state in the type of the parameter, and a float32 counter of steps for each. Held against
real optimizers by tests/ir/test_optimizer.py. With master weights the optimizer works on float32 copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from pipecompile.errors import InputError
from pipecompile.ir.graph import Parameter

__all__ = ["OPTIMIZERS", "optimizer_bytes"]

Elements = Callable[[tuple[int, ...]], int]
FLOAT32_BYTES = 4
COUNTER_BYTES = 4


@dataclass(frozen=True)
class _Optimizer:
    """State elements of a parameter by its shape; scratch in copies of the largest parameter, or of all of them.

    Steps go parameter by parameter on a CPU, and over lists of all parameters (`foreach`) on a GPU.
    """

    elements: Elements
    counts: bool
    scratch_largest: int
    scratch_all: int


def _times(copies: int) -> Elements:
    return lambda shape: copies * prod(shape)


def _factored(shape: tuple[int, ...]) -> int:
    """Adafactor's row and column means (Shazeer and Stern 2018, section 3); of vectors the whole."""
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


OPTIMIZERS: Mapping[str, _Optimizer] = {
    "sgd": _Optimizer(_times(0), counts=False, scratch_largest=0, scratch_all=0),
    "momentum": _Optimizer(_times(1), counts=False, scratch_largest=0, scratch_all=0),
    "rmsprop": _Optimizer(_times(1), counts=True, scratch_largest=1, scratch_all=1),
    "adam": _Optimizer(_times(2), counts=True, scratch_largest=2, scratch_all=1),
    "adamw": _Optimizer(_times(2), counts=True, scratch_largest=2, scratch_all=1),
    "adafactor": _Optimizer(_factored, counts=True, scratch_largest=1, scratch_all=1),
}


def optimizer_bytes(
    parameters: Iterable[Parameter], name: str | None, *, master_weights: bool, lists: bool
) -> tuple[tuple[int, ...], int]:
    """The storages of state that `name` holds for trainable `parameters`, and its scratch during a step, in bytes.

    Nothing for None. `lists` says that it steps over all parameters at once. InputError if it is not known.
    """
    if name is None:
        return (), 0
    if name not in OPTIMIZERS:
        raise InputError(f"optimizer={name!r} is not known; choose one of {', '.join(OPTIMIZERS)}")
    optimizer = OPTIMIZERS[name]
    state: list[int] = []
    worked_on: list[int] = []
    for parameter in parameters:
        elements = prod(parameter.shape) if parameter.shape is not None else parameter.bytes // FLOAT32_BYTES
        shape = parameter.shape if parameter.shape is not None else (elements,)
        copied = master_weights and parameter.bytes < elements * FLOAT32_BYTES
        size = FLOAT32_BYTES if copied else parameter.bytes // max(elements, 1)
        state += [elements * FLOAT32_BYTES] * copied
        state += [optimizer.elements(shape) * size] + [COUNTER_BYTES] * optimizer.counts
        # The gradient is brought to the type of the copy.
        worked_on.append(elements * size * (1 + copied))
    scratch = optimizer.scratch_all * sum(worked_on) if lists else optimizer.scratch_largest * max(worked_on, default=0)
    return tuple(size for size in state if size), scratch
