"""The user's loss function, as the last stage calls it for each microbatch.

It is given the outputs and the target. Whatever else it reads of the model would be right in one
process only, and there only until a forward writes to it: on other ranks the model is as it was
built.

    loss_fn(outputs, target)                     right
    … + model.head.weight.detach().norm()        refused: the weight of which rank, at which step?
    … * model.mask                               refused if the forward sets it: in which one?
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from pipecompile.errors import InputError, PipecompileError, reason_of
from pipecompile.frontend.attribute_reads import getter_patched
from pipecompile.frontend.batch_counts import OUTPUT, refuse_counts, value_of_loss
from pipecompile.frontend.callable_state import callable_restored, can_be_restored
from pipecompile.frontend.other_reduction import other_reduction
from pipecompile.frontend.signature import OutputStructure
from pipecompile.frontend.target import LossFunction, Target
from pipecompile.graph.attributes import PLAIN
from pipecompile.graph.pytrees import map_tensors
from pipecompile.graph.storages import is_irregular, storage_key
from pipecompile.runtime.shards import local_part

__all__ = ["UserLoss", "loss_of"]

logger = logging.getLogger("pipecompile.training")


@dataclass
class UserLoss:
    """Calls the loss function of `target` with output tensors as the model returns them.

    `written` are the names of the model's buffers that its forward writes to, and `assigned` the
    attributes that it sets, by the path of their module and name. Others are constants, which a
    loss may read.
    """

    structure: OutputStructure
    target: Target
    written: Collection[str]
    assigned: Collection[tuple[str, str]]
    _calls: int = field(default=0, init=False)

    def __call__(self, outputs: Sequence[Tensor], wanted: Any) -> Any:
        """Return what the function returns; InputError if it raises or reads state of the model."""
        self._calls += 1
        # Calls may change a loss that is a module, or moves on what nobody can put back.
        is_tried = self._calls == 1 and self.target.loss_module is None
        if is_tried and can_be_restored(self.target.loss_fn):
            self._check_reduction(outputs, wanted)
        # Looking at each operator takes time, and a loss may begin to read in the middle of a
        # training: the calls 1, 2, 4, 8, … are looked at.
        if self._calls.bit_count() > 1:
            return loss_of(self.structure, self.target.trained_by, outputs, wanted)
        with self._refusing_reads(outputs):
            return loss_of(self.structure, self.target.trained_by, outputs, wanted)

    def _check_reduction(self, outputs: Sequence[Tensor], wanted: Any) -> None:
        """Raise InputError if a number in the target counts the whole batch; warn of a loss that is
        of another reduction.
        """
        reduction = self.target.loss_reduction
        if reduction == "weighted":
            return
        rows = max((len(each) for each in outputs if each.dim()), default=0)
        given = {OUTPUT: self.structure.unflatten(outputs), "the target": wanted}

        def loss(given: Mapping[str, Any]) -> Any:
            # It may write to the outputs as well.
            output, wanted = given.values()
            return self.target.tried_loss(map_tensors(torch.clone, output), wanted)

        def changed(change: Callable[[Tensor], Tensor]) -> Mapping[str, Any]:
            return {name: tree_map_only(Tensor, change, part) for name, part in given.items()}

        def loss_of_rows(begin: int, end: int) -> float | None:
            def cut(tensor: Tensor) -> Tensor:
                return tensor[begin:end] if tensor.dim() and len(tensor) == rows else tensor

            return value_of_loss(loss, changed(cut))

        devices = [each.device.index for each in outputs if each.is_cuda]
        # These calls are no calls of the step: the loss counts none, draws for none, and is
        # compiled for no other shape.
        kept = callable_restored(self.target.loss_fn)
        with torch.random.fork_rng(devices), kept, _eagerly():
            if reduction == "mean":
                refuse_counts(loss, given, changed(_twice))
            # Halves, and not more than there is: no step needs more memory for it.
            if half := rows // 2:
                together = loss_of_rows(0, 2 * half)
                parts = [loss_of_rows(0, half), loss_of_rows(half, 2 * half)]
                if text := other_reduction(self.target, together, parts):
                    logger.warning(text)

    @contextmanager
    def _refusing_reads(self, outputs: Sequence[Tensor]) -> Iterator[None]:
        """Raise InputError when code in the block reads state of the model."""
        parameters = self.target.model.named_parameters()
        # Also those that are None so far, which no operator reads.
        gradients = {id(value): f"{name}.grad" for name, value in parameters}
        state = self._state(outputs)
        modules = dict(self.target.model.named_modules()) if self.assigned else {}
        attributes = {
            (id(modules[path]), name): f"{path}.{name}".lstrip(".")
            for path, name in self.assigned
            if path in modules
        }
        # Two modes: the dispatcher does not see reads of `.grad`, which are no operators. What
        # operators read is compared by storage, since a loss may hold an earlier view of a weight.
        with _RefuseGradients(gradients), _RefuseReads(state), _refused_attributes(attributes):
            yield

    def _state(self, outputs: Sequence[Tensor]) -> dict[int, str]:
        """Return the names of parameters, their gradients and written buffers by storage, without
        storages of `outputs`.
        """
        model, state = self.target.model, dict[int, str]()
        buffers = (each for each in model.named_buffers() if each[0] in self.written)
        for name, value in chain(model.named_parameters(), buffers):
            state[storage_key(local_part(value))] = name
            if value.grad is not None:
                state[storage_key(local_part(value.grad))] = f"{name}.grad"
        # A model may return a parameter.
        for output in outputs:
            state.pop(storage_key(output), None)
        return state


@contextmanager
def _refused_attributes(names: Mapping[tuple[int, str], str]) -> Iterator[None]:
    """Raise InputError when code in the block reads an attribute that `names` has, by the id of its
    module and its own name.
    """
    if not names:
        yield
        return

    def get_attribute(module: nn.Module, name: str) -> Any:
        if (id(module), name) in names:
            raise InputError(
                f"loss_fn reads {names[id(module), name]}, which the model's forward sets: stages "
                "do not keep that, and may have begun other microbatches; return it from the "
                "forward, beside the output"
            )
        return object.__getattribute__(module, name)

    with getter_patched(nn.Module, get_attribute):
        yield


class _RefuseReads(TorchDispatchMode):
    """Raises InputError when an operator reads one of the storages `names`."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            # A subclass may have no storage, and neither has what a loss makes sparse.
            if type(value) in (Tensor, torch.nn.Parameter) and not is_irregular(value):
                _refuse(self._names.get(storage_key(value)))
        return func(*args, **(kwargs or {}))


