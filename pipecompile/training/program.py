"""The model's graph cut into stages, and what the model must still be when the stages run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from hashlib import blake2b
from itertools import compress
from operator import attrgetter, is_
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from pipecompile.codegen.regions import EncodedRuns, Regions
from pipecompile.codegen.stages import BoundaryTensor, StageModule, emit
from pipecompile.errors import InputError
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.compared_value import MAPPINGS
from pipecompile.frontend.microbatch import InputShapes, MicrobatchSizes
from pipecompile.frontend.packages import is_installed, package_of
from pipecompile.frontend.signature import OutputStructure
from pipecompile.graph.attributes import (
    HOOKS,
    TABLES,
    AttributeItems,
    deep_copy,
    hook_codes,
    is_collecting,
    settings_of,
)
from pipecompile.graph.autograd_context import current_autocast, default_device_type
from pipecompile.graph.gradient_hooks import has_hook, has_joint_hook
from pipecompile.graph.loss_module import held_loss, joined_modules
from pipecompile.graph.ties import Tie, ties_of
from pipecompile.ir.plan import BatchNormUpdate
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.device_constants import LeaveMeta
from pipecompile.runtime.messages import BoundaryShape
from pipecompile.training.model_changes import (
    BACKWARD_HOOKS,
    changed_parameter,
    changed_setting,
)

__all__ = ["Program", "modes_of_both"]


class Program:
    """A graph of the model cut as the plan says, captured while its modules were in the modes
    `modes`. What was captured on the meta device runs on `device`. Nodes of `copied` run in each
    stage that reads them.
    """

    def __init__(
        self,
        captured: Capture,
        module: fx.GraphModule,
        assignment: Mapping[str, int],
        regions: Regions,
        encoded_runs: EncodedRuns,
        batch_norm: BatchNormUpdate,
        device: torch.device,
        copied: Collection[str] = (),
    ) -> None:
        self.captured = captured
        self._loss = held_loss(module)
        self._autocast, self._default_dtype = current_autocast(), torch.get_default_dtype()
        self._default_device = default_device_type()
        self.remember()
        self.modes = self.current_modes()
        # Before it is cut: all stages of the graph then make their tensors where they run.
        apply_passes(module.graph, [LeaveMeta(device)])
        self.stages: tuple[StageModule, ...] = emit(
            module, assignment, regions, encoded_runs, batch_norm, copied
        )
        # After the cut, which puts each node's stage into the graph that ties are read from.
        self.ties: dict[str, Tie] = ties_of(module, module.graph, captured.first_names)
        self._tied = {name for name, tie in self.ties.items() if len(tie.stages) > 1}
        values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        self.inputs = [BoundaryShape((tuple(value.shape), value.dtype, False)) for value in values]
        self._input_strides = [value.stride() for value in values]

    @property
    def input_shapes(self) -> InputShapes:
        """The shapes of the model's inputs in one microbatch."""
        return [shape for shape, *_ in self.inputs]

    @property
    def outputs(self) -> OutputStructure:
        """How the model's output is put together from its output tensors."""
        return self.captured.outputs

    def boundary_shapes(self) -> list[list[BoundaryShape]]:
        """Return the tensors that enter each stage."""
        return [self.inputs, *(list(map(_shape, stage.inputs)) for stage in self.stages[1:])]

    def check_inputs(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Raise InputError if the inputs of a microbatch, as the user gave them, are not those that
        the graph is for.
        """
        if self.captured.asks_layout:
            for tensors in rows:
                self._check_layouts(tensors)
        if any(answer.inputs for answer in self.captured.constant_answers):
            self._check_answers(rows)

    def _check_layouts(self, tensors: Sequence[Tensor]) -> None:
        """Raise InputError if an input lies in memory in another way than that of the sample, and
        the forward asks for that.
        """
        names = self.captured.inputs.tensor_names
        for name, tensor, planned in zip(names, tensors, self._input_strides, strict=True):
            own = tensor.stride()
            # The stride of a dimension of size 1 is never used.
            if any(size > 1 and own[i] != planned[i] for i, size in enumerate(tensor.shape)):
                raise InputError(
                    f"{name} has strides {own}, but that of sample_input {planned}, and "
                    f"{self.captured.asks_layout} asks for them; give tensors that lie in memory "
                    "alike, for example by .contiguous()"
                )

    def _check_answers(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Raise InputError if the forward would read something else out of the inputs of a
        microbatch than it did of the sample's, and so go another way.
        """
        for number, tensors in enumerate(rows):
            other = self.captured.other_answer(tensors)
            if other is not None:
                raise InputError(
                    f"{other.where} read {other.answer!r} out of {' and '.join(other.inputs)} of "
                    f"sample_input, but reads something else of microbatch {number}; give batches "
                    "like the sample, or compile with a sample whose first microbatch is like this "
                    "one (with padding, for example)"
                )

    def current_modes(self) -> tuple[bool, ...]:
        """Return which of the modules are in train mode now."""
        return tuple(map(_mode_of, self._modules))

    @property
    def modules_in_train_mode(self) -> list[str]:
        """The paths of the modules that are in train mode in this program."""
        paths = (path for path, _ in self._named_modules)
        return list(compress(paths, self.modes))

    def remember(self) -> None:
        """Remember the model as it is now, for `check_unchanged`, without the values of tensors and
        what its forward sets.
        """
        model = self.captured.model
        # Listed once: a step of a small model takes a millisecond, and so does the list.
        self._named_modules = tuple(model.named_modules())
        self._modules = [module for _, module in self._named_modules]
        self._outside_values = self.captured.outside_values()
        if self._outside_values.looks_past_classes:
            # What the forward read of modules was not seen.
            self.captured = replace(self.captured, read_attributes=None)
            self._outside_values = self.captured.outside_values()
        self._assigned = list(self.captured.assigned_values())
        self._items = _items(self.captured)
        self._settings = dict(_settings(self.captured))
        # Of the loss only these: it runs as it is, and may change what else it has.
        self._named_parameters = list(joined_modules(model, self._loss).named_parameters())
        # The parameters of the model and of the loss, as they are if they are unchanged.
        self.parameters = [parameter for _, parameter in self._named_parameters]
        self._trained_as = self._now_trained_as()

    def array_digests(self) -> dict[str, str]:
        """Return a digest of each array of numpy that the forward may read, by where it is."""
        found: dict[str, str] = {}
        for where, value in (*self._settings.items(), *self._outside_values.values):
            arrays = [each for each in _leaves(value) if isinstance(each, np.ndarray)]
            total = blake2b(digest_size=8)
            for array in arrays:
                # Of objects there are only addresses, which differ between processes.
                content = b"" if array.dtype.hasobject else array.tobytes()
                total.update(f"{array.dtype}{array.shape}".encode() + content)
            if arrays:
                found[where] = total.hexdigest()
        return found

    def check_unchanged(self) -> None:
        """Raise InputError if the model is not as it was when the graph was captured, or autocast,
        the default dtype or the default device around it is not.
        """
        if current_autocast() != self._autocast:
            raise InputError(
                "autocast is not as it was when the model was compiled; compile and step under "
                "the same autocast, or put it into the model's forward"
            )
        if torch.get_default_dtype() is not self._default_dtype:
            raise InputError(
                f"torch's default dtype is {torch.get_default_dtype()}, but was "
                f"{self._default_dtype} when the model was compiled: tensors that its forward "
                "makes would have another type; set it back, or compile the model again"
            )
        # What was captured on the meta device makes its tensors where it runs.
        default_device = default_device_type()
        if default_device != self._default_device != "meta":
            raise InputError(
                f"torch's default device is {default_device}, but was {self._default_device} when "
                "the model was compiled: tensors that its forward makes would lie elsewhere; set "
                "it back, or compile the model again"
            )
        if stale := next((read for read in self.captured.value_reads if not read.holds), None):
            raise InputError(stale.change)
        # A conversion of the model replaces buffers too, but its parameters say it best.
        if self._now_trained_as() != self._trained_as:
            self._refuse_changed_parameter()
        # Objects are compared first, in one pass, since a small step takes only a millisecond.
        if not self._items.are_the_same():
            self._check_settings()
            # They are equal, and the next steps compare the objects that are there now.
            self._items = _items(self.captured)
        if other := next((each for each in self._assigned if not each.is_allowed), None):
            raise InputError(
                f"{other.text}, and the graph may have that in it; compile the model again, or "
                "keep what changes in a buffer and write to it in place"
            )
        if changed := self._outside_values.changed():
            raise InputError(
                f"{changed} has changed since the model was compiled, and the graph has its old "
                "value; compile the model again, or keep what changes in a buffer"
            )
        self._check_loss()

    def _check_loss(self) -> None:
        """Raise InputError if the loss has other parameters."""
        if self._loss is None:
            return
        now = list(self._loss.parameters())
        before = self.parameters[len(self._named_parameters) - len(now) :]
        if not all(map(is_, now, before)):
            raise InputError(
                "loss_fn has other parameters than when the model was compiled; compile it again"
            )

    def _now_trained_as(self) -> tuple[list[bool], list[torch.dtype]]:
        """Return of each parameter whether it is trained, and its type."""
        return list(map(_is_trained, self.parameters)), list(map(_dtype_of, self.parameters))

    def _refuse_changed_parameter(self) -> None:
        for (name, parameter), trained, dtype in zip(
            self._named_parameters, *self._trained_as, strict=True
        ):
            if (parameter.requires_grad, parameter.dtype) != (trained, dtype):
                raise InputError(changed_parameter(name, parameter, trained, dtype))

    def refuse_hooks(self) -> None:
        """Raise InputError for hooks on parameters that would run too often, or on parts of a sum.

        A post-accumulate hook runs after each microbatch, while later backwards need the weights;
        a hook on a tied parameter would see the gradient of one stage, and so would a hook on the
        gradients of several parameters.
        """
        # Most have none, which is found without a loop in Python.
        if any(map(_hooks_of, self.parameters)) or any(map(_late_hooks_of, self.parameters)):
            for name, parameter in self._named_parameters:
                _refuse_hooks_of(name, parameter)
        if not self._tied:
            return
        for name, parameter in self._named_parameters:
            if name in self._tied and has_hook(parameter):
                raise InputError(
                    f"{name} has a hook on its gradient, but is tied over stages "
                    f"{list(self.ties[name].stages)}, each of which has a part of it; remove the "
                    "hook, and change the gradient after `step`"
                )

    def _check_settings(self) -> None:
        """Raise InputError if a setting has another value."""
        if changed := changed_setting(self._settings, dict(_settings(self.captured))):
            raise InputError(changed)

    def joined(self, values: Sequence[Sequence[Tensor]], sizes: MicrobatchSizes) -> Any:
        """Return the output tensors of each microbatch as one output of the model.

        InputError if one has no dimension that is known to be the batch, to be joined along.
        """
        joined = []
        dims = self.captured.output_dims(values[0])
        for index, (parts, dim) in enumerate(zip(zip(*values, strict=True), dims, strict=True)):
            if dim is None and parts[0].dim():
                raise InputError(
                    f"output {index} of shape {tuple(parts[0].shape)} has no dimension that is "
                    "known to be the batch, so the outputs of the microbatches cannot be joined; "
                    "return it per sample, or evaluate the model itself"
                )
            joined.append(sizes.join(parts, dim or 0))
        return self.outputs.unflatten(joined)

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Put modules into the modes of this program for the block."""
        modes = self.current_modes()
        others = [] if modes == self.modes else self._parts_in_other_modes()
        # Not by `.train()`: it sets all modules below too, and each has a mode of its own here.
        for part, flag in others:
            part.training = not flag
        is_training = self.captured.model.training
        for stage in self.stages:
            # A module sets an attribute slowly, and that is so already in most steps.
            if stage.module.training != is_training:
                stage.module.training = is_training
        try:
            yield
        finally:
            for part, flag in others:
                part.training = flag

    def _parts_in_other_modes(self) -> list[tuple[nn.Module, bool]]:
        """Return the modules that are in another mode than in this program, with their modes."""
        pairs = zip(self._modules, self.modes, strict=True)
        return [(part, part.training) for part, mode in pairs if part.training != mode]


def _refuse_hooks_of(name: str, parameter: nn.Parameter) -> None:
    """Raise InputError for hooks of a parameter that a step would not run once a step."""
    if parameter._post_accumulate_grad_hooks:
        raise InputError(
            f"{name} has a post-accumulate hook, which would run after each microbatch and "
            "not once a step; remove it, and act after `step`"
        )
    if parameter._backward_hooks and has_joint_hook(parameter):
        raise InputError(
            f"{name} has a hook on the gradients of several tensors, which would run for "
            "each stage and microbatch; remove it, and act after `step`"
        )


# Getters in C, since each step asks all modules and parameters.
_mode_of = attrgetter("training")
_is_trained, _dtype_of = attrgetter("requires_grad"), attrgetter("dtype")
_hooks_of = attrgetter("_backward_hooks")
_late_hooks_of = attrgetter("_post_accumulate_grad_hooks")


@contextmanager
def modes_of_both(program: Program, remainder: Program | None) -> Iterator[None]:
    """Put modules into the modes of a program, which are also those of its remainder."""
    with program.mode(), nullcontext() if remainder is None else remainder.mode():
        yield


def _settings(captured: Capture) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of modules that must stay the same, by path; not the tensors that a hook
    computes before each forward, as that of weight_norm does, nor methods that the class gives too:
    who puts `model.forward` back as it was leaves one there.
    """
    for path, module, names in _watched(captured):
        computed = Tensor if module._forward_pre_hooks else ()
        for name in names:
            value = vars(module)[name]
            if name in HOOKS:
                # The model's own forward may have run since then, and installed its hooks.
                left = captured.left_hooks.get((path, name), frozenset())
                value = {key: hook for key, hook in value.items() if _counts(hook, left)}
            elif isinstance(value, dict) and is_installed(package_of(type(value).__module__)):
                # Saving a model of diffusers adds the names of its class and version to its config.
                value = {key: item for key, item in value.items() if str(key)[:1] != "_"}
            if not isinstance(value, computed) and not _is_of_class(module, name, value):
                yield f"{path}.{name}".lstrip("."), deep_copy(value)


def _counts(hook: Any, left: frozenset[Any]) -> bool:
    """Return whether a hook is none that forwards install: those with codes that the capture `left`
    there, and those of transformers, which do nothing unless a call asks for hidden states.
    """
    return not (is_collecting(hook) or hook_codes([hook]) <= left)


def _is_of_class(module: nn.Module, name: str, value: Any) -> bool:
    is_own = isinstance(value, MethodType) and value.__self__ is module
    return is_own and value.__func__ is getattr(type(module), name, None)


def _items(captured: Capture) -> AttributeItems:
    return AttributeItems((module, names) for _, module, names in _watched(captured))


def _watched(captured: Capture) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield each module with its path and the names of its attributes that must stay the same."""
    for path, module in captured.model.named_modules():
        names = settings_of(module)
        watched = [n for n in names if n in TABLES or captured.must_stay(path, n)]
        if not captured.runs_itself(path):
            watched += BACKWARD_HOOKS
        yield path, module, watched


def _leaves(value: Any) -> list[Any]:
    return tree_leaves(dict(value) if isinstance(value, MAPPINGS) else value)


def _shape(edge: BoundaryTensor) -> BoundaryShape:
    return BoundaryShape((edge.shape, edge.dtype, edge.has_gradient))
