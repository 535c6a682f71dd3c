"""Refusals of one way of capturing, after which the next way may still succeed."""

from __future__ import annotations

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipecompile.errors import CaptureError

__all__ = ["INTO_A_SUBMODULE", "DataDependentError", "UnsupportedError", "is_data_dependence_error"]

INTO_A_SUBMODULE = (
    "put all that depends on it into a submodule whose results have fixed shapes: that is one node "
    "then, where the model has weights"
)


class UnsupportedError(CaptureError):
    """This way of capturing cannot express the forward.

    Every other CaptureError refuses the model, whatever the way.
    """


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
