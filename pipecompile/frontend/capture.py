"""The ways to capture a module, best first.

Each is tried if those before it cannot express the forward or differ from the model:

    recorded                         batch size open    no data-dependent modules
    recorded with fakes in sight     as above, the forward may see that its tensors have no values
    recorded as for export           as above, with the flags by which models avoid shortcuts
    recorded, data probed            data-dependent modules are one node each; with fakes in sight
                                     where fewer modules are one node so
    recorded as for export, data probed
    recorded, inputs read            what is read out of inputs is that of the sample; it comes
                                     second if an input is then left out, such as a mask of ones
    recorded for one batch size      all sizes fixed
    recorded as for export, for one batch size
    torch.export                     a graph of aten operators, all sizes fixed
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.errors import CaptureError, PipecompileError
from pipecompile.frontend.assigned_attributes import (
    Attribute,
    changed_attributes,
    refuse_lasting_state,
)
from pipecompile.frontend.assigned_value import AssignedValue
from pipecompile.frontend.attribute_reads import AttributeReads
from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.captured_graph import Capture, CaptureNote, aliases_of
from pipecompile.frontend.constant_answers import has_gradient_type
from pipecompile.frontend.data_probe import ProbedAnswers, probe_data
from pipecompile.frontend.export import export_capture
from pipecompile.frontend.failing_model import ModelFailsError, refuse_failing
from pipecompile.frontend.kept_state import hooks_of_user
from pipecompile.frontend.leaves import leaf_paths
from pipecompile.frontend.library_reads import LibraryReads
from pipecompile.frontend.plain_tensors import plain_tensors_kept
from pipecompile.frontend.recorded_forward import RecordedForward, record_forward
from pipecompile.frontend.recording_methods import (
    IN_SIGHT,
    INPUTS_READ,
    METHODS,
    RecordingMethod,
)
from pipecompile.frontend.recording_options import RecordingOptions
from pipecompile.frontend.refusals import (
    HigherOrderError,
    UnsupportedError,
    is_data_dependence_error,
)
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.source import error_line
from pipecompile.frontend.unfit_models import refuse_unfit
from pipecompile.graph.attributes import HOOKS, ModuleAttributes, hook_codes
from pipecompile.graph.model_state import has_values, named_state
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.torch_repairs import repair_torch

__all__ = [
    "capture",
    "capture_with_lengths",
    "captures",
    "is_first_choice",
    "normalises_batches",
]


def capture(
    model: nn.Module, call: Arguments, leaf: Sequence[str] = (), *, as_outside: bool = True
) -> Capture:
    """Return `model` as a graph, by the best way that can express it.

    Modules of torch.nn, their subclasses and the modules that `leaf` names (paths or classes) are
    one node each, and so is the smallest module around code that reads values of tensors. The model
    and its state are restored. CaptureError, with the module and the line, if no graph is known to
    be right.
    """
    refuse_unfit(model)
    with plain_tensors_kept(model):
        return next(captures(model, call, leaf, as_outside=as_outside))


def captures(
    model: nn.Module, call: Arguments, leaf: Sequence[str] = (), *, as_outside: bool = True
) -> Iterator[Capture]:
    """Yield the captures by all ways that can express `model`, best first.

    Each is captured when the caller needs it. With `as_outside` inputs may be left out that this
    call does not need, such as a mask of ones. CaptureError if there is none.
    """
    refuse_unfit(model)
    repair_torch()
    failures: list[CaptureError] = []
    try:
        yield from _captures(model, call, leaf, failures, as_outside=as_outside)
    finally:
        if _is_of_functions(failures):
            # torch keeps what it compiled of branches on fakes, by which the model would fail.
            torch._dynamo.reset()


def capture_with_lengths(
    model: nn.Module, call: Arguments, leaf: Sequence[str], lengths: tuple[frozenset[int], ...]
) -> Capture:
    """Return `model` recorded by the first method, with symbols for the sizes of each input in the
    dimensions `lengths`, for open_capture.py. UnsupportedError or CaptureError if it cannot be.
    """
    recapture, leaves = partial(capture, model, leaf=leaf), leaf_paths(model, leaf)
    with plain_tensors_kept(model):
        return _capture_by(
            model, call, METHODS[0], leaves=leaves, recapture=recapture, lengths=lengths
        )


def _captures(
    model: nn.Module,
    call: Arguments,
    leaf: Sequence[str],
    failures: list[CaptureError],
    *,
    as_outside: bool,
) -> Iterator[Capture]:
    """Yield the captures of `captures`, and note in `failures` what stands in the way of others."""
    leaves, recapture = leaf_paths(model, leaf), partial(capture, model, leaf=leaf)
    model_has_values = all(has_values(tensor) for _, tensor in named_state(model))
    answers: ProbedAnswers | None = None
    read_outside = AttributeReads()
    # What fails after a capture was yielded is no reason to refuse the model.
    has_capture = False
    for method in METHODS:
        # The probe needs real values, which a model on the meta device does not have.
        if method.allows_data and not model_has_values:
            continue
        # One probe serves all methods. It takes the path that the model takes outside of a capture,
        # also where a recording takes another one, for an export or since it sees fakes: what it
        # reads counts for these captures too.
        if answers is None and model_has_values and (method.allows_data or not method.hides_fakes):
            with read_outside.noted(model):
                try:
                    answers = _probe_data(model, call, failures)
                except ModelFailsError:
                    raise
                except CaptureError:
                    if method.allows_data:
                        raise
        by = partial(_capture_by, model, call, leaves=leaves, recapture=recapture)
        if method is IN_SIGHT and as_outside and any(_masks_nothing(call)):
            # Before the ways that hide nothing, but only then: for most models it would be one
            # recording more.
            for recorded in _as_outside(by):
                has_capture = True
                yield recorded
        if answers is not None:
            by = partial(by, read_outside=read_outside)
        if method.allows_data:
            by = partial(by, answers=answers)
        for recorded in _recorded(by, method, failures):
            has_capture = True
            yield recorded
    # In an export the model may catch an error about data, and nobody would know.
    if any(map(_is_of_data, failures)):
        if not has_capture:
            # The ways that take a module as one node may fail for another reason.
            others = [str(failure) for failure in failures if not _is_of_data(failure)]
            reason = f"; with that as one node: {others[0]}" if others else ""
            if "labels" in call.kwargs:
                reason += "; if it is in the model's loss, leave the labels out, and give loss_fn"
            raise CaptureError(f"{failures[0]}{reason}") from failures[0]
        return
    try:
        yield export_capture(model, call, recapture)
    except CaptureError as error:
        if not has_capture:
            # The failure of the first way says best what stands in the way.
            is_unsupported = isinstance(error, UnsupportedError)
            reason = "" if is_unsupported else f"; as torch.export sees it: {error}"
            raise CaptureError(f"{failures[0]}{reason}") from failures[0]


def _probe_data(
    model: nn.Module, call: Arguments, failures: Sequence[CaptureError]
) -> ProbedAnswers:
    """Return the answers of the sample's data; if the model fails on it, no way can help."""
    try:
        return probe_data(model, call)
    except Exception as error:
        # After torch.cond on fakes a model fails until what torch compiled of it is dropped.
        if not isinstance(error, PipecompileError) and not _is_of_functions(failures):
            refuse_failing(model, call)
        # What is refused in the probe, or fails only there, is no failure of the model.
        reason = f"the probe of data fails ({error_line(error)}): {type(error).__name__}: {error}"
        raise failures[0] if failures else CaptureError(reason) from error


