"""The proof of a capture: the self-check at the sample, at another batch size, on other data.

The api uses the first capture that passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, fx, nn

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.capture import captures
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.digest import digest
from pipecompile.frontend.failing_model import ModelFailsError
from pipecompile.frontend.in_flight_check import check_in_flight, may_disturb
from pipecompile.frontend.kept_state import (
    mark_once,
    nodes_of_user,
    places_of_kept_state,
    reached_by_user,
)
from pipecompile.frontend.other_data import FAR, enlarged, other_data
from pipecompile.frontend.packages import is_foreign
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.repeated_forward import depends_on_later_forwards
from pipecompile.frontend.self_check import (
    DifferenceError,
    check_capture,
    refuse_changes,
    rewritten_copy,
)
from pipecompile.frontend.signature import Arguments, has_loose_keys, with_keys_reversed
from pipecompile.frontend.training_step import TrainingStep, training_steps
from pipecompile.graph.recomputability import written_buffers, written_storages
from pipecompile.graph.restored_state import is_same_tensor
from pipecompile.graph.storages import storage_key
from pipecompile.passes.data_dependence import GuardDataDependence

__all__ = ["Proof", "proven_capture"]


@dataclass(frozen=True)
class Proof:
    """The batch sizes at which a capture was found equal to its model, and the time this took."""

    batches: tuple[int, ...]
    seconds: float


def proven_capture(
    model: nn.Module,
    call: Arguments,
    leaf: Sequence[str] = (),
    known: Sequence[Capture] = (),
    others: Sequence[Arguments] = (),
) -> tuple[Capture, fx.GraphModule, Proof]:
    """Return the best capture that equals the model, its graph for `call`, and the proof.

    A training step on `call` is compared and, if the graph is for several batch sizes, one on
    another number of the same samples; with modules that branch on data also some on other data.
    Captures that are `known` are tried before others, and after all those that do not hold for the
    `others` of the sample's microbatches. CaptureError if none equals the model.
    """
    failures: list[CaptureError] = []
    seen: set[str] = set()
    candidates = _holding_for(others, chain(known, captures(model, call, leaf)))
    while True:
        try:
            candidate = next(candidates)
            module = candidate.instantiate(call)
            # Several ways often record the same graph; it is compared once.
            if digest(module) in seen:
                continue
            seen.add(digest(module))
            start, outside = time.perf_counter(), candidate.outside_values()
            step = check_capture(candidate, module, call, outside)
            # Before the next checks, whose larger numbers a hook may keep.
            if depends_on_later_forwards(candidate, module, call):
                candidate = replace(candidate, keeps_state=True)
                mark_once(module)
            _refuse_unseen_writes(candidate, module, call, step)
            batches = (_batch_of(candidate, call), *_check_another_batch(candidate, call))
            if step.writes_in_backward or _may_mix_microbatches(module):
                check_in_flight(candidate, module, call)
            _check_other_data(candidate, module, call)
            # A running maximum, say, is changed by other data alone.
            refuse_changes(outside)
            candidate = _for_other_orders(candidate, module, call)
            return candidate, module, Proof(batches, time.perf_counter() - start)
        except StopIteration:
            # The failure of the best way says best what stands in the way.
            raise failures[0] from None
        except (DifferenceError, UnsupportedError) as error:
            failures.append(error)
        except CaptureError as error:
            # A graph was there and differed, which says more than why another could not be made.
            if failures and isinstance(failures[0], DifferenceError):
                raise failures[0] from error
            raise


def _holding_for(others: Sequence[Arguments], candidates: Iterator[Capture]) -> Iterator[Capture]:
    """Yield first the captures whose answers are those of all microbatches: of a mask that is all
    ones in the first one, say, others may read something else.
    """
    late: list[Capture] = []
    try:
        for each in candidates:
            if all(each.other_answer(each.inputs.flatten(call)) is None for call in others):
                yield each
            else:
                late.append(each)
    except CaptureError:
        if not late:
            raise
    yield from late


def _may_mix_microbatches(module: fx.GraphModule) -> bool:
    """Return whether something of one microbatch may come to another one that is in flight."""
    writes = any(may_disturb(module, node) for node in module.graph.nodes)
    return writes or any(places_of_kept_state(module))


def _refuse_unseen_writes(
    capture: Capture, module: fx.GraphModule, call: Arguments, step: TrainingStep
) -> None:
    """Raise CaptureError if each forward writes other values to state and no node of the graph is
    known to write there: where the forward is recomputed, it would write once more.
    """
    if step.writes_in_backward or not (step.written or any(nodes_of_user(module))):
        return
    seen = _storages_seen_written(module)
    state = {
        **dict(capture.model.named_parameters(remove_duplicate=False)),
        **dict(capture.model.named_buffers(remove_duplicate=False)),
    }
    inputs, dims = capture.inputs.flatten(call), capture.inputs.batch_dims
    others = other_data(inputs, dims)
    seconds: list[Sequence[Tensor]] = []
    if any(storage_key(state[name]) not in seen for name in step.written):
        seconds += [inputs, others, enlarged(others, dims)]
    if any(nodes_of_user(module)):
        # A maximum that begins above those of the sample is written by larger numbers alone.
        seconds += [enlarged(others, dims), enlarged(others, dims, FAR)]
    for second in seconds:
        for name in _changed_by_second(capture, module, step, (inputs, second)):
            if storage_key(state[name]) not in seen:
                owner = type(capture.model.get_submodule(name.rpartition(".")[0]))
                # What a fused one of torch does in one operator, that does in several, which show.
                advice = "use FakeQuantize with an observer of its own in place of a fused one"
                if not is_foreign(owner.__module__):
                    advice = "write to it by its own name, and not through .data"
                raise CaptureError(
                    f"{name}: the forward writes to it by another name in a module that is one "
                    f"node, so that no operator shows it; {advice}, so that each microbatch sees "
                    "it as in a loop"
                )


def _changed_by_second(
    capture: Capture,
    module: fx.GraphModule,
    step: TrainingStep,
    batches: Sequence[Sequence[Tensor]],
) -> list[str]:
    """Return the state that is not the same after steps on both batches as after that on the first;
    nothing if the model does not take them.
    """
    with suppress(Exception), callable_restored(*reached_by_user(capture.model, module)):
        *_, twice = training_steps(capture.model, [partial(module, *each) for each in batches])
        return [
            name
            for name in dict.fromkeys((*step.written, *twice.written))
            if not (
                name in step.buffers and is_same_tensor(step.buffers[name], twice.buffers[name])
            )
        ]
    return []


def _storages_seen_written(module: fx.GraphModule) -> set[int]:
    """Return the storages of the state that nodes of a graph are known to write to."""
    nodes = list(module.graph.nodes)
    seen = set(map(storage_key, written_buffers(module, nodes)))
    written = written_storages(nodes)
    # An embedding with max_norm, say, writes to its weight.
    for node in (each for each in nodes if each.op == "call_module"):
        parameters = module.get_submodule(str(node.target)).parameters()
        # Its fakes begin with those of its parameters.
        pairs = zip(parameters, node.meta["state"], strict=False)
        seen |= {storage_key(real) for real, fake in pairs if storage_key(fake) in written}
    return seen


def _batch_of(capture: Capture, call: Arguments) -> int:
    """Return the batch size of `call`."""
    return capture.inputs.batch_size(capture.inputs.flatten(call))


def _check_another_batch(capture: Capture, call: Arguments) -> Iterator[int]:
    """Check a second batch size if the guards allow one; yield it."""
    inputs = capture.inputs
    tensors = inputs.flatten(call)
    batch = inputs.batch_size(tensors)
    others = [
        size
        # Half the batch is the cheapest. Guards that exclude it may allow a neighbour.
        for size in (batch // 2, batch - 1, batch + 1)
        if size and not capture.guards.violation(size)
    ]
    if others and not capture.guards.is_fixed:
        resized = map(partial(_resized, size=others[0]), tensors, inputs.batch_dims)
        other = inputs.unflatten(list(resized))
        # A model that is for some sizes only may fail at this one; then it will not run there.
        with suppress(ModelFailsError):
            check_capture(capture, capture.instantiate(other), other)
            yield _batch_of(capture, other)


def _resized(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Return the first `size` samples; if there are fewer, they are repeated."""
    if dim is None:
        return tensor
    return tensor[(slice(None),) * dim + (torch.arange(size) % tensor.shape[dim],)]


