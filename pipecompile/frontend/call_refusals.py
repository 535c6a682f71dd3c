"""Refusals of calls in a forward that no graph could repeat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointFunction

from pipecompile.errors import CaptureError
from pipecompile.frontend.calls import has_recorded_values
from pipecompile.frontend.nested_values import tensors_in
from pipecompile.frontend.packages import is_foreign
from pipecompile.frontend.recording import SYMBOLS, Recording
from pipecompile.frontend.refusals import (
    DataDependentError,
    UnsupportedError,
    hook_refusal,
    number_read_refusal,
    shape_refusal,
)
from pipecompile.graph.attributes import is_collecting, is_same_value
from pipecompile.graph.data_answers import TO_ARRAYS
from pipecompile.graph.side_effects import SideEffectTracker
from pipecompile.graph.storages import is_irregular, storage_key

__all__ = [
    "LAYOUT_QUESTIONS",
    "PLACE_QUESTIONS",
    "attribute_refusal",
    "hooks_of",
    "number_refusal",
    "own_state",
    "refuse_backward_hooks",
    "refuse_conversion",
    "refuse_data",
    "refuse_inner_checkpoint",
    "refuse_lasting_gradient",
    "refuse_lasting_hook",
    "refuse_lasting_write",
    "refuse_lost_gradients",
    "refuse_made_gradients",
    "refuse_made_history",
    "refuse_mode",
    "refuse_new_hooks",
    "refuse_place",
    "refuse_read_gradient",
    "refuse_replaced_state",
    "refuse_split_gradients",
    "refuse_swapped_state",
    "refuse_unseen_attribute",
]

# Their answers depend on how a tensor lies in memory.
LAYOUT_QUESTIONS = frozenset(
    {"is_contiguous", "stride", "storage_offset", "as_strided", "dim_order", "data_ptr"}
)
# Their answers depend on where a tensor begins, which is the same for no two microbatches.
PLACE_QUESTIONS = frozenset({"storage_offset", "data_ptr"})
# add_, _foreach_mul_, __iadd__, __setitem__
IN_PLACE = re.compile(
    r"_?[a-z]\w*[a-z0-9]_|__setitem__"
    r"|__i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the forward hooks of a module that change what it does."""
    tables = (module._forward_pre_hooks, module._forward_hooks)
    return tuple(hook for table in tables for hook in table.values() if not is_collecting(hook))


def refuse_new_hooks(recording: Recording, module: nn.Module, known: Sequence[Any]) -> None:
    """Raise UnsupportedError if a module that becomes one node has other hooks now than it will
    have in a step: the forward has registered one, or removed one.
    """
    if hooks_of(module) != known:
        raise UnsupportedError(
            f"{recording.where()}: the forward registers or removes a hook of a module that is one "
            "node, which a stage calls without the rest of the forward; register it before the "
            "model is compiled, or write into the forward what it does"
        )


def refuse_mode(recording: Recording, mode: object) -> None:
    """Raise CaptureError for a mode of the user's that sees or changes what operators do: an export
    would lose it too.
    """
    if not is_foreign(type(mode).__module__) and not isinstance(mode, SideEffectTracker):
        raise CaptureError(
            f"{recording.where()}: the forward runs under {type(mode).__name__}, a mode that no "
            "stage enters; enter it around the step, or make the module one node (leaf)"
        )


def refuse_place(recording: Recording, name: str, tensor: Tensor) -> None:
    """Raise CaptureError if the question `name` is where an input, or a part of it, begins."""
    inputs = {storage_key(value) for value in recording.inputs}
    if storage_key(tensor) in inputs:
        raise CaptureError(
            f"{recording.where()}: the forward asks where its input begins in memory "
            f"({name}), but each microbatch is another part of the batch; ask that of a copy "
            "(clone), or of shapes and strides only"
        )


def refuse_lasting_gradient(
    recording: Recording, tensor: Tensor, requires_grad: bool = True
) -> None:
    """Raise CaptureError if `tensor` would be another one after the forward: an input, which is
    the user's own, or a parameter or buffer.
    """
    if recording.is_state(tensor) and tensor.requires_grad != requires_grad:
        raise CaptureError(
            f"{recording.where()}: the forward sets requires_grad of a parameter, which "
            "stays so; set it outside the forward, or compute with a detached one (detach)"
        )
    if any(tensor is value for value in recording.inputs):
        raise CaptureError(
            f"{recording.where()}: the forward makes its input require a gradient, but a "
            "pipeline computes gradients for parameters only; let it take a detached copy "
            "(x.detach().requires_grad_())"
        )


