"""What a forward or a backward of a stage raises, in words.

A batch may hold what the sample did not: indices beyond a table, values that the model asserts
against. And several microbatches are in flight: a forward that branches on data may write to what
the backward of an earlier one needs, although it did not on the sample that the model was proven
by. Autograd says the shape and the version of what it finds overwritten, and this says its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError, PipecompileError
from pipecompile.graph.model_state import named_state

__all__ = ["ExplainedBackward", "failure_of_forward"]

# "modified by an inplace operation: [torch.FloatTensor [8, 6]] is at version 3; expected …"
OVERWRITTEN = re.compile(
    r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* version (\d+);"
)


def failure_of_forward(error: Exception, inputs: Sequence[Tensor]) -> str:
    """Return in a line what a forward of a stage raised for its `inputs`."""
    given = ", ".join(f"{value.dtype}{list(value.shape)}" for value in inputs)
    return (
        f"the forward of a microbatch raised {_text(error)}; the stage was given {given}: look for "
        "values in the batch that the model does not take"
    )


class ExplainedBackward:
    """A context for the backwards of a stage, which raises InputError for what they raise.

    If a backward needs a tensor that was written to, the error has the name of the parameter or
    buffer of the stage's `module` that it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        """Enter the block, which may be entered again and again."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise InputError instead of `error`."""
        is_own = isinstance(error, (PipecompileError, torch.OutOfMemoryError))
        if isinstance(error, Exception) and not is_own:
            raise InputError(self._failure(error)) from error

    def _failure(self, error: Exception) -> str:
        found = OVERWRITTEN.search(str(error))
        if found is None:
            return f"the backward of a microbatch raised {_text(error)}"
        sizes, version = found.groups()
        elements = prod(int(size) for size in sizes.split(",") if size.strip())
        # By the number of elements: a layer saves a view of its weight, whose version is the same,
        # and whose shape may be another one.
        names = [
            name
            for name, tensor in named_state(self._module)
            if (tensor.numel(), tensor._version) == (elements, int(version))
        ]
        what = " or ".join(dict.fromkeys(names)) or f"a tensor of shape [{sizes}]"
        who = "the forward" if names else "the forward, or a loss that writes to its target,"
        return (
            f"{who} has written in place to {what} after that was used, and the backward of "
            "an earlier microbatch, or its own, needs it as it was; compute with a copy of it "
            "(clone), or write to it between steps"
        )


def _text(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
