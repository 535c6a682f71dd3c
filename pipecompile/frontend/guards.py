"""What a recording assumed of the batch size, and whether another one meets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pipecompile.frontend.source import HIDDEN

__all__ = ["Guards", "faked", "symbol_of"]


@dataclass(frozen=True)
class Guards:
    """The batch at which a forward was recorded, its symbol, and what was assumed of it, each with its place.

    Without a symbol the recording is for that batch alone.
    """

    batch: int
    symbol: sympy.Symbol | None
    assumed: tuple[tuple[sympy.Basic, str], ...] = ()

    @staticmethod
    def of(batch: int, symbol: sympy.Symbol | None, environment: ShapeEnv) -> Guards:
        """What `environment` noted of the batch's symbol while the forward ran."""
        if symbol is None:
            return Guards(batch, None)
        fixed = environment.replacements.get(symbol)
        if isinstance(fixed, sympy.Integer):
            return Guards(
                batch, symbol, ((sympy.Eq(symbol, batch), "the forward makes a number of it"),)
            )
        branches = [(guard.expr, _place(guard.sloc)) for guard in environment.guards]
        ranges = [
            (sympy.Ge(symbol, interval.lower), "torch treats batches of 0 and 1 apart")
            for symbol, interval in environment.var_to_range.items()
        ]
        # What is assumed of data is no matter of the batch: data's own symbols are in it.
        return Guards(
            batch,
            symbol,
            tuple(each for each in (*branches, *ranges) if each[0].free_symbols <= {symbol}),
        )

    @property
    def fixed(self) -> bool:
        """Whether the recording is for one batch size only."""
        return self.symbol is None or any(
            isinstance(expression, sympy.Eq) for expression, _ in self.assumed
        )

    def broken(self, batch: int) -> str | None:
        """Why the recording does not hold at this batch size; None if it does."""
        if self.symbol is None:
            return None if batch == self.batch else f"it is for batches of {self.batch} alone"
        for expression, place in self.assumed:
            if expression.xreplace({self.symbol: sympy.Integer(batch)}) != sympy.true:
                return f"{expression} does not hold ({place})"
        return None


def faked(tensor: Tensor, mode: FakeTensorMode, *, symbolic: bool) -> Tensor:
    """A fake of `tensor`; if `symbolic`, its dimension 0 is the symbol of the batch."""
    if not symbolic or not tensor.dim():
        return mode.from_tensor(tensor, static_shapes=True)
    if (
        tensor._is_view()
    ):  # the fake of a view is a view of a fake, which would bring its own symbols
        tensor = tensor.clone()
    sizes = [DimDynamic.DUCK] + [DimDynamic.STATIC] * (tensor.dim() - 1)
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def symbol_of(fakes: Sequence[Tensor]) -> sympy.Symbol | None:
    """The symbol of the batch; None for fakes of fixed sizes, as for batches of 0 and 1."""
    for fake in fakes:
        size = fake.shape[0] if fake.dim() else 0
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            return size.node.expr
    return None


def _place(location: Any) -> str:
    """Where a guard comes from, in the user's code."""
    user = getattr(location, "user_stack", None)
    frames = [f for f in user or () if not f.filename.startswith(HIDDEN)]
    return (
        f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        if frames
        else str(location).split("\n")[0]
    )
