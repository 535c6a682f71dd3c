"""Do all ranks begin the same step? Compared before its first message."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import fingerprint
from pipecompile.runtime.agreement import check_agreement
from pipecompile.runtime.place import RankPlace
from pipecompile.runtime.rank_step import Minibatch
from pipecompile.runtime.watch import Deadline
from pipecompile.training.program import Program

__all__ = ["StepAgreement"]


class StepAgreement:
    """Compares what ranks are about to do, in the first step of each kind.

    With `several_shapes` it compares their shapes in every step: loaders that sort into buckets on
    each rank may give ranks batches of different shapes, which are all known.
    """

    def __init__(self, plan: Plan, place: RankPlace, *, several_shapes: bool) -> None:
        self._plan = plan
        self._place = place
        self._several_shapes = several_shapes
        self._agreed: set[tuple[Any, ...]] = set()

    def check_step(self, program: Program, minibatch: Minibatch, deadline: Deadline) -> None:
        """InputError unless all ranks begin the same step, and replicas one of the same shapes."""
        if not self._place.is_distributed:
            return
        self.check_shapes(minibatch, deadline)
        shapes = _shapes_of(minibatch)
        if self._several_shapes and self._place.replica_group is not None:
            # Else gradients of replicas would be divided by different numbers.
            check_agreement(shapes, self._place.replica_group, deadline, "replica")
        kind = (*shapes.values(), program.modes)
        if kind in self._agreed:
            return
        said = {
            "the plan": self._plan_digest,
            **shapes,
            "the set of modules in train mode": sorted(program.modes),
            "the number of the step": minibatch.step,
            "the seed": minibatch.seed,
        }
        check_agreement(said, self._place.pipeline_group, deadline)
        self._agreed.add(kind)

    def check_shapes(self, minibatch: Minibatch, deadline: Deadline) -> None:
        """InputError unless all ranks of the pipeline have microbatches of the same shapes."""
        if self._several_shapes and self._place.is_distributed:
            check_agreement(_shapes_of(minibatch), self._place.pipeline_group, deadline)

    @cached_property
    def _plan_digest(self) -> str:
        return fingerprint(self._plan)[:12]


def _shapes_of(minibatch: Minibatch) -> dict[str, Any]:
    inputs = minibatch.inputs
    return {
        "the number of microbatches": len(inputs),
        "the input of a microbatch": _described(inputs[0]),
        "the input of the last microbatch": _described(inputs[-1]),
    }


def _described(tensors: Sequence[Tensor]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
