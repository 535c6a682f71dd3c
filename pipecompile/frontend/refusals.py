"""Refusals of one way of capturing, after which the next way may still succeed."""

from __future__ import annotations

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipecompile.errors import CaptureError

__all__ = [
    "COMPUTED_WITH",
    "INTO_A_SUBMODULE",
    "LOOKED_AT",
    "DataDependentError",
    "HigherOrderError",
    "UnsupportedError",
    "hook_refusal",
    "is_data_dependence_error",
    "number_read_refusal",
    "shape_refusal",
]

INTO_A_SUBMODULE = (
    "put all that depends on it into a submodule whose results have fixed shapes: that is one node "
    "then, where the model has weights"
)
COMPUTED_WITH = "keep as a tensor in a buffer that is written to in place"
LOOKED_AT = (
    "a count, a time or a log that nothing is computed with, keep in a forward hook of a module of "
    "torch.nn, in a list or dict that is no attribute of a module, or outside of the forward"
)
PAD = (
    "give the RNN the padded tensor and mask what it returns behind the end of each sequence: one "
    "on packed sequences has no shapes without its data"
)
PACKING = "_pack_padded_sequence"
CALLS = {
    "_local_scalar_dense": "item",
    "__getitem__": "indexing with a mask",
    "where": "torch.where of a condition alone",
    PACKING: "packing sequences",
}
"""Calls whose name is another one in the model than in torch."""


class UnsupportedError(CaptureError):
    """This way of capturing cannot express the forward.

    Every other CaptureError refuses the model, whatever the way.
    """


class HigherOrderError(UnsupportedError):
    """The forward calls an operator that is given functions, such as torch.cond."""


class DataDependentError(UnsupportedError):
    """The forward reads the values of a tensor, which fake tensors do not have."""


def is_data_dependence_error(error: BaseException) -> bool:
    """Return whether torch, or the recorder, raised `error` because values of data are needed."""
    kinds = (
        DataDependentError,
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )
    return isinstance(error, kinds) or "data-dependent" in str(error).lower()


def number_read_refusal(where: str, call: str) -> DataDependentError:
    """Return the refusal of a call at `where` that reads a number out of a tensor."""
    return DataDependentError(
        f"{where}: {CALLS.get(call, call)} reads a number out of a tensor, so the graph would "
        f"depend on the data; compute it outside the model, keep it a tensor, or {INTO_A_SUBMODULE}"
    )


def shape_refusal(where: str, call: str) -> DataDependentError:
    """Return the refusal of a call at `where` whose result has a shape that depends on values."""
    way = PAD if call == PACKING else f"use a mask of fixed shape, or {INTO_A_SUBMODULE}"
    return DataDependentError(
        f"{where}: {CALLS.get(call, call)} gives a tensor whose shape depends on the values of "
        f"another, so stages could not know what they receive; {way}"
    )


def hook_refusal(where: str, hook: str) -> DataDependentError:
    """Return the refusal of a forward hook that reads the values of a tensor at `where`."""
    return DataDependentError(
        f"{where}: the forward hook {hook} reads the values of a tensor, so the graph would depend "
        "on the data; a hook of a module inside the model may do so where the model has weights, "
        "as many in each call; let others keep the tensor (detach), and read it after the step"
    )