def _is_of_functions(failures: Sequence[CaptureError]) -> bool:
    return any(isinstance(failure, HigherOrderError) for failure in failures)


def _is_of_data(failure: CaptureError) -> bool:
    return any(
        error is not None and is_data_dependence_error(error)
        for error in (failure, failure.__cause__)
    )


def is_first_choice(capture: Capture, call: Arguments) -> bool:
    """Return whether a new capture for `call` would be made in the same way as one that holds for
    it.
    """
    return capture.method == METHODS[0].name or capture.masks_nothing == _masks_nothing(call)


def _masks_nothing(call: Arguments) -> tuple[bool, ...]:
    """Return of each tensor whether it has whole numbers or booleans that are the same everywhere,
    such as a mask of ones: no other can be left out, and a recording would be for nothing.
    """
    tensors = tensor_leaves((call.args, call.kwargs))
    return tuple(not has_gradient_type(each) and _is_uniform(each) for each in tensors)


def _is_uniform(tensor: Tensor) -> bool:
    """Return whether all elements are equal; True where none is known."""
    if not has_values(tensor) or not tensor.numel():
        return True
    return bool((tensor == tensor.flatten()[0]).all())


def _recorded(
    by: Callable[[RecordingMethod], Capture],
    method: RecordingMethod,
    failures: list[CaptureError],
) -> Iterator[Capture]:
    """Yield what can be recorded by a method, and add to `failures` what stands in the way.

    With data probed a path that asks for values only where it sees no fakes, such as
    `if mask.all()`, can make the whole model one node: then fakes are in sight first.
    """
    captures = []
    for each in method.variants:
        try:
            captures.append(by(each))
        except UnsupportedError as error:
            failures.append(error)
    if len(captures) > 1 and not captures[0].data_dependent <= captures[1].data_dependent:
        captures.reverse()
    yield from captures