def _check_other_data(capture: Capture, module: fx.GraphModule, call: Arguments) -> None:
    """Check modules that branch on data on other data, on which their branches may go the other
    way.

    The checks of a stage are in place: what a step refuses may differ here.
    """
    if all(node.meta.get("data_answers") is None for node in module.graph.nodes):
        return
    guarded = rewritten_copy(module, [GuardDataDependence()])
    tensors = capture.inputs.flatten(call)
    for words, changed in OTHER_DATA.items():
        others = list(map(changed, tensors))
        if capture.other_answer(others) is not None:
            continue  # a step has another graph for it
        try:
            # Only the model itself knows which data it can take.
            with suppress(ModelFailsError, InputError):
                other = capture.inputs.unflatten(others)
                if check_capture(capture, guarded, other).written:
                    check_in_flight(capture, guarded, other)
        except DifferenceError as error:
            raise DifferenceError(f"on other data than the sample's ({words}): {error}") from error


def _for_other_orders(capture: Capture, module: fx.GraphModule, call: Arguments) -> Capture:
    """Return the capture. It requires the order of the keys of dicts if the forward returns
    something else, or fails, with these in the opposite order.
    """
    if not has_loose_keys(capture.model, call):
        return capture
    try:
        check_capture(capture, module, with_keys_reversed(call))
    except (DifferenceError, ModelFailsError):
        return capture.with_keys_in_order()
    return capture


def _if_floating(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `change` for numbers with a fraction; whole numbers may be indices and stay."""
    return lambda value: change(value) if value.is_floating_point() else value


OTHER_DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "its numbers negated": _if_floating(torch.neg),
    "its numbers 100 times as large": _if_floating(lambda value: value * 100),
    "zeros": _if_floating(torch.zeros_like),
    "in the opposite order": lambda value: value.flip(tuple(range(value.dim()))),
}
"""Makes other data out of each input of the sample."""
