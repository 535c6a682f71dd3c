"""What optimizers hold: state that stays from step to step, and workspace while they step.

It is counted as `torch.optim` holds it: state in the type of the parameter, and for each parameter
a float32 counter of steps. With master weights the optimizer works on float32 copies. SM3, which
torch does not have, counts as it was published, without momentum.
tests/memory_model/test_optimizer.py compares these counts with real optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from pipecompile.errors import unknown
from pipecompile.ir.graph import Parameter

__all__ = ["OPTIMIZERS", "optimizer_bytes"]

Elements = Callable[[tuple[int, ...]], int]
FLOAT32_BYTES = 4
COUNTER_BYTES = 4


@dataclass(frozen=True)
class _Optimizer:
    """Elements by a parameter's shape: of state, and of workspace in a step.

    On a CPU, steps go parameter by parameter (`workspace`); on a GPU, over lists of all parameters
    (`workspace_in_list`, torch's `foreach`; None where it cannot). `has_counter` says that each
    parameter has a counter of steps, `update_lingers` that the update of one parameter lives until
    the next one is made.
    """

    state: Elements
    has_counter: bool
    workspace: Elements
    workspace_in_list: Elements | None
    update_lingers: bool = False


def _times(copies: int) -> Elements:
    return lambda shape: copies * prod(shape)


def _factored(shape: tuple[int, ...]) -> int:
    """Return Adafactor's row and column means (Shazeer and Stern 2018, section 3).

    For a matrix of n rows and m columns, that is n + m elements instead of n · m; for a vector,
    all of it.
    """
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


def _unfactored(shape: tuple[int, ...]) -> int:
    """Return what Adafactor multiplies out of its means, with new means and one more over rows."""
    if len(shape) < 2:
        return 2 * prod(shape)
    return prod(shape) + _factored(shape) + prod(shape[:-2])


def _unfactored_in_list(shape: tuple[int, ...]) -> int:
    return prod(shape) + (prod(shape[:-2]) if len(shape) > 1 else 0)


def _accumulated(shape: tuple[int, ...]) -> int:
    """Return SM3's accumulators (Anil et al. 2019, section 4): one for each slice of a tensor along
    each dimension, so n + m for a matrix of n rows and m columns.
    """
    return sum(shape) if shape else 1


def _covered(shape: tuple[int, ...]) -> int:
    """Return SM3's estimates of the squares, with new accumulators of one dimension."""
    return prod(shape) + (max(shape) if len(shape) > 1 else 0)


OPTIMIZERS: Mapping[str, _Optimizer] = {
    "sgd": _Optimizer(_times(0), False, _times(0), _times(0)),
    "momentum": _Optimizer(_times(1), False, _times(0), _times(0)),
    "rmsprop": _Optimizer(_times(1), True, _times(1), _times(1), update_lingers=True),
    "adam": _Optimizer(_times(2), True, _times(2), _times(1), update_lingers=True),
    "adamw": _Optimizer(_times(2), True, _times(2), _times(1), update_lingers=True),
    "adafactor": _Optimizer(_factored, True, _unfactored, _unfactored_in_list, update_lingers=True),
    "sm3": _Optimizer(_accumulated, False, _covered, None),
}


def optimizer_bytes(
    parameters: Iterable[Parameter], name: str | None, *, master_weights: bool, lists: bool
) -> tuple[tuple[int, ...], int]:
    """Return the storages of state for trainable `parameters`, and a step's workspace, in bytes.

    `name` is the optimizer, None for none of it; InputError if it is not known. `lists` says that
    it steps over all parameters at once.
    """
    if name is None:
        return (), 0
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    optimizer = OPTIMIZERS[name]
    in_list = optimizer.workspace_in_list if lists else None
    state: list[int] = []
    workspace, updates = [0], [0]
    for parameter in parameters:
        # A parameter without a shape counts as a vector of float32.
        elements = (
            prod(parameter.shape)
            if parameter.shape is not None
            else parameter.bytes // FLOAT32_BYTES
        )
        shape = parameter.shape if parameter.shape is not None else (elements,)
        copied = master_weights and parameter.bytes < elements * FLOAT32_BYTES
        size = FLOAT32_BYTES if copied else parameter.bytes // max(elements, 1)
        state += [elements * FLOAT32_BYTES] * copied
        state += [optimizer.state(shape) * size] + [COUNTER_BYTES] * optimizer.has_counter
        # The gradient is brought to the type of the copy.
        working = in_list or optimizer.workspace
        workspace.append((working(shape) + elements * copied) * size)
        updates.append(elements * size * optimizer.update_lingers)
    # One parameter at a time: the update of the one before may live until this one's is made.
    one_by_one = max(now + before for now, before in zip(workspace, [0, *updates], strict=False))
    return tuple(size for size in state if size), sum(workspace) if in_list else one_by_one
