"""A capture for several lengths: sizes besides that of the batch are symbols too.

A pipeline may be given further shapes, such as sequences of 512, 1,024 and 2,048 tokens. Where the
forward does the same for all of them, it is recorded once, and gets its numbers for each:

    x.view(s0, s1, 8, 64)     at 512 tokens     x.view(s0, 512, 8, 64)

Branches on lengths are guards; a shape that takes another one is captured by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
from torch import Tensor

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture_with_lengths
from pipecompile.frontend.captured_graph import Capture, substituted
from pipecompile.frontend.recording_methods import METHODS
from pipecompile.frontend.signature import Arguments, InputStructure

__all__ = ["OpenCapture"]

logger = logging.getLogger("pipecompile.frontend")

_METHOD = f"{METHODS[0].name} with open lengths"
Lengths = tuple[frozenset[int], ...]
"""The dimensions of each input in which its size is open, besides the batch."""


@dataclass(frozen=True)
class OpenCapture:
    """A capture whose graph has symbols for lengths. `places` are where inputs have them: the
    number of the input, its dimension and the symbol.
    """

    capture: Capture
    places: tuple[tuple[int, int, sympy.Symbol], ...]

    @staticmethod
    def of(
        planned: Capture, sample: Arguments, others: Sequence[Arguments], leaf: Sequence[str]
    ) -> OpenCapture | None:
        """Return a capture for the lengths of the microbatch `sample` and of `others`; None if the
        forward cannot be recorded so, or not faster than for each. `planned` is the capture for the
        sample alone.
        """
        # A recording with symbols takes as long as two without.
        if planned.method != METHODS[0].name or len(others) < 2:
            return None
        calls = [sample, *others]
        tensors = [planned.inputs.flatten(call) for call in calls]
        if any(len({tensor.dim() for tensor in same}) > 1 for same in zip(*tensors, strict=True)):
            return None
        lengths = _open_lengths(planned.inputs, tensors)
        recorded = _distinct_lengths(planned.inputs, tensors, lengths)
        if recorded is None or any(map(_vary_apart, tensors[recorded], lengths)):
            return None
        try:
            capture = capture_with_lengths(planned.model, calls[recorded], leaf, lengths)
        except CaptureError as error:
            logger.info("each shape is captured by itself: %s", error)
            return None
        # In which dimension outputs have the batch is known where nothing else is open.
        capture = replace(capture, outputs=planned.outputs, method=_METHOD)
        return OpenCapture(capture, tuple(_places(capture, lengths)))

    def at(self, call: Arguments) -> Capture | None:
        """Return the capture for the lengths of `call`, and for any batch size; None if it does not
        hold for them.
        """
        capture, tensors = self.capture, self.capture.inputs.flatten(call)
        sizes: dict[sympy.Symbol, sympy.Integer] = {}
        for index, dim, symbol in self.places:
            size = sympy.Integer(tensors[index].shape[dim])
            # What was equal where it was recorded has one symbol.
            if sizes.setdefault(symbol, size) != size:
                return None
        guards = capture.guards.with_lengths(sizes)
        if guards is None:
            return None
        answers = [
            replace(answer, graph=substituted(answer.graph, sizes))
            for answer in capture.constant_answers
        ]
        batch = {} if guards.symbol is None else {guards.symbol: sympy.Integer(guards.batch)}
        if not all(answer.holds(batch, {}) for answer in answers if not answer.inputs):
            return None
        graph = substituted(capture.graph, sizes)
        placed = replace(capture, graph=graph, guards=guards, constant_answers=tuple(answers))
        return placed if placed.holds_for(call) else None


def _open_lengths(inputs: InputStructure, calls: Sequence[Sequence[Tensor]]) -> Lengths:
    """Return the dimensions, besides the batch, in which the inputs of some calls differ."""
    return tuple(
        frozenset(
            dim
            for dim, sizes in enumerate(zip(*(tensor.shape for tensor in same), strict=True))
            if dim != batch and len(set(sizes)) > 1
        )
        for same, batch in zip(zip(*calls, strict=True), inputs.batch_dims, strict=True)
    )


def _distinct_lengths(
    inputs: InputStructure, calls: Sequence[Sequence[Tensor]], lengths: Lengths
) -> int | None:
    """Return the first call in which sizes are equal only where they are in all calls, since
    symbols are shared by their sizes; None if there is none.
    """
    places = [(i, dim) for i, dims in enumerate(lengths) for dim in dims]
    rows = [
        [*(tensors[i].shape[dim] for i, dim in places), inputs.batch_size(tensors)]
        for tensors in calls
    ]
    groups = len(set(zip(*rows, strict=True)))
    # torch takes sizes of 0 and 1 as numbers: of a batch of 1 the capture is for that alone.
    found = [n for n, row in enumerate(rows) if len(set(row)) == groups and min(row[:-1]) > 1]
    return min(found, key=lambda n: rows[n][-1] == 1, default=None)


def _vary_apart(tensor: Tensor, dims: frozenset[int]) -> bool:
    """Return whether two open sizes of an input have symbols of their own, as height and width of
    images: with products of both torch takes up to 25 times as long as with numbers.
    """
    return len({tensor.shape[dim] for dim in dims}) > 1


def _places(capture: Capture, lengths: Lengths) -> list[tuple[int, int, sympy.Symbol]]:
    values = [node.meta["val"] for node in capture.graph.nodes if node.op == "placeholder"]
    return [
        (index, dim, values[index].shape[dim].node.expr)
        for index, dims in enumerate(lengths)
        for dim in sorted(dims)
    ]
