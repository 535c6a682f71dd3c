"""What ranks say of the step or evaluation that they begin, for the comparison with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import fingerprint
from pipecompile.runtime.agreement import Agreement
from pipecompile.runtime.place import RankPlace
from pipecompile.runtime.rank_step import Minibatch
from pipecompile.runtime.watch import StepWatch
from pipecompile.training.program import Program

__all__ = ["StepAgreement"]


class StepAgreement:
    """Compares what ranks are about to do, in each step and evaluation.

    What is new on this rank is compared before anything is computed; later ones while the first
    actions run.
    """

    def __init__(self, plan: Plan, place: RankPlace, device: torch.device) -> None:
        self._plan_digest = fingerprint(plan)[:12]
        self._place = place
        self._device = device
        self._kinds: set[tuple[Any, ...]] = set()

    def of_step(
        self, program: Program, minibatch: Minibatch, watch: StepWatch, flags: Mapping[str, bool]
    ) -> Agreement:
        """Begin to compare a step over all ranks of all replicas, whose gradients weigh alike.

        `flags` are what else is given to `step`.
        """
        return self._begin("a step", program, minibatch, watch, None, flags)

    def of_evaluation(
        self, program: Program, minibatch: Minibatch, watch: StepWatch, *, with_loss: bool
    ) -> Agreement:
        """Begin to compare an evaluation over the ranks of the pipeline: replicas may evaluate
        other batches.
        """
        flags = {"a target": with_loss}
        group = self._place.pipeline_group
        return self._begin("an evaluation", program, minibatch, watch, group, flags)

    def _begin(
        self,
        what: str,
        program: Program,
        minibatch: Minibatch,
        watch: StepWatch,
        group: dist.ProcessGroup | None,
        flags: Mapping[str, bool],
    ) -> Agreement:
        inputs = minibatch.inputs
        shapes, last = _described(inputs[0]), _described(inputs[-1])
        said = {
            "what it begins": what,
            "the plan": self._plan_digest,
            "the input of a microbatch": shapes,
            "the number of samples": minibatch.samples,
            "the number of microbatches": len(inputs),
            "the input of the last microbatch": last,
            "the set of modules in train mode": sorted(program.modes),
            "the number of the step": minibatch.step,
            "the seed": minibatch.seed,
            **{f"whether it was given {name}": flag for name, flag in flags.items()},
        }
        agreement = Agreement(said, group, self._device, watch)
        kind = (what, len(inputs), shapes, last, program.modes)
        # A pipeline of one rank has no messages, before which it would be settled.
        if kind not in self._kinds or len(self._place.global_ranks) == 1:
            agreement.settle()
            self._kinds.add(kind)
        return agreement


def _described(tensors: Sequence[Tensor]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
