"""Guards: what a recording assumed about the batch size, and whether another size meets it.

The batch size is a symbol while a forward is recorded. Each branch that the forward takes on it
becomes a guard, for example `Ge(s0, 4)` at model.py:17. Lengths may be symbols too, see
open_capture.py; a recording has numbers for them before it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.source import HIDDEN

__all__ = ["Guards", "ValueRead", "fake_input", "symbols_in"]


@dataclass(frozen=True)
class Guards:
    """The batch size of a recording, its symbol, and the assumptions about it with their lines.

    Without a symbol the recording holds for this batch size only.
    """

    batch: int
    symbol: sympy.Symbol | None
    assumptions: tuple[tuple[sympy.Basic, str], ...] = ()

    @staticmethod
    def of(
        batch: int,
        symbol: sympy.Symbol | None,
        environment: ShapeEnv,
        lengths: Collection[sympy.Symbol] = (),
    ) -> Guards:
        """Return what `environment` noted about the symbols of the batch and of lengths while the
        forward ran. UnsupportedError if the forward made a number of a length.
        """
        replaced = environment.replacements
        if lengths and any(each in replaced for each in (*lengths, symbol)):
            raise UnsupportedError("the forward makes a number of a length, or of the batch size")
        if symbol is None and not lengths:
            return Guards(batch, None)
        if symbol is not None and isinstance(replaced.get(symbol), sympy.Integer):
            equals = (sympy.Eq(symbol, batch), "the forward makes a number of it")
            return Guards(batch, symbol, (equals,))
        branches = [(guard.expr, _guard_line(guard.sloc)) for guard in environment.guards]
        ranges = [
            (sympy.Ge(symbol, interval.lower), "torch treats batches of 0 and 1 apart")
            for symbol, interval in environment.var_to_range.items()
        ]
        own = {*lengths, *([] if symbol is None else [symbol])}
        # Assumptions about data have symbols of their own; they do not restrict the batch size.
        assumptions = tuple(
            assumption for assumption in (*branches, *ranges) if assumption[0].free_symbols <= own
        )
        return Guards(batch, symbol, assumptions)

    def with_lengths(self, lengths: Mapping[sympy.Symbol, sympy.Integer]) -> Guards | None:
        """Return the guards for these lengths; None if the recording does not hold for them."""
        placed = [(e.xreplace(dict(lengths)), line) for e, line in self.assumptions]
        if any(expression == sympy.false for expression, _ in placed):
            return None
        return replace(self, assumptions=tuple(p for p in placed if p[0] != sympy.true))

    @property
    def is_fixed(self) -> bool:
        """Whether the recording holds for one batch size only."""
        return self.symbol is None or any(
            isinstance(expression, sympy.Eq) for expression, _ in self.assumptions
        )

    def violation(self, batch: int) -> str | None:
        """Return why the recording does not hold at this batch size, None if it does."""
        if self.symbol is None:
            return None if batch == self.batch else f"it is for batches of {self.batch} only"
        for expression, line in self.assumptions:
            # A relation between numbers is sympy's `true` or `false`.
            if expression.xreplace({self.symbol: sympy.Integer(batch)}) != sympy.true:
                return f"{expression} does not hold ({line})"
        return None


@dataclass(frozen=True)
class ValueRead:
    """A tensor that is no input, parameter or buffer, its values when the forward made numbers of
    them, or a function with a cache its result, and where that was.
    """

    tensor: Tensor
    values: Tensor
    where: str
    is_cached: bool = False

    @property
    def holds(self) -> bool:
        """Whether the values are the same now."""
        return torch.equal(self.tensor, self.values)

    @property
    def change(self) -> str:
        """What it means that the values are others, and what to do."""
        changed = "a tensor that has changed since the model was compiled"
        if self.is_cached:
            return (
                f"{self.where} has a cache (functools.lru_cache) and reads {changed}: the model "
                "keeps the first result, and the graph would compute it anew; empty the cache and "
                "compile the model again, or leave the cache out"
            )
        return (
            f"{self.where} makes a number of {changed}, and the graph has the old number; compile "
            "the model again, or compute with the tensor itself"
        )


def fake_input(
    tensor: Tensor, mode: FakeTensorMode, name: str, open_dims: Collection[int]
) -> Tensor:
    """Return a fake of the input `name`, whose sizes in `open_dims` are symbols."""
    if not open_dims:
        return mode.from_tensor(tensor, static_shapes=True)
    if tensor._is_view():
        # The fake of a view is a view of a fake base, which would have symbols of its own.
        tensor = tensor.clone()
    # DUCK: equal sizes share a symbol, so all inputs have the same batch size.
    is_open = [dim in open_dims for dim in range(tensor.dim())]
    sizes = [DimDynamic.DUCK if each else DimDynamic.STATIC for each in is_open]
    # The symbol is named after the source. Without one torch counts the fakes that are alive, which
    # are not the same in two recordings, whose values are compared as text.
    return mode.from_tensor(
        tensor,
        source=ConstantSource(name),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes),
    )


def symbols_in(
    fakes: Sequence[Tensor], open_dims: Sequence[Collection[int]]
) -> dict[sympy.Symbol, int]:
    """Return the symbols in these dimensions of inputs, with the sizes that the sample has there;
    none for sizes of 0 and 1, which torch takes as numbers.
    """
    pairs = zip(fakes, open_dims, strict=True)
    sizes: list[int | torch.SymInt] = [fake.shape[dim] for fake, dims in pairs for dim in dims]
    return {size.node.expr: size.node.hint for size in sizes if isinstance(size, torch.SymInt)}


def _guard_line(location: Any) -> str:
    """Return the user's line from which a guard comes."""
    stack = getattr(location, "user_stack", None)
    frames = [frame for frame in stack or () if not frame.filename.startswith(HIDDEN)]
    if not frames:
        return str(location).split("\n")[0]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
