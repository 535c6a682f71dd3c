"""What ranks say of the step or evaluation that they begin, for the comparison with the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipecompile.errors import InputError, PipecompileError
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import fingerprint
from pipecompile.runtime import world
from pipecompile.runtime.agreement import (
    REFUSAL,
    Agreement,
    AgreementOfReplicas,
    Forum,
    Statement,
)
from pipecompile.runtime.board import Board
from pipecompile.runtime.place import RankPlace
from pipecompile.runtime.rank_step import Minibatch
from pipecompile.runtime.watch import StepWatch
from pipecompile.training.program import Program

__all__ = ["StepAgreement"]

FIRST_STEPS, STEPS_BETWEEN = 2, 100
"""Of which steps the values are compared: the first ones, and one of so many later ones."""
MOST_ELEMENTS = 2**16
"""Of each tensor of a microbatch, that are compared."""
SCALE = "scale of the scaler"
HOST_BACKENDS = frozenset({"gloo"})
"""The backends whose groups exchange tensors of the host."""


_PIPELINES = itertools.count()
"""Numbers the pipelines that this process has made with others."""


class StepAgreement:
    """Compares what ranks are about to do, in each step and evaluation.

    What is new on this rank is compared before anything is computed; later ones while the first
    actions run.
    """

    def __init__(self, plan: Plan, place: RankPlace) -> None:
        self._plan_digest = fingerprint(plan)[:12]
        self._place = place
        if place.is_distributed:
            self._everyone, self._pipeline = _forums(place)
            # Of two pipelines with one plan ranks may step in another order.
            count = world.share_from_first(lambda: str(next(_PIPELINES)).encode())
            self._number = int(count)
        self._kinds: set[tuple[Any, ...]] = set()
        # What was said of steps that differ only in their number.
        self._said: dict[tuple[Any, ...], Statement] = {}
        self._compared = 0

    @property
    def board(self) -> Board:
        """The board of all ranks of all replicas."""
        return self._everyone.board

    def of_step(
        self,
        program: Program,
        minibatch: Minibatch,
        watch: StepWatch,
        flags: Mapping[str, bool],
        history: int,
    ) -> Agreement:
        """Begin to compare a step over all ranks of all replicas, whose gradients weigh alike.

        `flags` are what else is given to `step`; for `history` see `Agreement`.
        """
        said = self._statement("a step", program, minibatch, flags)
        number = minibatch.step
        agreement = self._agreement(said, watch, number, history, to_all=said, at_once=True)
        self._settle_news(agreement, "a step", program, minibatch)
        if self._compares(minibatch):
            # Settled first: a rank that refuses the step does not come to this exchange.
            agreement.settle()
            self.compare_data(minibatch, watch)
        return agreement

    def of_evaluation(
        self,
        program: Program,
        minibatch: Minibatch,
        watch: StepWatch,
        *,
        with_loss: bool,
        everyone: bool,
    ) -> Agreement:
        """Begin to compare an evaluation over the ranks of the pipeline: replicas may evaluate
        other batches. If it needs `everyone`, all ranks then settle that they evaluate.
        """
        what, flags = "an evaluation", {"a target": with_loss}
        said = self._statement(what, program, minibatch, flags)
        to_all = {
            "what it begins": what,
            "the plan": self._plan_digest,
            "the number of its pipeline": self._number,
            **_named_flags(flags),
        }
        number = minibatch.step
        agreement = self._agreement(
            said, watch, number, to_all=Statement(to_all) if everyone else None
        )
        if len(self._place.pipelines) > 1:
            agreement.settle()
        self._settle_news(agreement, what, program, minibatch)
        return agreement

    @contextmanager
    def ending_together(self, begun: Agreement, watch: StepWatch) -> Iterator[None]:
        """Yield for an evaluation, which the ranks of the pipeline end together.

        No message comes back to a rank that has sent its last one: by itself it would end the
        evaluation without knowing that a later rank has failed.
        """
        try:
            yield
        except Exception as error:
            # Else the others wait for messages; so they learn of it.
            has_ended = not (begun.is_refused or watch.has_lost_messages)
            if has_ended and not watch.deadline.is_over():
                with suppress(InputError):  # which is what the others raise
                    Agreement(_refusal_of(error), self._pipeline, watch).settle()
            raise
        ended = Statement({"what it ends": "an evaluation"})
        Agreement(ended, self._pipeline, watch).settle("end")

    def refuse(self, error: Exception, watch: StepWatch, *, everyone: bool) -> None:
        """Tell the others, instead of a step or an evaluation, why this rank does not begin it:
        `everyone`, or those of the pipeline.
        """
        refusal = _refusal_of(error)
        with suppress(InputError):  # which is what the others raise
            self._agreement(refusal, watch, to_all=refusal if everyone else None).settle()

    def meet(self, what: str, watch: StepWatch) -> None:
        """Wait until all ranks begin `what`; InputError if one begins something else."""
        said = Statement({"what it begins": what})
        self._agreement(said, watch, to_all=said, at_once=True).settle()

    def _agreement(
        self,
        said: Statement,
        watch: StepWatch,
        number: int = 0,
        history: int = 0,
        *,
        to_all: Statement | None,
        at_once: bool = False,
    ) -> Agreement:
        """Begin an agreement of the pipeline, and with replicas of all ranks if something is said
        `to_all`.
        """
        if len(self._place.pipelines) == 1:
            return Agreement(said, self._everyone, watch, number, history)
        # Replicas may have taken different numbers of evaluations.
        number_for_all = number if at_once else 0

        def tell_all(statement: Statement) -> Agreement:
            return Agreement(statement, self._everyone, watch, number_for_all, history)

        return AgreementOfReplicas(
            said, self._pipeline, watch, number, to_all, tell_all, at_once=at_once
        )

    def _compares(self, minibatch: Minibatch) -> bool:
        return self._compared < FIRST_STEPS or minibatch.step % STEPS_BETWEEN == 0

    def compare_data(self, minibatch: Minibatch, watch: StepWatch) -> None:
        """Raise InputError, on every rank, if ranks of one replica were given other values.

        A loader that shuffles by itself on each rank gives inputs in one order and targets in
        another. That shows in the first steps; later ones are compared now and then.
        """
        if not self._compares(minibatch):
            return
        self._compared += 1
        own = {
            f"{what} of microbatch {number}": _digest_of(value)
            for what, values in (("input", minibatch.inputs), ("target", minibatch.targets))
            for number, value in enumerate(values)
        }
        # A scaler's update goes by gradients that overflow on all ranks or on none.
        own[SCALE] = _digest_of(minibatch.loss_gradients)
        # All ranks, so that all refuse, and because a replica may be several pipelines, which
        # tensor parallelism divides.
        group, replica = self._everyone.group, self._place.replica
        by_rank: list[tuple[int, dict[str, str]]] = [(0, {})] * dist.get_world_size(group)
        with watch.waiting_for_all():
            watch.deadline.wait_for(group)
            dist.all_gather_object(by_rank, (replica, own), group=group)
        for number in range(self._place.replicas):
            _refuse_other_values({rank: d for rank, (of, d) in enumerate(by_rank) if of == number})

    def _settle_news(
        self, agreement: Agreement, what: str, program: Program, minibatch: Minibatch
    ) -> None:
        """Settle what is new on this rank; what is like earlier ones is settled later."""
        kind = _kind_of(what, program, minibatch)
        # A pipeline of one rank has no messages, before which it would be settled.
        if kind not in self._kinds or len(self._place.global_ranks) == 1:
            agreement.settle()
            self._kinds.add(kind)

    def _statement(
        self, what: str, program: Program, minibatch: Minibatch, flags: Mapping[str, bool]
    ) -> Statement:
        """Return what this rank says of a step or an evaluation."""
        inputs, kind = minibatch.inputs, _kind_of(what, program, minibatch)
        key = (*kind, minibatch.samples, minibatch.seed, *flags.items())
        if key not in self._said:
            said = {
                "what it begins": what,
                "the plan": self._plan_digest,
                "the number of its pipeline": self._number,
                "the input of a microbatch": _described(inputs[0]),
                "the number of samples": minibatch.samples,
                "the number of microbatches": len(inputs),
                "the input of the last microbatch": _described(inputs[-1]),
                "the set of modules in train mode": sorted(program.modules_in_train_mode),
                "the seed": minibatch.seed,
                **_named_flags(flags),
            }
            self._said[key] = Statement(said)
        return self._said[key]


def _kind_of(what: str, program: Program, minibatch: Minibatch) -> tuple[Any, ...]:
    """Return what steps have in common that messages of one kind belong to."""
    first, last = minibatch.inputs[0], minibatch.inputs[-1]
    return what, len(minibatch.inputs), _described(first), _described(last), program.modes


def _refuse_other_values(digests: Mapping[int, Mapping[str, str]]) -> None:
    """Raise InputError if ranks that are to be given the same values have other `digests` of them,
    by rank and by name.
    """
    for name in next(iter(digests.values())):
        # A rank that reads neither inputs nor targets need not be given them.
        given = {rank: said[name] for rank, said in digests.items() if said[name]}
        if len(set(given.values())) > 1:
            what = "the same batch, for example by a loader that is seeded alike on all of them"
            if name == SCALE:
                what = "scalers that were made alike and are updated together"
            raise InputError(
                f"the {name} has other values on some ranks of a pipeline: their digests are "
                f"{given}; give all ranks of a pipeline, and of one data-parallel replica, {what}"
            )


def _forums(place: RankPlace) -> tuple[Forum, Forum]:
    """Return the forums of all processes, and of those of the pipeline. Every process must call
    this, since processes create groups together.
    """
    group = place.pipeline_group
    if dist.get_backend() not in HOST_BACKENDS:
        everyone = Forum(dist.new_group(backend="gloo"))
        if group is not None:
            of_pipelines = [
                dist.new_group(list(ranks), backend="gloo") for ranks in place.pipelines
            ]
            group = of_pipelines[place.pipeline]
    else:
        everyone = Forum(None)
    return everyone, everyone if group is None else Forum(group)


def _refusal_of(error: Exception) -> Statement:
    """Return what a rank tells the others of its error."""
    # Only messages of our own say by themselves what is wrong.
    kind = "" if isinstance(error, PipecompileError) else f"{type(error).__name__}: "
    return Statement({REFUSAL: f"rank {world.rank()} refuses what it was given: {kind}{error}"})


def _named_flags(flags: Mapping[str, bool]) -> dict[str, bool]:
    return {f"whether it was given {name}": flag for name, flag in flags.items()}


def _digest_of(values: Any) -> str:
    """Return a digest of all tensors in `values`, "" without any that has values.

    Of a larger tensor `MOST_ELEMENTS` are read, evenly spaced: other samples differ in most.
    """
    tensors = [
        leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_meta
    ]
    total = blake2b(digest_size=8)
    for tensor in tensors:
        spaced = tensor.detach().reshape(-1)[:: -(-tensor.numel() // MOST_ELEMENTS) or 1]
        total.update(spaced.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest() if tensors else ""


def _described(tensors: Sequence[Tensor]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
