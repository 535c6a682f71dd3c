"""The self-check: one seeded training step of a graph and of its model, compared bit for bit.

    the same seed ─┬─▶ step of the model ──▶ outputs, gradients, buffers ─┐
                   └─▶ step of the graph ──▶ outputs, gradients, buffers ─┴─▶ equal, or an error

The api uses the first capture that passes; `pipecompile verify` compares whole pipelines.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import captures
from pipecompile.frontend.captured_graph import Capture, batch_size
from pipecompile.frontend.data_probe import cuda_devices
from pipecompile.frontend.deviation import first_deviating_call, first_reader
from pipecompile.frontend.digest import digest
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.attributes import attributes_restored
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import storage_key
from pipecompile.passes.autograd_context import EnterContexts
from pipecompile.passes.contract import apply_passes

__all__ = ["Proof", "check_capture", "proven_capture", "with_autograd_contexts"]


class DifferenceError(CaptureError):
    """A graph differs from its model; another way to capture it may give one that does not."""


class ModelFailsError(CaptureError):
    """The model itself, and not its graph, cannot take a training step."""


@dataclass(frozen=True)
class _TrainingStep:
    """All that a training step leaves, by name; `buffers` hold written parameters too."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Proof:
    """The batch sizes at which a capture was found equal to its model, and the time this took."""

    batches: tuple[int, ...]
    seconds: float


def proven_capture(
    model: nn.Module, call: Arguments, leaf: Sequence[str] = ()
) -> tuple[Capture, fx.GraphModule, Proof]:
    """Return the best capture that equals the model, its graph for `call`, and the proof.

    A training step on `call` is compared and, if the graph is for several batch sizes, one on
    another number of the same samples. CaptureError if no capture equals the model.
    """
    failures: list[CaptureError] = []
    seen: set[str] = set()
    candidates = captures(model, call, leaf)
    while True:
        try:
            candidate = next(candidates)
            module = candidate.instantiate(call)
            # Several ways often record the same graph; it is compared once.
            if digest(module) in seen:
                continue
            seen.add(digest(module))
            start = time.perf_counter()
            batches = (
                _check_at(candidate, module, call),
                *_check_another_batch(candidate, call),
            )
            return candidate, module, Proof(batches, time.perf_counter() - start)
        except StopIteration:
            # The failure of the best way says best what stands in the way.
            raise failures[0] from None
        except (DifferenceError, UnsupportedError) as error:
            failures.append(error)


def _check_at(capture: Capture, module: fx.GraphModule, call: Arguments) -> int:
    """Check the graph for `call`; return the batch size."""
    check_capture(capture, module, call)
    return batch_size(capture.inputs.flatten(call))