def _as_outside(by: Callable[[RecordingMethod], Capture]) -> Iterator[Capture]:
    """Yield the capture of the path that the model takes where it sees no fakes. It is only taken
    if it leaves out an input that it has read, such as a mask that masks nothing.

    A sample with padding is captured by the next way, with which batches may be padded or not.
    """
    try:
        capture = by(INPUTS_READ)
    except UnsupportedError:
        return
    read = {name for answer in capture.constant_answers for name in answer.inputs}
    # With a mask of ones the model leaves the mask out (`if mask.all(): mask = None`): its
    # placeholder is read by nothing then.
    nodes = capture.graph.nodes
    if any(node.target in read and not node.users for node in nodes if node.op == "placeholder"):
        yield capture


def _capture_by(
    model: nn.Module,
    call: Arguments,
    method: RecordingMethod,
    *,
    leaves: frozenset[str],
    recapture: Callable[..., Capture],
    answers: ProbedAnswers | None = None,
    read_outside: AttributeReads | None = None,
    lengths: tuple[frozenset[int], ...] = (),
) -> Capture:
    """Return the capture of `model` by one method; its attributes are restored. `read_outside` is
    what the forward of a probe has read, and `lengths` the dimensions of inputs that are open.
    """
    options = RecordingOptions(
        method.exporting, method.hides_fakes, leaves, answers, method.reads_inputs, lengths
    )
    before, reads = ModuleAttributes.of(model), AttributeReads()

    def record() -> RecordedForward:
        with reads.noted(model):
            return record_forward(model, call, options, symbolic=method.symbolic)

    try:
        # Hooks would keep tensors without values, which the next ones would compute with.
        with callable_restored(*hooks_of_user(model)):
            forward = record()
            after = ModuleAttributes.of(model)
            changed = changed_attributes(before, after)
            left_hooks = _left_hooks(forward, before, after)
            if changed:
                refuse_lasting_state(model, before, changed, forward, record)
    finally:
        before.restore()
    all_reads = [reads] if read_outside is None else [reads, read_outside]
    read = reduce(operator.or_, (each.of(model) for each in all_reads))
    return Capture(
        model=model,
        graph=forward.recorder.recording.graph,
        constants=forward.recorder.recording.constants,
        inputs=forward.inputs,
        outputs=forward.outputs,
        aliases=aliases_of(model),
        guards=forward.guards,
        method=method.name,
        notes=tuple(_notes(forward, changed)),
        assigned_attributes=_assigned(forward, before, after, changed, all_reads),
        left_hooks=left_hooks,
        # On a path of its own for fakes a forward may leave out what it reads outside of a capture.
        read_attributes=read if method.hides_fakes or read_outside is not None else None,
        library_reads=reduce(LibraryReads.joined, (each.of_libraries for each in all_reads)),
        taken_apart=frozenset(forward.recorder.recording.taken_apart),
        data_dependent=frozenset(forward.recorder.data_dependent),
        training={path: module.training for path, module in model.named_modules()},
        # A graph that keeps its masks is for batches with and without padding: so is a further one.
        recapture=partial(recapture, as_outside=method.reads_inputs),
        asks_layout=forward.recorder.asks_layout,
        value_reads=tuple(forward.recorder.values.of_values),
        constant_answers=tuple(forward.recorder.values.constants.values()),
        masks_nothing=_masks_nothing(call),
    )


