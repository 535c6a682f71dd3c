"""The self-check: one seeded training step of a graph and of its model, compared bit for bit.

    the same seed ─┬─▶ step of the model ──▶ outputs, gradients, buffers ─┐
                   └─▶ step of the graph ──▶ outputs, gradients, buffers ─┴─▶ equal, or an error

`proof.py` checks captures by it; `pipecompile verify` compares whole pipelines.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.errors import CaptureError, PipecompileError, reason_of
from pipecompile.frontend.assigned_attributes import changed_attributes
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.data_probe import cuda_devices
from pipecompile.frontend.deviation import difference_text, first_deviating_call, first_reader
from pipecompile.frontend.failing_model import ModelFailsError
from pipecompile.frontend.foreign_leaves import refuse_foreign_leaves
from pipecompile.frontend.kernel_noise import is_within_noise
from pipecompile.frontend.outside_values import OutsideValues
from pipecompile.frontend.refusals import COMPUTED_WITH, LOOKED_AT
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.training_step import (
    SEED,
    TrainingStep,
    restored_state,
    training_step,
)
from pipecompile.graph.attributes import ModuleAttributes
from pipecompile.graph.restored_state import is_same_tensor
from pipecompile.passes.autograd_context import EnterContexts
from pipecompile.passes.contract import Pass, apply_passes

__all__ = [
    "KINDS",
    "DifferenceError",
    "check_capture",
    "first_difference",
    "refuse_changes",
    "rewritten_copy",
    "with_autograd_contexts",
]

KINDS = ("outputs", "gradients", "buffers")
_CAUSES = {
    "buffers": "write to a buffer, as batch norm does, within a region of checkpoint, which then "
    "runs twice (leave the region to recompute= of pipecompile, or write to it outside), ",
    "gradients": "hook a node of autograd (y.grad_fn.register_hook), which no graph knows (hook "
    "the tensor: y.register_hook), ",
}
"""What a model may do if these differ, beside what makes anything differ."""
_NOISE = (
    "self-check: %s of two steps of the model itself differ, since kernels of this GPU add in "
    "another order in each run, and those of the graph are as near (%s: %s); with "
    "torch.use_deterministic_algorithms(True) they are compared bit for bit"
)
logger = logging.getLogger("pipecompile.frontend")


class DifferenceError(CaptureError):
    """A graph differs from its model; another way to capture it may give one that does not."""


def check_capture(
    capture: Capture,
    module: fx.GraphModule,
    call: Arguments,
    outside: OutsideValues | None = None,
) -> TrainingStep:
    """Raise CaptureError, with what differs, unless `module` does exactly what the model does, and
    the model's step leaves the values `outside` as they were. Return that step.

    The loss of the step is the sum of squares of all outputs that have gradients. Parameters,
    buffers, gradients and the random state are restored.
    """
    model, runnable = capture.model, with_autograd_contexts(module)
    # The model's own step comes first: if it fails, the graph is not to blame.
    # What reads a number of a parameter takes another path at another number.
    fills_zeros = not capture.value_reads
    original = _original_step(model, call, fills_zeros=fills_zeros)
    # Before another step: after two, a value that alternates would be as it was.
    if outside is not None:
        refuse_changes(outside)
    _refuse_sparse(original.gradients)
    captured = _captured_step(capture, runnable, capture.inputs.flatten(call))
    refuse_foreign_leaves(model, original.foreign_leaves, captured.foreign_leaves)
    # In the order of the step: where outputs differ gradients mostly do too, and the first one is
    # the nearest to its cause.
    again = partial(_original_step, model, call, fills_zeros=fills_zeros)
    for kind in KINDS:
        wanted, found = getattr(original, kind), getattr(captured, kind)
        name = first_difference(wanted, found)
        if name is None:
            continue
        # Two more steps: if something alternates, one of them differs from the first.
        repeats = [original, again(), again()]
        size = difference_text(wanted.get(name), found.get(name))
        if cuda_devices(model) and is_within_noise([getattr(r, kind) for r in repeats], found):
            logger.warning(_NOISE, kind, name, size)
            continue
        where, cause = _where(capture, runnable, call, kind, name), _likely_cause(repeats, kind)
        raise DifferenceError(
            f"the captured graph is not the model: {kind} differ in {name!r} for the same "
            f"seed ({size}){where}; {cause}"
        )
    return original


def refuse_changes(outside: OutsideValues) -> None:
    """Raise CaptureError if steps of the model have changed what its forward may read `outside`."""
    if changed := outside.changed() or outside.advanced():
        raise CaptureError(
            f"{changed}: the forward changes it, and no graph keeps such state; what each forward "
            "sets anew, set back at its end (to None, for example) or make an attribute of a "
            "module; if only the first forward sets it, run the model once before; what the "
            f"forward computes with, {COMPUTED_WITH}; {LOOKED_AT}"
        )


def _where(
    capture: Capture,
    module: fx.GraphModule,
    call: Arguments,
    kind: str,
    name: str,
) -> str:
    """Return, as part of a sentence, the module and the line where the difference is first seen."""
    if kind == "outputs":
        with restored_state(capture.model):
            inputs = capture.inputs.flatten(call)
            node = first_deviating_call(capture.model, module, inputs, call, is_same_tensor, SEED)
    else:
        node = first_reader(module, name)
    if node is None:
        operations = [node for node in module.graph.nodes if node.op not in ("output", "get_attr")]
        # No single node is known to deviate: the last operation stands for the forward.
        node = operations[-1]
    path = node.meta.get("module") or "the model's forward"
    line = f" ({node.meta['source']})" if node.meta.get("source") else ""
    return f", first seen in {path}{line}"


def _original_step(model: nn.Module, call: Arguments, *, fills_zeros: bool = False) -> TrainingStep:
    """Take a step of the model itself, as `training_step` does; CaptureError if it fails or returns
    fake tensors.
    """
    try:
        step = training_step(
            model, lambda: model(*call.args, **call.kwargs), fills_zeros=fills_zeros
        )
    except CaptureError:
        raise
    except Exception as error:
        reason = reason_of(error)
        raise ModelFailsError(
            "a training step of the model itself fails on the sample input: "
            f"{type(error).__name__}: {reason}; if it is only to be evaluated, leave the "
            "self-check out (self_check=False)"
        ) from error
    if any(isinstance(value, FakeTensor) for value in step.outputs.values()):
        raise CaptureError(
            "the model keeps tensors where no module shows them (a cache in a global, a class or "
            "another object), and now those of its recording, without values; empty that cache or "
            "start anew, and run the model once before it is compiled, or keep them in buffers"
        )
    if step.draws_in_backward:
        raise CaptureError(
            "the backward of the model draws random numbers, which would depend on the cut and on "
            "the schedule; draw them in the forward, and save them for the backward"
        )
    return step


def _likely_cause(steps: Sequence[TrainingStep], kind: str) -> str:
    """Return what may have made this kind of values of a graph differ from those of the model, of
    which these are steps.
    """
    first, *repeats = steps
    for repeated in repeats:
        if any(first_difference(getattr(first, kind), getattr(repeated, kind)) for kind in KINDS):
            return (
                "two steps of the model itself differ for the same seed, so it draws from what "
                "torch does not seed (secrets, os.urandom, the time), or keeps state outside its "
                "buffers, such as a place in an iterator: draw with torch, and what the forward "
                f"computes with, {COMPUTED_WITH}"
            )
    return (
        f"the model may {_CAUSES.get(kind, '')}change a buffer through .data after it was used, "
        "ask for the exact type of a tensor, which is another one while it is recorded (use "
        "isinstance(x, torch.Tensor)), or branch on something else that was not recorded: write to "
        "buffers first, or make that module one node (leaf)"
    )


def _captured_step(
    capture: Capture, module: fx.GraphModule, inputs: Sequence[Tensor]
) -> TrainingStep:
    """Take a step of the graph; DifferenceError if it fails, which that of the model did not, and
    CaptureError if it leaves what the next step would refuse.
    """

    def run() -> object:
        before = ModuleAttributes.of(capture.model)
        outputs = module(*inputs)
        _refuse_left_attributes(capture, before)
        return outputs

    try:
        return training_step(capture.model, run, fills_zeros=not capture.value_reads)
    except PipecompileError:
        raise
    except Exception as error:
        reason = reason_of(error)
        raise DifferenceError(
            f"the captured graph is not the model: its training step fails, where that of the "
            f"model does not ({type(error).__name__}: {reason}); make the module that this is "
            "about one node (leaf)"
        ) from error


def _refuse_left_attributes(capture: Capture, before: ModuleAttributes) -> None:
    """Raise CaptureError if the graph has left an attribute changed that the model has not."""
    paths = {module: path for path, module in capture.model.named_modules()}
    for module, name in changed_attributes(before, ModuleAttributes.of(capture.model)):
        if capture.must_stay(paths[module], name):
            where = f"{paths[module]}.{name}" if paths[module] else name
            if capture.runs_itself(paths[module]):
                raise CaptureError(
                    f"{where}: the forward changes it on some data only, so that later steps would "
                    f"not know whether it is as it was compiled; what it computes with, "
                    f"{COMPUTED_WITH}"
                )
            raise CaptureError(
                f"{where}: a hook, or another part that runs in each step, changes it, and the "
                "forward changes it back (by pop or clear), which no graph does; let the forward "
                "leave there what the hook keeps"
            )


def with_autograd_contexts(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that enters the model's autograd contexts, as the stages will."""
    return rewritten_copy(module, [EnterContexts()])


def rewritten_copy(module: fx.GraphModule, passes: Sequence[Pass]) -> fx.GraphModule:
    """Return a copy of `module`, rewritten by `passes`; both share parameters and modules."""
    # Nodes are copied, and values are not: a copy of the parameters would need the memory of the
    # model once more, and its gradients would be those of other tensors.
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    apply_passes(graph, passes)
    return fx.GraphModule(module, graph)


def _refuse_sparse(gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {name} is sparse, which stages cannot sum or pass on; make it "
                "dense (sparse=False)"
            )


def first_difference(original: dict[str, Tensor], captured: dict[str, Tensor]) -> str | None:
    """Return the first name whose tensors differ or of which one is missing; None if none is."""
    for name in [*original, *(captured.keys() - original.keys())]:
        if name not in original or name not in captured:
            return name
        if not is_same_tensor(original[name], captured[name]):
            return name
    return None