class _RefuseGradients(TorchFunctionMode):
    """Raises InputError when code asks one of the parameters `names` for its gradient."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is Tensor.grad:
            _refuse(self._names.get(id(args[0])))
        return func(*args, **(kwargs or {}))


def _refuse(name: str | None) -> None:
    """Raise InputError for the name of what a loss reads, if it is the model's."""
    if name is not None:
        raise InputError(
            f"loss_fn reads {name} of the model, which on another rank is as it was built, and may "
            "change between microbatches: return it from the model's forward, give as loss_fn an "
            "nn.Module with a tensor of its own, or leave a penalty on parameters to the "
            "optimizer's weight decay"
        )


def loss_of(
    structure: OutputStructure, loss: LossFunction, outputs: Sequence[Tensor], wanted: Any
) -> Any:
    """Return what the loss function makes of the output tensors of a microbatch; InputError with
    what it raised as the cause.
    """
    output = structure.unflatten(outputs)
    try:
        return loss(output, wanted)
    # Callers know these types, and try with less memory after the second one.
    except (PipecompileError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {reason_of(error)}"
        if not _takes_two(loss):
            raise InputError(
                f"loss_fn takes other arguments than (output, target) ({raised}); if it needs no "
                "target, write loss_fn=lambda output, _: …"
            ) from error
        # A function that needs a target raises one of these where it is given None.
        if wanted is None and isinstance(error, (TypeError, AttributeError)):
            raise InputError(
                f"loss_fn cannot do without a target ({raised}); give the step one: "
                "step(batch, target)"
            ) from error
        # A tensor with one weight for each class may be as long as the batch by chance.
        advice = (
            "; a tensor that belongs to no sample stays whole by target_batch_dims, as (0, None)"
        )
        several = sum(isinstance(leaf, Tensor) for leaf in tree_leaves(wanted)) > 1
        given = [tree_map(_description, value) for value in (output, wanted)]
        raise InputError(
            f"loss_fn raised {raised}; for a microbatch it was given the output {given[0]} and the "
            f"target {given[1]}{advice if several else ''}"
        ) from error


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called with two arguments, as far as it says."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a function of C may say nothing
        return True
    return True


def _description(value: object) -> object:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return value if isinstance(value, PLAIN) else f"a {type(value).__name__}"


def _eagerly() -> AbstractContextManager[None]:
    """Return a context in which what torch has compiled runs as it was written."""
    # Without dynamo nothing has been compiled, and its import takes a second.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def _twice(tensor: Tensor) -> Tensor:
    """Return a tensor with its rows twice; a number as it is."""
    return torch.cat([tensor, tensor]) if tensor.dim() else tensor