def _left_hooks(
    forward: RecordedForward, before: ModuleAttributes, after: ModuleAttributes
) -> dict[tuple[str, str], frozenset[Any]]:
    """Return the code of the hooks that a forward has left, by path and table."""
    return {
        (forward.recorder.path_of(module), name): hook_codes(vars(module)[name].values())
        for module, name in before.changed(after)
        if name in HOOKS
    }


def _assigned(
    forward: RecordedForward,
    before: ModuleAttributes,
    after: ModuleAttributes,
    changed: Sequence[Attribute],
    reads: Sequence[AttributeReads],
) -> dict[tuple[str, str], AssignedValue]:
    """Return what the `changed` attributes were before a forward and after it, by path and name,
    and whether a forward has read them before it set them.
    """
    known = before.ids() if changed else frozenset()
    return {
        (forward.recorder.path_of(module), name): AssignedValue.of(
            before.comparable(module, name),
            after.comparable(module, name),
            known,
            is_read_first=any(each.has_read_first(module, name) for each in reads),
        )
        for module, name in changed
    }


def _notes(forward: RecordedForward, changed: Sequence[Attribute]) -> Iterator[CaptureNote]:
    """Yield what is special about a capture. The texts are part of plans."""
    recorder = forward.recorder
    dependent = recorder.data_dependent
    if dependent:
        one = "it is one node" if len(dependent) == 1 else "each is one node"
        yield CaptureNote(
            f"{_first_of(list(dependent))} asks for the values of tensors: {one}, and costs are "
            "those of the sample",
            next(iter(dependent.values())),
        )
    # No microbatch is smaller than one sample, so that such a graph serves for all.
    if forward.guards.is_fixed and forward.guards.batch > 1:
        yield CaptureNote(f"the graph is for microbatches of {forward.guards.batch} samples alone")
    if recorder.hooked:
        hooked = _first_of(sorted(recorder.hooked))
        yield CaptureNote(
            f"forward hooks of {hooked} are part of the graph: nothing calls them again"
        )
    called = [str(n.target) for n in recorder.recording.graph.nodes if n.op == "call_module"]
    norms = [
        name
        for name in dict.fromkeys(called)
        if _normalises_a_batch(recorder.root.get_submodule(name))
    ]
    if norms:
        yield CaptureNote(
            f"batch norm {_first_of(norms)}: each microbatch is normalised by itself, as in a loop "
            "over microbatches"
        )
    if changed:
        names = [forward.attribute_path(*attribute) for attribute in changed]
        line = recorder.assignments.get(changed[0], "")
        yield CaptureNote(
            f"the forward sets {_first_of(names)}: the pipeline leaves that as it was", line
        )


def normalises_batches(model: nn.Module) -> bool:
    """Return whether a module of a model trains with the statistics of each microbatch."""
    return any(map(_normalises_a_batch, model.modules()))


def _normalises_a_batch(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training


def _first_of(names: Sequence[str]) -> str:
    first = names[0] or "the model"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"