def _check_another_batch(capture: Capture, call: Arguments) -> Iterator[int]:
    """Check a second batch size if the guards allow one; yield it."""
    batch = batch_size(capture.inputs.flatten(call))
    others = [
        size
        # Half the batch is the cheapest. Guards that exclude it may allow a neighbour.
        for size in (batch // 2, batch - 1, batch + 1)
        if size and not capture.guards.violation(size)
    ]
    if others and not capture.guards.is_fixed:
        resize = partial(_resized, size=others[0])
        other = Arguments(*pytree.tree_map_only(Tensor, resize, (call.args, call.kwargs)))
        # A model that is for some sizes only may fail at this one; then it will not run there.
        with suppress(ModelFailsError):
            yield _check_at(capture, capture.instantiate(other), other)


def _resized(tensor: Tensor, size: int) -> Tensor:
    """Return the first `size` samples; if there are fewer, they are repeated."""
    return tensor[torch.arange(size) % tensor.shape[0]] if tensor.dim() else tensor


def check_capture(capture: Capture, module: fx.GraphModule, call: Arguments) -> None:
    """Raise CaptureError, with what differs, unless `module` does exactly what the model does.

    The loss of the step is the sum of squares of all outputs that have gradients. Parameters,
    buffers, gradients and the random state are restored.
    """
    model, runnable, written = (
        capture.model,
        with_autograd_contexts(module),
        _written_parameters(module),
    )
    # The model's own step comes first: if it fails, the graph is not to blame.
    original = _original_step(model, written, call)
    _refuse_sparse(original.gradients)
    captured = _training_step(model, written, lambda: runnable(*capture.inputs.flatten(call)))
    for kind in ("outputs", "gradients", "buffers"):
        name = _first_difference(getattr(original, kind), getattr(captured, kind))
        if name is not None:
            where = _where(capture, runnable, written, call, kind, name)
            raise DifferenceError(
                f"the captured graph is not the model: {kind} differ in {name!r} for the same "
                f"seed{where}; the model may keep state outside its buffers, or branch on "
                "something that was not recorded: keep it in a buffer, or make that module one "
                "node (leaf)"
            )


def _where(
    capture: Capture,
    module: fx.GraphModule,
    written: Sequence[Tensor],
    call: Arguments,
    kind: str,
    name: str,
) -> str:
    """Return, as part of a sentence, the module and the line where the difference is first seen."""
    if kind == "outputs":
        with _restored_state(capture.model, written):
            inputs = capture.inputs.flatten(call)
            node = first_deviating_call(capture.model, module, inputs, call, _is_same)
    else:
        node = first_reader(module, name)
    if node is None:
        operations = [node for node in module.graph.nodes if node.op not in ("output", "get_attr")]
        # No single node is known to deviate: the last operation stands for the forward.
        node = operations[-1]
    path = node.meta.get("module") or "the model's forward"
    line = f" ({node.meta['source']})" if node.meta.get("source") else ""
    return f", first seen in {path}{line}"


def _original_step(model: nn.Module, written: Sequence[Tensor], call: Arguments) -> _TrainingStep:
    """Take a step of the model itself; CaptureError if it fails or returns fake tensors."""
    try:
        step = _training_step(model, written, lambda: model(*call.args, **call.kwargs))
    except Exception as error:
        raise ModelFailsError(
            f"a training step of the model itself fails on the sample input: {error}; if it is "
            "only to be evaluated, leave the self-check out (self_check=False)"
        ) from error
    if any(isinstance(value, FakeTensor) for value in step.outputs.values()):
        raise CaptureError(
            "the model keeps tensors where no module shows them (a cache in a global or a "
            "closure), and now those of its recording; keep them in buffers, and build the "
            "model again"
        )
    return step


def with_autograd_contexts(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that enters the model's autograd contexts, as the stages will."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    apply_passes(graph, [EnterContexts()])
    return fx.GraphModule(module, graph)


def _refuse_sparse(gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {name} is sparse, which stages cannot sum or pass on; make it "
                "dense (sparse=False)"
            )


def _first_difference(original: dict[str, Tensor], captured: dict[str, Tensor]) -> str | None:
    """Return the first name under which there is another tensor, or one only, None if none is."""
    for name in [*original, *(captured.keys() - original.keys())]:
        if name not in original or name not in captured:
            return name
        if not _is_same(original[name], captured[name]):
            return name
    return None


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are equal in shape, type and every element; NaN equals NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


@torch.enable_grad()
def _training_step(
    model: nn.Module, written: Sequence[Tensor], run: Callable[[], Any]
) -> _TrainingStep:
    """Return what one seeded step leaves, of which `run` is the forward.

    `written` are parameters that the forward writes to. The state of `model` is restored.
    """
    with _restored_state(model, written):
        # Graph and model draw in the same order, so one global seed gives both the same numbers.
        torch.manual_seed(0)
        outputs = tensor_leaves(run())
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        gradients = _gradients(outputs, [parameter for _, parameter in trainable])
        named_gradients = zip(trainable, gradients, strict=True)
        state = (*model.named_buffers(), *_named_parameters(model, written))
        return _TrainingStep(
            outputs={f"output {index}": value.detach() for index, value in enumerate(outputs)},
            gradients={name: g for (name, _), g in named_gradients if g is not None},
            buffers={name: value.clone() for name, value in state},
        )


def _gradients(outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of the loss, by a whole backward.

    `torch.autograd.grad` would not do: reentrant checkpoints, for example, only know `backward`.
    """
    differentiable = [value for value in outputs if value.requires_grad]
    gradients_before = [parameter.grad for parameter in parameters]
    # Hooks that run after a gradient is accumulated may step an optimizer, so they are taken away.
    hooks = [dict(parameter._post_accumulate_grad_hooks or {}) for parameter in parameters]
    try:
        for parameter, own_hooks in zip(parameters, hooks, strict=True):
            parameter.grad = None
            if own_hooks:
                parameter._post_accumulate_grad_hooks.clear()
        if differentiable:
            # `abs` makes complex outputs real; `float` gives all sums one type, to be stacked.
            squares = [value.abs().square().sum().float() for value in differentiable]
            torch.stack(squares).sum().backward()
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient, own_hooks in zip(parameters, gradients_before, hooks, strict=True):
            parameter.grad = gradient
            if own_hooks:
                parameter._post_accumulate_grad_hooks.update(own_hooks)


def _written_parameters(module: fx.GraphModule) -> list[Tensor]:
    """Return the parameters that a forward may write to, as an embedding with max_norm does."""
    written = {
        storage_key(tensor) for node in module.graph.nodes for tensor in node.meta["mutates"]
    }
    suspected: list[Tensor] = []
    # The meta holds fakes; which parameters they stand for is unknown, so all are suspected.
    for node in module.graph.nodes:
        if node.op == "call_module" and node.meta["mutates"]:
            suspected.extend(module.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr" and storage_key(node.meta["val"]) in written:
            suspected.append(operator.attrgetter(str(node.target))(module))
    return [value for value in suspected if isinstance(value, nn.Parameter)]


def _named_parameters(model: nn.Module, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield those of the model's parameters that are among `tensors`, with their names."""
    wanted = {id(tensor) for tensor in tensors}
    for name, parameter in model.named_parameters():
        if id(parameter) in wanted:
            yield name, parameter


@contextmanager
def _restored_state(model: nn.Module, written: Sequence[Tensor]) -> Iterator[None]:
    """Restore buffers, `written` parameters, attributes and the random state after the block."""
    state = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *written)]
    with torch.random.fork_rng(devices=cuda_devices(model)), attributes_restored(model):
        try:
            yield
        finally:
            # In place, since the model's tables, and optimizers, refer to these tensors.
            with torch.no_grad():
                for tensor, before in state:
                    tensor.copy_(before)
