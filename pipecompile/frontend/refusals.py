"""Why a forward could not be recorded, where another way of capturing it may still succeed."""

from __future__ import annotations

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipecompile.errors import CaptureError

__all__ = ["DataDependentError", "UnsupportedError", "asks_data"]


class UnsupportedError(CaptureError):
    """This way of recording cannot express the forward. Every other CaptureError is a refusal, whatever the way."""


class DataDependentError(UnsupportedError):
    """The forward asks for the values of a tensor, which fake tensors do not have."""


def asks_data(error: BaseException) -> bool:
    """Whether torch raised `error` since only data could have answered."""
    kinds = (
        DataDependentError,
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )
    return isinstance(error, kinds) or "data-dependent" in str(error).lower()