def refuse_read_gradient(recording: Recording, tensor: Tensor) -> None:
    """Raise CaptureError if `tensor`, whose gradient the forward reads, is a parameter."""
    if tensor.is_leaf and tensor.requires_grad:
        raise CaptureError(
            f"{recording.where()}: the forward reads the gradient of a parameter, which is another "
            "one at each microbatch; keep what it needs of it in a buffer that is written between "
            "steps"
        )


def refuse_made_history(recording: Recording, leaves: Iterable[Tensor]) -> None:
    """Raise CaptureError if the forward has written to one of the `leaves`, of its state, what has
    a gradient.
    """
    for tensor in leaves:
        if not tensor.is_leaf and (name := recording.state_name(tensor)):
            raise CaptureError(
                f"the forward writes to {name} what has a gradient, so that the buffer keeps the "
                "graph of each microbatch; write a detached value (detach), or under no_grad"
            )


def refuse_made_gradients(leaves: Iterable[Tensor]) -> None:
    """Raise CaptureError if the forward has given any of the `leaves` a gradient."""
    if any(tensor.grad is not None for tensor in leaves):
        raise CaptureError(
            "the forward gives parameters gradients itself, with backward() or an assignment to "
            "grad, which a stage would lose; return that loss, and let loss_fn add it"
        )


def refuse_replaced_state(names: Sequence[str]) -> None:
    """Raise CaptureError if the forward has replaced tensors of the model, which have `names`."""
    if names:
        raise CaptureError(
            f"the forward replaces {', '.join(names)} by a new tensor, which no stage could see; "
            "write to it in place, for example with copy_, or, if the first forward only makes it "
            "in its final shape and type, run the model once before it is compiled"
        )


def refuse_unseen_attribute(
    recording: Recording, module: nn.Module, path: str, name: str, value: Any
) -> None:
    """Raise CaptureError if setting `name` to `value` changes the module at `path`, a node."""
    if name not in vars(module) or not is_same_value(vars(module)[name], value):
        raise CaptureError(
            f"{recording.where()}: the forward sets {name} of {path}, which is one node and would "
            "not see it; set it outside the forward, or use the functional form of that module"
        )


def attribute_refusal(recording: Recording, name: str) -> CaptureError:
    """Return the refusal of a forward that sets the attribute `name` of a tensor."""
    return CaptureError(
        f"{recording.where()}: the forward assigns to an attribute of a tensor ({name}); return a "
        "new tensor instead"
    )


def refuse_lasting_hook(recording: Recording, tensor: Tensor, hook: Any) -> None:
    """Raise CaptureError if a `hook` on `tensor` would be there after the forward, or be another
    one in each step.
    """
    if recording.is_state(tensor):
        raise CaptureError(
            f"{recording.where()}: the forward puts a hook on a parameter, which stays "
            "there, so that each forward adds one; register it once, outside the forward"
        )
    if has_recorded_values(hook):
        raise UnsupportedError(
            f"{recording.where()}: a hook encloses a value of the forward, which is "
            "another in each step; let it compute from the gradient and from constants"
        )


def refuse_lasting_write(recording: Recording, name: str, args: Any, kwargs: Any) -> None:
    """Raise CaptureError before the call `name` writes to a tensor that is neither of the forward
    nor the model's: it has values, and would have others after the capture.
    """
    written = [kwargs.get("out")]
    if IN_PLACE.fullmatch(name):
        written.append(args[0] if args else None)
    if any(_has_values(each) for each in tensors_in(written)):
        raise CaptureError(
            f"{recording.where()}: the forward writes to a tensor attribute in place; write to a "
            "copy, or make it a buffer with register_buffer"
        )


def refuse_inner_checkpoint(recording: Recording, function: Any) -> None:
    """Raise CaptureError for a reentrant checkpoint inside of a module that is one node: its
    backward asks for all gradients at once, and those of inputs are wanted alone.
    """
    if function is CheckpointFunction:
        raise CaptureError(
            f"{recording.where()}: checkpoint(use_reentrant=True) inside of a module that is one "
            "node cannot be differentiated for its inputs alone; give it use_reentrant=False"
        )


