"""Reads a user's batch: checks it against the plan, and cuts it into microbatches."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipecompile.errors import InputError
from pipecompile.frontend.microbatch import MicrobatchSizes
from pipecompile.frontend.signature import arguments_of, call_of
from pipecompile.graph.pytrees import register_dataclasses
from pipecompile.ir.plan import Plan
from pipecompile.training.program import Program
from pipecompile.training.runner import Runner

__all__ = ["BatchReader"]

Rows = list[list[Tensor]]
"""The input tensors of each microbatch."""


class BatchReader:
    """Reads batches for the first stage, and targets for the last one, where these run."""

    def __init__(self, plan: Plan, planned: Program, runner: Runner) -> None:
        self._plan = plan
        self._planned = planned
        self._runner = runner

    def read(self, batch: Any) -> tuple[MicrobatchSizes, Rows]:
        """Return the sizes of the microbatches, and their input tensors.

        InputError if the batch differs from the planned one in more than the number of samples.
        """
        captured = self._planned.captured
        try:
            tensors = captured.inputs.flatten(call_of(batch))
        except InputError:
            arguments_of(captured.model, batch)  # says more of what the model does not take
            raise
        names = captured.inputs.tensor_names
        sizes = MicrobatchSizes.of(tensors, names, self._plan.microbatch_shapes)
        for name, tensor, planned in zip(names, tensors, self._planned.inputs, strict=True):
            if tensor.dtype != planned[1]:
                raise InputError(
                    f"{name} is of type {tensor.dtype}, but the plan was made for {planned[1]}"
                )
        return sizes, sizes.split([self._runner.at_stage(0, tensor) for tensor in tensors])

    def read_planned(self, batch: Any) -> tuple[MicrobatchSizes, Rows]:
        """Return what `read` does; InputError if there are more microbatches than planned."""
        sizes, rows = self.read(batch)
        if len(rows) > self._plan.microbatches:
            raise InputError(
                f"the batch holds {len(rows)} microbatches, but the plan was made for "
                f"{self._plan.microbatches}: memory and schedule would differ; give a smaller "
                "batch, or plan again with more microbatches"
            )
        return sizes, rows

    def targets(self, sizes: MicrobatchSizes, target: Any) -> list[Any]:
        """Return the target of each microbatch."""
        last = self._plan.k - 1
        register_dataclasses(target)
        return sizes.split(
            tree_map_only(Tensor, lambda value: self._runner.at_stage(last, value), target)
        )
