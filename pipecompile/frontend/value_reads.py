"""What a forward reads out of tensors as numbers, which the graph then has in it.

    float(self.scale)          a tensor with values: the graph holds as long as it keeps them
    positions.max().item()     a tensor without values that sizes alone make, or the inputs: it is
                               computed from these

The recorder asks before it runs a call of `VALUE_READS`; what has no answer depends on data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import sympy
import torch
import torch.distributions.distribution
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.frontend.call_refusals import refuse_conversion, refuse_data
from pipecompile.frontend.constant_answers import ConstantAnswer, certain_outcome
from pipecompile.frontend.guards import ValueRead
from pipecompile.frontend.packages import package_of
from pipecompile.frontend.recording import Recording
from pipecompile.frontend.refusals import DataDependentError
from pipecompile.graph.data_answers import is_data_dependent

__all__ = [
    "CONVERSIONS",
    "OUTSIDE",
    "VALUE_READS",
    "ValueReads",
    "is_asked_by_distribution",
    "refuse_reads",
]

VALUE_READS = frozenset(
    {"item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__complex__"}
)
"""Methods that make numbers of a tensor's values."""
CONVERSIONS = VALUE_READS | {"numpy", "__array__", "__repr__", "__format__", "untyped_storage"}
"""Methods that fail on fake tensors, and hardly ever on others."""


OUTSIDE = "a parameter or a value of a distribution is outside of what the distribution allows"
"""Says what is wrong where `torch.distributions` would raise a ValueError."""


def is_asked_by_distribution() -> bool:
    """Return whether a distribution of torch asks now whether its parameters, or a value, are
    allowed: `if not valid: raise`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and package_of(frame.f_globals.get("__name__")) == package_of(__name__):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name not in ("__init__", "_validate_sample"):
        return False
    return frame.f_globals.get("__name__") == torch.distributions.distribution.__name__


class ValueReads:
    """What was read in one `recording`: `of_values` out of tensors that have values, and
    `constants` out of what sizes alone make, or where it `reads_inputs` the inputs.

    `sizes` are those of the sample, by symbol, and `inputs` its tensors, by name.
    """

    def __init__(self, recording: Recording, *, reads_inputs: bool) -> None:
        self.sizes: dict[sympy.Symbol, sympy.Integer] = {}
        self.inputs: dict[str, Tensor] = {}
        self.of_values: list[ValueRead] = []
        # Once for each question: every layer may ask the same.
        self.constants: dict[tuple[str, Any], ConstantAnswer] = {}
        self._recording = recording
        self._reads_inputs = reads_inputs

    def answer(self, func: Any, tensor: Tensor) -> Any:
        """Return what a call reads out of a tensor that has values, was computed from sizes alone,
        where it may be from inputs, or is the same for every draw; None for other tensors.
        """
        if not isinstance(tensor, FakeTensor):
            return self._read(func, tensor)
        node = self._recording.node_of(tensor)
        if node is None:
            return None
        if func in (Tensor.__bool__, Tensor.item):
            outcome = certain_outcome(node)
            if outcome is not None:
                return outcome
        inputs = self.inputs if self._reads_inputs else {}
        constant = ConstantAnswer.of(node, func, self.sizes, self._recording.where(), inputs)
        if constant is None:
            return None
        self.constants.setdefault((str(constant.graph), func), constant)
        return constant.answer

    def _read(self, func: Any, tensor: Tensor) -> Any:
        """Make numbers of a tensor with values: the graph holds as long as it keeps these."""
        with unset_fake_temporarily():
            read = ValueRead(tensor, tensor.detach().clone(), self._recording.where())
            self.of_values.append(read)
            return func(tensor)


@contextmanager
def refuse_reads(recording: Recording) -> Iterator[None]:
    """Raise DataDependentError where a module that is one node asks for data in the block.

    It is raised at once. Of a fake tensor `item` returns a symbol, with which the module or a hook
    would go on, and which the fake runs of the graph do not know.
    """
    refusals: list[DataDependentError] = []
    with _RefusedConversions(recording, refusals), _RefusedReads(recording, refusals):
        yield
    # The module may have caught it, and would go on in a way that it does not outside.
    if refusals:
        raise refusals[0]


class _RefusedReads(TorchDispatchMode):
    """A mode that adds to `refusals`, and raises, where an operator asks for data."""

    def __init__(self, recording: Recording, refusals: list[DataDependentError]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._refusals = recording, refusals

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_data_dependent(func):
            try:
                refuse_data(self._recording, result, func.__name__.partition(".")[0])
            except DataDependentError as refusal:
                self._refusals.append(refusal)
                raise
        return result


class _RefusedConversions(TorchFunctionMode):
    """A mode that adds to `refusals`, and raises, where a fake tensor becomes an array or text."""

    def __init__(self, recording: Recording, refusals: list[DataDependentError]) -> None:
        super().__init__()
        self._recording, self._refusals = recording, refusals

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            refuse_conversion(self._recording, func, args)
        except DataDependentError as refusal:
            self._refusals.append(refusal)
            raise
        return func(*args, **(kwargs or {}))
