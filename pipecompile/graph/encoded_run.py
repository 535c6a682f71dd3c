"""Runs of a stage's nodes whose saved tensors are encoded between forward and backward.

Code generation puts an `EncodedRun` into the graph of a stage in the place of the nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.recomputed_region import run_body
from pipecompile.graph.saved_tensors import EncodedStorages, encode_saved_tensors
from pipecompile.ir.encodings import Encoding

__all__ = ["EncodedRun"]


class EncodedRun:
    """A function that calls the body of a run of nodes and encodes what it saves.

    `storages` are the encoded storages of the whole stage. `exempt` are the positions of arguments
    that stay in memory anyway: parameters, buffers and inputs of the stage, and views of them. The
    state of modules is always exempt.
    """

    def __init__(
        self,
        name: str,
        body: fx.GraphModule,
        *,
        encodings: tuple[Encoding, ...],
        storages: EncodedStorages,
        exempt: Collection[int],
    ) -> None:
        self.__name__ = name  # fx names the node and the global of its code by it
        self.body = body
        self.encodings = encodings
        self.storages = storages
        self.exempt = frozenset(exempt)

    def __call__(self, *values: Any) -> Any:
        """Return the tuple that the body returns."""
        if not torch.is_grad_enabled():
            return run_body(self.body, values)
        exempt = self._exempt_tensors(values)
        with encode_saved_tensors(
            *self.encodings, storages=self.storages, exempt=exempt
        ) as note_results:
            return note_results(run_body(self.body, values))

    def _exempt_tensors(self, values: Sequence[Any]) -> Iterator[Tensor]:
        for position, value in enumerate(values):
            if isinstance(value, nn.Module):
                yield from (*value.parameters(), *value.buffers())
            elif position in self.exempt:
                yield from tensor_leaves(value)
