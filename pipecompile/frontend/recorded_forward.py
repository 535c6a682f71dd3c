"""A recorded forward: the model's forward as a graph, with its inputs, outputs and guards."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import CodeType

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipecompile.errors import CaptureError, reason_of
from pipecompile.frontend.caches import CacheUse
from pipecompile.frontend.call_refusals import refuse_split_gradients
from pipecompile.frontend.captured_graph import eliminate_dead_code
from pipecompile.frontend.foreign_leaves import refuse_recorded_leaves
from pipecompile.frontend.guards import Guards, batch_symbol, fake_input
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
    """Run the forward once on fake tensors; `symbolic` ones have a symbol as their batch size.

    Functions with the code `cached` have caches.
    """
    inputs = InputStructure.of(model, call)
    tensors = inputs.flatten(call)
    environment = ShapeEnv()
    # Tensors that no module owns, such as those in globals, are real, and become constants.
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    recorder = ForwardRecorder(model, mode, fake_state(model, mode), options, cached)
    # Inputs that are the same tensor get a fake each, since each is a placeholder.
    pairs = zip(distinct_tensors(tensors), inputs.batch_dims, strict=True)
    fakes = [fake_input(tensor, mode, dim if symbolic else None) for tensor, dim in pairs]
    for name, fake in zip(inputs.tensor_names, fakes, strict=True):
        recorder.recording.placeholder(name, fake)
    # Before the run, in which a guard may replace the symbol by a number.
    symbol = batch_symbol(fakes)
    if symbol is not None:
        recorder.values.sizes = {symbol: sympy.Integer(inputs.batch_size(tensors))}
    if all(map(has_values, tensors)):
        recorder.values.inputs = dict(zip(inputs.tensor_names, tensors, strict=True))
    outputs = _run_model(recorder, model, inputs, fakes)
    eliminate_dead_code(recorder.recording.graph)
    guards = Guards.of(inputs.batch_size(tensors), symbol, environment)
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
