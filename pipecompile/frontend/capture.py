"""The ways to capture a module, best first: each is tried where those before it could not, and said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.caches import CacheUse
from pipecompile.frontend.captured_graph import (
    Capture,
    Note,
    aliases_of,
    batch_size,
    eliminate_dead_code,
)
from pipecompile.frontend.data_probe import Heard, hear
from pipecompile.frontend.export import exported
from pipecompile.frontend.guards import Guards, faked, symbol_of
from pipecompile.frontend.leaves import paths_of
from pipecompile.frontend.recorder import Manner, Recorder
from pipecompile.frontend.refusals import UnsupportedError, asks_data
from pipecompile.frontend.settings import qualified
from pipecompile.frontend.signature import Arguments, Inputs, Outputs
from pipecompile.frontend.source import source_of
from pipecompile.frontend.torch_patches import quiet
from pipecompile.graph.attributes import STATE, Attributes
from pipecompile.graph.propagation import distinct, faked_state, has_values, named_state

__all__ = ["capture", "captures"]

WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


@dataclass(frozen=True)
class _Attempt:
    """A way to capture: with which flags, whether the batch is a symbol, whether data may be asked."""

    name: str
    exporting: bool
    symbolic: bool
    asking: bool


ATTEMPTS = (
    _Attempt("recorded", exporting=False, symbolic=True, asking=False),
    _Attempt("recorded as for export", exporting=True, symbolic=True, asking=False),
    _Attempt("recorded, data asked", exporting=False, symbolic=True, asking=True),
    _Attempt("recorded as for export, data asked", exporting=True, symbolic=True, asking=True),
    _Attempt("recorded for one batch size", exporting=False, symbolic=False, asking=True),
    _Attempt(
        "recorded as for export, for one batch size", exporting=True, symbolic=False, asking=True
    ),
)


def capture(model: nn.Module, call: Arguments, leaf: Sequence[str] = ()) -> Capture:
    """`model` as a graph, by the best way that can express it; the model and its state stay as they were.

    Modules of torch.nn, their subclasses and what `leaf` names (paths or classes of modules) are one node each, and so
    is the smallest module around code that asks for the values of tensors. Raises CaptureError, naming the module and
    the line, where no graph is known to be right.
    """
    return next(captures(model, call, leaf))


def captures(model: nn.Module, call: Arguments, leaf: Sequence[str] = ()) -> Iterator[Capture]:
    """All ways that can express `model`, best first, each made when it is asked for; CaptureError if there is none."""
    _refuse_unfit(model)
    leaves, again = paths_of(model, leaf), partial(capture, model, leaf=leaf)
    has_data = all(has_values(tensor) for _, tensor in named_state(model))
    heard: Heard | None = None
    failures: list[CaptureError] = []
    found = False
    for attempt in ATTEMPTS:
        if attempt.asking and not has_data:
            continue
        if attempt.asking and heard is None:
            heard = _hear(model, call, failures)
        try:
            manner = Manner(attempt.exporting, leaves, heard if attempt.asking else None)
            made = _recorded(model, call, attempt, manner, again)
        except UnsupportedError as error:
            failures.append(error)
        else:
            found = True
            yield made
    try:
        yield exported(model, call, again)
    except CaptureError as error:
        if not found:
            told = (
                "" if isinstance(error, UnsupportedError) else f"; as torch.export sees it: {error}"
            )
            raise CaptureError(f"{failures[0]}{told}") from failures[0]


def _hear(model: nn.Module, call: Arguments, failures: Sequence[CaptureError]) -> Heard:
    """What data answers on the sample; where the model itself fails on it, no way of capturing can help."""
    try:
        return hear(model, call)
    except Exception as error:
        raise (
            failures[0]
            if failures
            else CaptureError(f"the model fails on the sample input: {error}")
        ) from error


def _recorded(
    model: nn.Module,
    call: Arguments,
    attempt: _Attempt,
    manner: Manner,
    again: Callable[[Arguments], Capture],
) -> Capture:
    before = Attributes.of(model)
    try:
        run = _run(model, call, attempt, manner)
        after = Attributes.of(model)
        changed = [
            (module, name) for module, name in before.changed(after) if not _is_torchs(module)
        ]
        if changed:
            _refuse_state(
                model, changed, run, after, _run_again(model, call, attempt, manner, run, changed)
            )
    finally:
        before.restore()
    return Capture(
        model=model,
        graph=run.recorder.tape.graph,
        constants=run.recorder.tape.constants,
        inputs=run.inputs,
        outputs=run.outputs,
        aliases=aliases_of(model),
        guards=run.guards,
        method=attempt.name,
        notes=tuple(_notes(run, changed)),
        sets=frozenset(
            f"{run.recorder.path_of(module)}.{name}".lstrip(".") for module, name in changed
        ),
        training={path: module.training for path, module in model.named_modules()},
        again=again,
    )


@dataclass(frozen=True)
class _Run:
    """A forward that was recorded."""

    recorder: Recorder
    inputs: Inputs
    outputs: Outputs
    guards: Guards

    @property
    def text(self) -> list[str]:
        """The graph, to compare it with that of another run."""
        return [
            f"{node.name} {node.op} {node.target if isinstance(node.target, str) else qualified(node.target)} "
            f"{node.args} {node.kwargs}"
            for node in self.recorder.tape.graph.nodes
        ]


def _run(model: nn.Module, call: Arguments, attempt: _Attempt, manner: Manner) -> _Run:
    """Records once; once more if the forward took tensors out of caches, which are empty by then."""
    caches = CacheUse()
    try:
        run = _run_once(model, call, attempt, manner)
    finally:
        repeat = caches.clear()
    return _run(model, call, attempt, manner) if repeat else run


def _run_again(
    model: nn.Module,
    call: Arguments,
    attempt: _Attempt,
    manner: Manner,
    first: _Run,
    changed: Sequence[tuple[nn.Module, str]],
) -> _Run:
    """Records a second forward, which finds what the first left."""
    registered = [(module, name) for module, name in changed if name in STATE]
    if registered:
        raise CaptureError(
            f"{_attribute(first, *registered[0])}: the forward registers a parameter, buffer or module; run the model "
            "once before it is compiled, so that it is there"
        )
    try:
        return _run(model, call, attempt, manner)
    except UnsupportedError as error:
        raise CaptureError(
            f"{_attribute(first, *changed[0])} is set by the forward, and a second forward, which finds it, cannot be "
            f"recorded; keep such state in buffers ({error})"
        ) from error


@torch.enable_grad()
def _run_once(model: nn.Module, call: Arguments, attempt: _Attempt, manner: Manner) -> _Run:
    inputs = Inputs.of(model, call)
    tensors = inputs.flatten(call)
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    recorder = Recorder(model, mode, faked_state(model, mode), manner)
    fakes = [faked(tensor, mode, symbolic=attempt.symbolic) for tensor in distinct(tensors)]
    for name, fake in zip(inputs.tensor_names, fakes, strict=True):
        recorder.tape.placeholder(name, fake)
    symbol = symbol_of(fakes)
    outputs = _recording(recorder, model, inputs.unflatten(fakes))
    eliminate_dead_code(recorder.tape.graph)
    return _Run(recorder, inputs, outputs, Guards.of(batch_size(tensors), symbol, environment))


def _recording(recorder: Recorder, model: nn.Module, call: Arguments) -> Outputs:
    try:
        with quiet(), recorder.recording():
            outputs, tensors = Outputs.of(model(*call.args, **call.kwargs))
            recorder.tape.write_back()
            recorder.tape.output(tensors)
    except CaptureError:
        raise
    except Exception as error:
        raise UnsupportedError(_explained(recorder, model, error)) from error
    return outputs


def _explained(recorder: Recorder, model: nn.Module, error: Exception) -> str:
    """One line: where in the model, at which line, what happened, and what to do."""
    where = f"{recorder.failed_in or type(model).__name__} ({source_of(error) or 'unknown line'})"
    reason = str(error).strip().split("\n")[0]
    if asks_data(error):
        return (
            f"{where}: the forward branches on the values of a tensor, so one graph cannot stand for it; "
            "write the branch with torch.where, decide it outside the model, or put it into a submodule whose results "
            f"have fixed shapes: that is one node then, where the model has weights ({reason})"
        )
    return f"{where}: the forward cannot run on fake tensors: {type(error).__name__}: {reason}"


def _refuse_state(
    model: nn.Module,
    changed: Sequence[tuple[nn.Module, str]],
    run: _Run,
    after: Attributes,
    second: _Run,
) -> None:
    """CaptureError unless what a forward leaves on modules is only for itself.

    A second forward, which found what the first one left, must have recorded the same and left the same.
    """
    later = Attributes.of(model)
    for module, name in changed:
        where = _attribute(run, module, name)
        value = vars(module).get(name)
        if after.described(module, name) != later.described(module, name):
            raise CaptureError(
                f"{where} is set by the forward to {later.described(module, name)} after "
                f"{after.described(module, name)}: state that a graph cannot keep; make it a buffer and write to it "
                "in place"
            )
        if (
            isinstance(value, Tensor)
            and value.requires_grad
            and not second.recorder.tape.is_used(value)
        ):
            raise CaptureError(
                f"{where} is set by the forward to a tensor with a gradient that no output uses: a loss that reads it "
                "would not train the model; return it with the output"
            )
    if run.text != second.text:
        raise CaptureError(
            f"{_attribute(run, *changed[0])} is set by the forward, and a second forward, which finds it, "
            "computes something else; run the model once before it is compiled, or keep such state in buffers"
        )


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module is torch's own: it runs as ever, and what it keeps for itself is its own matter."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _attribute(run: _Run, module: nn.Module, name: str) -> str:
    """An attribute's path, with the line that set it where that is known."""
    path = run.recorder.path_of(module)
    line = run.recorder.assignments.get((module, name))
    return f"{path}.{name}".lstrip(".") + (f" ({line})" if line else "")


