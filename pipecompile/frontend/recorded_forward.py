"""A recorded forward: the model's forward as a graph, with its inputs, outputs and guards."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import CodeType

import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipecompile.errors import CaptureError, reason_of
from pipecompile.frontend.caches import CacheUse
from pipecompile.frontend.call_refusals import refuse_split_gradients
from pipecompile.frontend.captured_graph import eliminate_dead_code
from pipecompile.frontend.foreign_leaves import refuse_recorded_leaves
from pipecompile.frontend.guards import Guards, fake_input, symbols_in
from pipecompile.frontend.recorder import ForwardRecorder
from pipecompile.frontend.recording_options import RecordingOptions
from pipecompile.frontend.refusals import (
    INTO_A_SUBMODULE,
    HigherOrderError,
    UnsupportedError,
    is_data_dependence_error,
)
from pipecompile.frontend.settings import qualified_name
from pipecompile.frontend.signature import Arguments, InputStructure, OutputStructure
from pipecompile.frontend.source import error_line
from pipecompile.frontend.torch_patches import silence_torch
from pipecompile.graph.model_state import distinct_tensors, fake_state, has_values
from pipecompile.graph.torch_repairs import new_fake_mode

__all__ = ["RecordedForward", "record_forward"]

# What torch says of `cond`, `while_loop` and the like under a mode of ours.
HIGHER_ORDER = re.compile(r"no rule registered for HigherOrderOperator (\w+)")


@dataclass(frozen=True)
class RecordedForward:
    """A forward that was recorded; the recorder holds the graph."""

    recorder: ForwardRecorder
    inputs: InputStructure
    outputs: OutputStructure
    guards: Guards

    @property
    def text(self) -> list[str]:
        """The nodes as text, to compare the graph with that of another forward."""
        lines: list[str] = []
        for node in self.recorder.recording.graph.nodes:
            target = node.target if isinstance(node.target, str) else qualified_name(node.target)
            lines.append(f"{node.name} {node.op} {target} {node.args} {node.kwargs}")
        return lines

    def attribute_path(self, module: nn.Module, name: str) -> str:
        """Return the path of an attribute of one of the model's modules."""
        return f"{self.recorder.path_of(module)}.{name}".lstrip(".")


def record_forward(
    model: nn.Module, call: Arguments, options: RecordingOptions, *, symbolic: bool
) -> RecordedForward:
    """Record one forward; if `symbolic`, the batch size is a symbol.

    If the forward takes tensors out of caches of functions, these are cleared and the recording is
    repeated: now the computation of the tensors is recorded. Then they are filled again.
    UnsupportedError if this way cannot express the forward, CaptureError if none can.
    """
    caches = CacheUse()
    try:
        try:
            recorded = _record_once(model, call, options, symbolic, caches.codes)
        except Exception:
            if not caches.clear():
                raise
        else:
            if not caches.clear():
                return recorded
        # Once more at most: the caches are empty now, so that none holds tensors before its use.
        return record_forward(model, call, options, symbolic=symbolic)
    finally:
        caches.refill()


@torch.enable_grad()
def _record_once(
    model: nn.Module,
    call: Arguments,
    options: RecordingOptions,
    symbolic: bool,
    cached: Collection[CodeType],
) -> RecordedForward:
    """Run the forward once on fake tensors; `symbolic` ones have a symbol as their batch size, and
    for the lengths of the options.

    Functions with the code `cached` have caches.
    """
    inputs = InputStructure.of(model, call)
    tensors = inputs.flatten(call)
    environment = ShapeEnv()
    # Tensors that no module owns, such as those in globals, are real, and become constants.
    mode = new_fake_mode(environment)
    recorder = ForwardRecorder(model, mode, fake_state(model, mode), options, cached)
    dims = [{d} if symbolic and d is not None else set() for d in inputs.batch_dims]
    lengths = options.lengths or [frozenset[int]()] * len(tensors)
    # Inputs that are the same tensor get a fake each, since each is a placeholder.
    columns = zip(distinct_tensors(tensors), inputs.tensor_names, dims, lengths, strict=True)
    fakes = [fake_input(tensor, mode, name, {*own, *more}) for tensor, name, own, more in columns]
    for name, fake in zip(inputs.tensor_names, fakes, strict=True):
        recorder.recording.placeholder(name, fake)
    # Before the run, in which a guard may replace a symbol by a number.
    of_batch, of_lengths = symbols_in(fakes, dims), symbols_in(fakes, lengths)
    known = {**of_batch, **of_lengths}
    recorder.values.sizes = {symbol: sympy.Integer(size) for symbol, size in known.items()}
    if all(map(has_values, tensors)):
        recorder.values.inputs = dict(zip(inputs.tensor_names, tensors, strict=True))
    outputs = _run_model(recorder, model, inputs, fakes)
    eliminate_dead_code(recorder.recording.graph)
    symbol = next(iter(of_batch), None)
    guards = Guards.of(inputs.batch_size(tensors), symbol, environment, of_lengths)
    return RecordedForward(recorder, inputs, outputs, guards)


def _run_model(
    recorder: ForwardRecorder, model: nn.Module, inputs: InputStructure, fakes: Sequence[Tensor]
) -> OutputStructure:
    """Run the model under the recorder and end the graph with its outputs."""
    recording, call = recorder.recording, inputs.unflatten(fakes)
    try:
        with silence_torch(), recorder.run():
            result = model(*call.args, **call.kwargs)
            outputs, tensors = OutputStructure.of(result, inputs.batch_dims)
            refuse_recorded_leaves(model, tensors)
            recording.write_back()
            refuse_split_gradients(recording, model)
            recording.output(tensors)
    except CaptureError:
        raise
    except Exception as error:
        kind = HigherOrderError if HIGHER_ORDER.search(str(error)) else UnsupportedError
        raise kind(_explained(recorder, model, error)) from error
    return outputs


def _explained(recorder: ForwardRecorder, model: nn.Module, error: Exception) -> str:
    """Return in one line where in the model what happened, and what to do."""
    path = recorder.failed_in or type(model).__name__
    where = f"{path} ({error_line(error) or 'unknown line'})"
    reason = reason_of(error)
    if is_data_dependence_error(error):
        return (
            f"{where}: the forward branches on the values of a tensor, so one graph cannot stand "
            "for it; write the branch with torch.where, decide it outside the model, or "
            f"{INTO_A_SUBMODULE}"
        )
    if operator := HIGHER_ORDER.search(reason):
        return (
            f"{where}: the forward calls {operator[1].removesuffix('_stack_output')}, whose "
            "branches or loop are functions that no graph of a stage has; write a branch with "
            "torch.where, and a loop as one of Python"
        )
    return f"{where}: the forward cannot run on fake tensors: {type(error).__name__}: {reason}"