def refuse_lost_gradients(recording: Recording, inputs: Sequence[Any], result: Any) -> None:
    """Raise CaptureError for a region of a reentrant checkpoint that torch gives no gradient,
    since none of its inputs needs one, though parameters inside do.
    """
    if any(value.requires_grad for value in tensors_in(result)) and not any(
        value.requires_grad for value in tensors_in(tuple(inputs))
    ):
        raise CaptureError(
            f"{recording.where()}: no input of checkpoint(use_reentrant=True) needs a gradient, so "
            "the parameters inside get none; give it use_reentrant=False"
        )


def _has_values(tensor: Tensor) -> bool:
    # Nested tensors, and those in a function that is transformed, are refused by what they are.
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (isinstance(tensor, FakeTensor) or is_wrapped or is_irregular(tensor))


def refuse_data(recording: Recording, result: Any, name: str) -> None:
    """Raise DataDependentError if `result` of the call `name` depends on values of data."""
    # An unbacked symbol stands for a number that fake tensors do not have.
    if isinstance(result, SYMBOLS) and free_unbacked_symbols(result):
        raise number_refusal(recording, name)
    if any(free_unbacked_symbols(tensor) for tensor in tensors_in(result)):
        hook = recording.running_hook()
        raise (
            hook_refusal(recording.where(), hook)
            if hook
            else shape_refusal(recording.where(), name)
        )


def refuse_conversion(recording: Recording, func: Any, args: Sequence[Any]) -> None:
    """Raise DataDependentError for a call that makes an array, or a number in text, of a fake."""
    # Without a format a fake is told as one: text that nothing is computed with.
    is_number = func is Tensor.__format__ and args[1:] != ("",) and args[0].dim() == 0
    if (is_number or func in TO_ARRAYS) and isinstance(args[0], FakeTensor):
        raise number_refusal(recording, func.__name__)


def number_refusal(recording: Recording, name: str) -> DataDependentError:
    """Return the refusal of the call `name`, which reads a number out of a tensor."""
    hook, where = recording.running_hook(), recording.where()
    return hook_refusal(where, hook) if hook else number_read_refusal(where, name)


def refuse_split_gradients(recording: Recording, root: nn.Module) -> None:
    """Raise CaptureError for a parameter of which a reentrant checkpoint and something else give
    the gradient. Torch adds each part to `grad` by itself, and the graph their sum, which rounds
    otherwise behind the first microbatch.
    """
    nodes = [node for node in recording.graph.nodes if node.op != "get_attr"]
    if not any("checkpoint" in node.meta for node in nodes):
        return
    places: dict[int, int | None] = {}
    for node in nodes:
        place = node.meta.get("checkpoint")
        for name, parameter in _parameters_of(node, root):
            if places.setdefault(id(parameter), place) != place:
                raise CaptureError(
                    f"{name} is used in a region of checkpoint(use_reentrant=True) and elsewhere "
                    "too, and its gradient would be rounded otherwise; give use_reentrant=False"
                )


def _parameters_of(node: fx.Node, root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained parameters that a node reads, by name."""
    if node.op == "call_module":
        path = str(node.target)
        for name, parameter in root.get_submodule(path).named_parameters(path):
            if parameter.requires_grad:
                yield name, parameter
    for source in node.all_input_nodes:
        if source.op == "get_attr" and source.meta["val"].requires_grad:
            yield str(source.target), source.meta["val"]


def refuse_swapped_state(
    recording: Recording, module: nn.Module, expected_state: Mapping[nn.Module, list[Tensor]]
) -> None:
    """Raise UnsupportedError if a module has other tensors than `expected_state` says."""
    # torch.func.functional_call swaps tensors; the node would run with the module's own.
    for part in module.modules():
        expected = expected_state.get(part)
        if expected is not None and not is_same_value(own_state(part), expected):
            raise UnsupportedError(
                f"{recording.where()}: the module is called with tensors in the place of "
                "its parameters or buffers (functional_call), which its node would not have; "
                "call the function that it stands for"
            )


def refuse_backward_hooks(module: nn.Module, where: str) -> None:
    """Raise CaptureError if a module that is taken apart, at `where`, has a backward hook."""
    if module._backward_hooks or module._backward_pre_hooks:
        raise CaptureError(
            f"{where}: a backward hook is registered on a module that is taken apart, so it would "
            "not be called; make the module one node (leaf), or register the hook on a module of "
            "torch.nn, or on a tensor in the forward"
        )


def own_state(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers in a module's own tables."""
    return [
        tensor
        for table in (module._parameters, module._buffers)
        for tensor in table.values()
        if tensor is not None
    ]