def _notes(run: _Run, changed: Sequence[tuple[nn.Module, str]]) -> Iterator[Note]:
    asking = run.recorder.whole
    if asking:
        one = "it is one node" if len(asking) == 1 else "each is one node"
        text = f"{_first_of(list(asking))} asks for the values of tensors: {one}, and costs are those of the sample"
        yield Note(text, next(iter(asking.values())))
    if run.guards.fixed:
        yield Note(f"the graph is for batches of {run.guards.batch} alone")
    if run.recorder.hooked:
        hooked = _first_of(sorted(run.recorder.hooked))
        yield Note(f"forward hooks of {hooked} are part of the graph: nothing calls them again")
    if changed:
        names = [f"{run.recorder.path_of(module)}.{name}".lstrip(".") for module, name in changed]
        line = run.recorder.assignments.get(changed[0], "")
        yield Note(f"the forward sets {_first_of(names)}: the pipeline leaves that as it was", line)


def _first_of(names: Sequence[str]) -> str:
    first = names[0] or "the model"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def _refuse_unfit(model: nn.Module) -> None:
    """InputError for modules around modules that do more than call them, and for parameters that are not there yet."""
    if torch.is_inference_mode_enabled():
        raise InputError("a model is captured to be trained; leave torch.inference_mode first")
    for path, module in model.named_modules():
        if any(
            is_lazy(value)
            for value in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        ):
            raise InputError(
                f"{path or 'the model'} has parameters without a shape yet; run the model once first"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{path or 'the model'} is a scripted module; give the Python module that it was made from"
            )
        inner = WRAPPERS.get(type(module).__name__)
        if inner is not None and hasattr(module, inner):
            raise InputError(
                f"{path or 'the model'} is a {type(module).__name__}; give the module inside it (.{inner}): "
                "pipecompile captures plain modules, and cuts them itself"
            )
