"""A target's model captured as the graph of one microbatch, and how that came about."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from torch import fx, nn

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.batch_counts import refuse_batch_counts
from pipecompile.frontend.batch_dims import part_of
from pipecompile.frontend.callable_state import (
    callable_restored,
    can_be_restored,
    restored_after_failure,
)
from pipecompile.frontend.capture import capture, captures, is_first_choice
from pipecompile.frontend.captured_graph import KEYS_IN_ORDER, Capture
from pipecompile.frontend.digest import digest
from pipecompile.frontend.kept_state import holders_of_user
from pipecompile.frontend.late_loss import refuse_late_loss
from pipecompile.frontend.limited_gradients import limited_gradients_of
from pipecompile.frontend.open_capture import OpenCapture
from pipecompile.frontend.other_reduction import other_reduction_of
from pipecompile.frontend.plain_tensors import plain_tensors_kept
from pipecompile.frontend.proof import Proof, proven_capture
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.row_independence import refuse_dependent_rows
from pipecompile.frontend.self_check import check_capture
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.frontend.unfit_models import refuse_unfit
from pipecompile.graph.loss_module import held_loss, hold_loss
from pipecompile.graph.model_state import named_state
from pipecompile.graph.modules import is_within
from pipecompile.graph.pytrees import map_tensors
from pipecompile.graph.storages import is_irregular, layout_name
from pipecompile.ir.plan import Options, Provenance
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group

__all__ = ["Captured", "capture_for_remainder", "capture_target", "open_capture"]

logger = logging.getLogger("pipecompile.frontend")


@dataclass(frozen=True)
class Captured:
    """A model captured at the size of one microbatch: the capture, the graph for that size, and the
    microbatch.

    `model` is the name of its class.
    """

    capture: Capture
    module: fx.GraphModule
    sample: Arguments
    digest: str
    verified: bool
    model: str = ""

    @property
    def provenance(self) -> Provenance:
        """How the graph came about, as a plan states it."""
        notes = tuple(note.text for note in self.capture.notes)
        return Provenance(
            verified=self.verified,
            model=self.model,
            method=self.capture.method,
            notes=notes,
        )


def capture_target(
    target: Target,
    options: Options,
    *,
    verify: bool,
    method: str | None = None,
    known: Iterable[Capture] = (),
    opened: OpenCapture | None = None,
) -> Captured:
    """Capture the model at the size of the first microbatch; `verify` proves the graph by a
    training step.

    A model without values (on the meta device, or of fake tensors) cannot be proven; its plan says
    so. With `method` the model is captured in the way that another rank has proven. Without a
    proof, one of the captures that are `known` of other sizes serves if it holds at this one, and
    is what a new capture would be. One that is `opened` for several lengths is tried first. The
    log says what is special about the capture.
    """
    # Before the capture, whose forward would wait for ranks that run something else.
    refuse_unfit(target.model)
    _refuse_synchronised_norms(target.model)
    _refuse_irregular_state(target.model)
    sample = _microbatch(target, options, 0)
    placed = None if opened is None else opened.at(sample)
    first = [] if placed is None else [placed]
    with restored_after_failure(target.model), plain_tensors_kept(target.model):
        if verify and target.has_values:
            # The next checks begin with what hooks kept before this one.
            with callable_restored(*holders_of_user(target.model)):
                others = target.microbatches(options.microbatches)[1:]
                captured, module, proof = proven_capture(
                    target.model, sample, options.leaf, first, others
                )
            _check_loss_and_rows(target, options, sample)
            _warn(limited_gradients_of(target, module, sample, options.microbatches))
            _log(chain(_remarks(captured), [_proof_text(proof)]))
        else:
            proof = None
            applicable = (
                capture
                for capture in known
                if capture.holds_for(sample) and is_first_choice(capture, sample)
            )
            if placed is None or method not in (None, placed.method):
                placed = next(applicable, None) or _captured_by(method, target, sample, options)
            captured = placed
            module = captured.instantiate(sample)
            _log(_remarks(captured))
    # Names are those of nodes as well, which are known only now.
    _refuse_unknown_names(module.graph, options.groups)
    _finish(module, target.loss_module, options)
    return Captured(
        captured,
        module,
        sample,
        digest(module),
        verified=proof is not None,
        model=type(target.model).__name__,
    )


def _check_loss_and_rows(target: Target, options: Options, sample: Arguments) -> None:
    """Raise InputError if a loss would see what another microbatch has left, or counts the batch,
    or if samples know of each other; warn of a loss that is of another reduction.
    """
    wanted = target.cut_targets(options.microbatches)[0]
    following = _microbatch(target, options, 1) if options.microbatches > 1 else None
    # A loss that moves on an iterator, say, is called by steps alone.
    may_be_tried = can_be_restored(target.loss_fn)
    if may_be_tried:
        refuse_late_loss(target, sample, wanted, following)
    # What samples know of each other shows only where they are cut apart.
    if following is None:
        return
    refuse_dependent_rows(target.model, sample, following)
    if may_be_tried and target.loss_reduction == "mean":
        refuse_batch_counts(target, sample, wanted)
    if may_be_tried and target.loss_reduction != "weighted":
        _warn(other_reduction_of(target, options.microbatches))


def open_capture(
    planned: Captured, targets: Iterable[Target], options: Options
) -> OpenCapture | None:
    """Return a capture for the planned microbatch and those of `targets`, which have other lengths;
    None if there is none, or if its graph for the planned microbatch is another one.
    """
    others = [_microbatch(target, options, 0) for target in targets]
    opened = OpenCapture.of(planned.capture, planned.sample, others, options.leaf)
    own = None if opened is None else opened.at(planned.sample)
    if own is None:
        return None
    with suppress(CaptureError), plain_tensors_kept(own.model):
        module = own.instantiate(planned.sample)
        _finish(module, held_loss(planned.module), options)
        if digest(module) == planned.digest:
            return opened
    return None


def capture_for_remainder(
    capture: Capture, target: Target, samples: int, options: Options, *, verify: bool
) -> tuple[Capture, fx.GraphModule]:
    """Return the graph for a microbatch of so many samples, fewer than planned, and its capture.

    That is `capture`; or if the forward takes another branch at this size from a new one,
    which `verify` proves. InputError if there is none, as for a capture that holds for one size.
    """
    sample = _microbatch(target, options, 0)
    inputs = capture.inputs
    pairs = zip(inputs.flatten(sample), inputs.batch_dims, strict=True)
    # The first samples of the first microbatch stand for the last ones of any batch: only their
    # number is in the graph.
    call = inputs.unflatten([part_of(tensor, dim, 0, samples) for tensor, dim in pairs])
    violation = capture.guards.violation(samples)
    planned = capture.guards.batch
    refusal = (
        f"the batch has a last microbatch of {samples} samples, but the plan was made for "
        f"microbatches of {planned}, and the model cannot run on both: %s; drop or pad the last "
        "batch, or choose another number of microbatches"
    )
    # The forward made a number of the batch size, and the graph has that number in it.
    if capture.guards.is_fixed:
        raise InputError(refusal % f"its graph is for one size only, since {violation}")
    other_answer = capture.other_answer(capture.inputs.flatten(call))
    is_other = violation is not None or other_answer is not None
    try:
        if is_other:
            capture = capture.recaptured(call)
        module = capture.instantiate(call)
        # The planned capture was proven at several sizes; a new one was not.
        if verify and is_other and target.has_values:
            check_capture(capture, module, call)
    except (CaptureError, UnsupportedError) as error:
        raise InputError(refusal % error) from error
    _finish(module, target.loss_module, options)
    return capture, module


def _finish(module: fx.GraphModule, loss: nn.Module | None, options: Options) -> None:
    """Put the nodes into their groups, and the loss at the end."""
    apply_passes(module.graph, [Group(options.groups)])
    hold_loss(module, loss)


def _warn(text: str | None) -> None:
    if text is not None:
        logger.warning(text)


def _microbatch(target: Target, options: Options, index: int) -> Arguments:
    """Return the microbatch `index` of the sample; the first one stands for all."""
    call = target.microbatches(options.microbatches)[index]
    if target.has_values:
        return call
    # No operator mixes tensors with values and without: all get the device of the model.
    args, kwargs = map_tensors(target.on_device, (call.args, call.kwargs))
    return Arguments(args, kwargs, call.batch_dim)


def _captured_by(
    method: str | None, target: Target, sample: Arguments, options: Options
) -> Capture:
    """Return the capture by `method`, or by the first method that works if it is None, or if the
    model cannot be captured so.
    """
    # That ending is no way to capture: it was found by the proof, which this rank does not
    # repeat.
    own = (method or "").removesuffix(KEYS_IN_ORDER)
    attempts = captures(target.model, sample, options.leaf) if method is not None else iter(())
    # A way that is not there raises the CaptureError of the first one.
    with suppress(CaptureError):
        for attempt in attempts:
            if attempt.method == own:
                return attempt if method == own else attempt.with_keys_in_order()
    return capture(target.model, sample, options.leaf)


def _remarks(captured: Capture) -> Iterator[str]:
    if captured.method != "recorded":
        yield f"the model was captured by another method than the first one: {captured.method}"
    yield from map(str, captured.notes)


def _proof_text(proof: Proof) -> str:
    batches = " and ".join(map(str, proof.batches))
    return (
        "self-check: the graph is the model, bit for bit, at batches of "
        f"{batches} ({proof.seconds:.1f} s)"
    )


def _log(lines: Iterable[str]) -> None:
    for line in lines:
        logger.info(line)


def _refuse_synchronised_norms(model: nn.Module) -> None:
    """Raise InputError if a SyncBatchNorm trains: it would wait for other ranks amid a forward."""
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise InputError(
                f"{path or 'the model'} is a SyncBatchNorm, which waits in each forward for ranks "
                "that run something else at that time; use BatchNorm with "
                "batch_norm='minibatch', which normalises by the microbatch and updates the "
                "running averages by the whole minibatch, over all replicas"
            )


def _refuse_irregular_state(model: nn.Module) -> None:
    for name, tensor in named_state(model):
        if is_irregular(tensor):
            raise InputError(
                f"{name} is {layout_name(tensor)}, whose bytes no plan counts and no stage sends; "
                "register its dense parts, and make it of them in the forward"
            )


def _refuse_unknown_names(graph: fx.Graph, groups: Iterable[Iterable[str]]) -> None:
    for name in (name for names in groups for name in names):
        if not any(is_within(node, name) for node in graph.nodes if node.op != "get_attr"):
            raise InputError(
                f"no node or module is called {name!r}; modules are named as in "
                "model.named_modules()"
            )
