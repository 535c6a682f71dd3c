"""Runs of a stage's nodes whose saved tensors lie in another form between forward and backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from pipecompile.graph.recomputed_region import compute
from pipecompile.graph.saved_tensors import Shelf, saving
from pipecompile.ir.encodings import Policy

__all__ = ["Saved"]


class Saved:
    """Calls the body of a run of nodes, and keeps what it saves by `policies`, on the `shelf` of its stage.

    Like `Recomputed` it is a function that a graph calls. `spared` are the places of arguments that stay in memory
    anyway: parameters, buffers and inputs of the stage, and views of them. What is in modules always is.
    """

    def __init__(
        self,
        name: str,
        body: fx.GraphModule,
        *,
        policies: tuple[Policy, ...],
        shelf: Shelf,
        spared: Collection[int],
    ) -> None:
        self.__name__ = name  # fx names nodes and globals of its code by it
        self.body = body
        self.policies = policies
        self.shelf = shelf
        self.spared = frozenset(spared)

    def __call__(self, *values: Any) -> Any:
        """The tuple that the body returns."""
        if not torch.is_grad_enabled():
            return compute(self.body, values)
        with saving(*self.policies, shelf=self.shelf, spared=self._spared(values)) as ends:
            return ends(compute(self.body, values))

    def _spared(self, values: Sequence[Any]) -> Iterator[Tensor]:
        for place, value in enumerate(values):
            if isinstance(value, nn.Module):
                yield from (*value.parameters(), *value.buffers())
            elif place in self.spared:
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
