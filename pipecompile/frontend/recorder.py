"""The recorder: it turns one forward of a module into an fx graph.

The model's own Python code runs once on fake tensors, under a torch-function mode:

    a call of …                    becomes
    a module of torch.nn           a call_module node
    a function or method           a call_function or call_method node
    `autograd.Function.apply`      a call_function node, since its backward is its own
    a module that branches on      a call_module node of the smallest module that works;
    data                           what was recorded inside it is undone

Parameters are get_attr nodes under their original names. Sizes that depend on the batch stay
symbolic in the arguments and become integers when the graph is instantiated for a batch size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from pipecompile.errors import CaptureError
from pipecompile.frontend.cached_calls import CachedCalls
from pipecompile.frontend.call_refusals import (
    LAYOUT_QUESTIONS,
    PLACE_QUESTIONS,
    attribute_refusal,
    hooks_of,
    number_refusal,
    own_state,
    refuse_backward_hooks,
    refuse_conversion,
    refuse_data,
    refuse_inner_checkpoint,
    refuse_lasting_gradient,
    refuse_lasting_hook,
    refuse_lasting_write,
    refuse_lost_gradients,
    refuse_made_gradients,
    refuse_made_history,
    refuse_mode,
    refuse_new_hooks,
    refuse_place,
    refuse_read_gradient,
    refuse_replaced_state,
    refuse_swapped_state,
    refuse_unseen_attribute,
)
from pipecompile.frontend.calls import (
    RecordedCall,
    apply_target,
    call_target,
    hook_target,
    with_objects,
)
from pipecompile.frontend.leaves import is_fused, is_torch_leaf, packs_padding
from pipecompile.frontend.nested_values import contains_tensor, tensors_in
from pipecompile.frontend.randomness import require_torch_randomness
from pipecompile.frontend.recording import Recording
from pipecompile.frontend.recording_options import RecordingOptions
from pipecompile.frontend.refusals import UnsupportedError, is_data_dependence_error
from pipecompile.frontend.source import current_line, error_line
from pipecompile.frontend.torch_patches import (
    notify_autocast_clears,
    redirect_calls,
    refuse_own_saving_hooks,
    refuse_questions_of_history,
    run_inference_as_no_grad,
    set_export_flags,
)
from pipecompile.frontend.value_reads import (
    CONVERSIONS,
    OUTSIDE,
    VALUE_READS,
    ValueReads,
    is_asked_by_distribution,
    refuse_reads,
)
from pipecompile.graph.data_answers import DataAnswer, OtherPathError, replay_answers
from pipecompile.graph.hidden_fakes import hide_fake_tensors
from pipecompile.graph.hook_frames import forward_hooks, hook_codes_of
from pipecompile.graph.model_state import swapped_state
from pipecompile.graph.side_effects import SideEffectTracker

__all__ = ["ForwardRecorder"]

# Attributes of a tensor that belong to autograd and are no values of the forward.
AUTOGRAD_ATTRIBUTES = ("grad", "grad_fn", "_base")


class ForwardRecorder(TorchFunctionMode):
    """The mode under which the forward runs.

    `recording` grows as it runs. `data_dependent` maps the path of each module that became one node
    because it branches on data to the line that does so. `hooked` are the modules that are recorded
    inside and whose forward hooks ran. `assignments` maps (module, attribute) to the line that set
    the attribute. `failed_in` is the innermost module that raised. `asks_layout` is the first line
    that asks how a tensor lies in memory, "" without one. `values` are numbers in the graph that
    were read out of tensors.
    """

    def __init__(
        self,
        root: nn.Module,
        mode: FakeTensorMode,
        state: dict[int, Tensor],
        options: RecordingOptions,
        cached: Collection[CodeType] = (),
    ) -> None:
        super().__init__()
        self.root = root
        self.mode = mode
        self.options = options
        self.recording = Recording(root, state)
        self.failed_in: str | None = None
        self.asks_layout = ""
        self.values = ValueReads(self.recording, reads_inputs=options.reads_inputs)
        self._cached_calls = CachedCalls(self.recording, cached, self.values.of_values)
        self.data_dependent: dict[str, str] = {}
        self.hooked: set[str] = set()
        self.assignments: dict[tuple[nn.Module, str], str] = {}
        self._paths: dict[nn.Module, str] = {}
        # A shared module has several paths; the first one names its node and its parameters.
        for path, module in root.named_modules():
            self._paths.setdefault(module, path)
        self._state = state
        self._expected_state = {
            module: [state[id(tensor)] for tensor in own_state(module)] for module in root.modules()
        }
        self._hooks = {module: hooks_of(module) for module in root.modules()}
        self._tracker = SideEffectTracker(state.values())
        # What a forward could not do, unless that has ended it: the model may catch the error.
        self._caught: CaptureError | None = None
        # By the id of each tensor that is given to a module which is one node: the path of that.
        self._given: dict[int, str] = {}

    def path_of(self, module: nn.Module) -> str:
        """Return the first path of one of the model's modules."""
        return self._paths[module]

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Record the forward in the block, under all patches of torch that it needs."""
        leaves = [tensor for tensor in self._state.values() if tensor.is_leaf]
        for tensor in leaves:  # a fake of a parameter comes with its gradient
            tensor.grad = None
        # The tracker is entered after the fake mode, so that it sees each operator first.
        with (
            require_torch_randomness(self.root),
            redirect_calls(self.call_module, self.call_autograd_function, self._note_assignment),
            set_export_flags(self.options.exporting),
            hide_fake_tensors(self.options.hiding),
            run_inference_as_no_grad(),
            notify_autocast_clears(self.recording.note_autocast_clear),
            refuse_own_saving_hooks(),
            refuse_questions_of_history(self._given),
            self.mode,
            swapped_state(self.root, self._state) as lost,
            enable_python_dispatcher(),
            self._tracker,
            self,
        ):
            yield
        refuse_replaced_state(lost)
        refuse_made_history(self.recording, leaves)
        refuse_made_gradients(leaves)

    @property
    def _is_active(self) -> bool:
        """Whether calls are recorded now: not inside a module or function that is one node."""
        return _get_current_function_mode() is self

    def _note_assignment(self, module: nn.Module, name: str, value: Any) -> None:
        self.assignments[module, name] = current_line()
        path = self._paths.get(module)
        # Attributes of modules that are recorded inside are compared after the forward instead.
        if path is None or not self._is_active or not self._is_leaf(module, path):
            return
        refuse_unseen_attribute(self.recording, module, path, name, value)

    # -- calls of functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        refuse_mode(self.recording, _get_current_dispatch_mode())
        try:
            return self._answer(func, name, *self._with_fakes(args, kwargs or {}))
        except Exception as error:
            if isinstance(error, CaptureError):
                self._caught = error
            elif is_data_dependence_error(error) or name in CONVERSIONS:
                self._caught = number_refusal(self.recording, name)
            raise

    def _with_fakes(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments with fakes in the place of parameters and buffers: a list or a closure
        may have one itself, and a write would change it.
        """
        if self._state.keys().isdisjoint(map(id, tensors_in((args, kwargs)))):
            return args, kwargs
        placed = tree_map_only(Tensor, lambda each: self._state.get(id(each), each), (args, kwargs))
        return placed  # type: ignore[no-any-return]

    def _answer(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__set__" and func.__self__ is Tensor.requires_grad:
            return self._require_gradient(*args)
        if name == "__set__":
            raise attribute_refusal(self.recording, func.__self__.__name__)
        if name == "__get__":
            return self._read_attribute(func, args)
        # To the iterator that `__iter__` returns no tensors could be bound.
        if func is Tensor.__iter__:
            return iter(self._call(Tensor.unbind, "unbind", (args[0], 0), {}))
        return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run a function or method; record it if it returns a tensor or has a side effect."""
        if name == "__bool__" and is_asked_by_distribution():
            # It raises if the answer is no, and so does this node in each microbatch.
            self._call(torch._assert_async, "_assert_async", (args[0], OUTSIDE), {})
            return True
        if name in VALUE_READS:
            answer = self.values.answer(func, args[0])
            if answer is not None:
                return answer
        if name == "equal" and _are_fake_truths(list(tensors_in((args, kwargs)))):
            # Fakes would give the answer that istft expects (torch_repairs.py).
            raise DataDependentOutputException(torch.ops.aten.equal.default)
        refuse_conversion(self.recording, func, args)
        refuse_lasting_write(self.recording, name, args, kwargs)
        if name in PLACE_QUESTIONS:
            refuse_place(self.recording, name, args[0])
        if func is Tensor.requires_grad_:
            refuse_lasting_gradient(self.recording, *args, **kwargs)
        call = RecordedCall(self.recording, self._tracker, args, kwargs)
        result = call.run(lambda: func(*args, **kwargs))
        if name in LAYOUT_QUESTIONS:
            self.asks_layout = self.asks_layout or self.recording.where()
        refuse_data(self.recording, result, name)
        # Plain results, such as sizes, need no node: the guards say when they hold.
        if contains_tensor(result) or call.mutates:
            self._record(*call_target(func, name), call, result)
        elif func is Tensor.register_hook:
            # It returns a handle and no tensor, but the gradient depends on it.
            self._record_hook(*args)
        elif func is torch._assert_async:
            self._record(*call_target(func, name), call, None, has_effect=True)
        return result

    def _read_attribute(self, func: Any, args: Any) -> Any:
        """Run a getter of a tensor; record it if its value is a tensor of the forward, as `x.T`."""
        result = func(*args)
        name = func.__self__.__name__
        if name == "grad":
            refuse_read_gradient(self.recording, args[0])
        if isinstance(result, Tensor) and name not in AUTOGRAD_ATTRIBUTES:
            self._cached_calls.note([args[0]], [result])
            arguments = (self.recording.argument(args[0]), name)
            node = self.recording.create("call_function", getattr, arguments, {})
            self.recording.bind(result, node)
        return result

    def _record_hook(self, tensor: Tensor, hook: Any) -> None:
        refuse_lasting_hook(self.recording, tensor, hook)
        call = RecordedCall(self.recording, self._tracker, (tensor,), {})
        self._record("call_function", hook_target(hook), call, None, hook=True)

    def _require_gradient(self, tensor: Tensor, required: bool) -> None:
        """Record an assignment to `requires_grad` as a call of `requires_grad_`.

        It is marked as a hook: the tensor itself changes, so its node must be on the same stage.
        """
        refuse_lasting_gradient(self.recording, tensor, required)
        if self.recording.is_state(tensor):
            return
        call = RecordedCall(self.recording, self._tracker, (tensor, required), {})
        tensor.requires_grad_(required)
        self._record("call_method", "requires_grad_", call, tensor, hook=True)

    def _record(self, op: str, target: Any, call: RecordedCall, result: Any, **notes: Any) -> None:
        """Add the node of `call`, with `notes` in its meta, and bind the result to it."""
        made, is_random = tensors_in(result), call.is_random
        self._cached_calls.note(call.touched, made, written=call.written, is_random=is_random)
        arguments = call.arguments()
        legal = with_objects(op, target, *arguments, where=self.recording.where)
        node = self.recording.create(*legal)
        node.meta.update(random=call.is_random, mutates=call.mutates, **notes)
        self.recording.bind(result, node)

    def call_autograd_function(
        self, original: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run and record `Function.apply`; it is called instead of the original."""
        if not self._is_active:
            refuse_inner_checkpoint(self.recording, function)
            return original(function, *args, **kwargs)
        if function is CheckpointFunction:
            # A region that the model itself recomputes: its values are those of its forward.
            run, _, *inputs = args
            with self.recording.checkpoint():
                result = run(*inputs)
            refuse_lost_gradients(self.recording, inputs, result)
            return result
        # Calls inside the function are part of its node, so the recorder does not see them.
        call = RecordedCall(self.recording, self._tracker, args, kwargs)
        with _pop_mode_temporarily():
            result = call.run(lambda: original(function, *args, **kwargs))
        self._record("call_function", apply_target(function), call, result)
        return result

    # -- calls of modules

    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run a module, as one node or recorded inside; it is called instead of the original."""
        path = self._paths.get(module)
        if path is None:
            return original(module, *args, **kwargs)
        # Calls inside leaves are counted too: the data probe counts all calls.
        call_number = self.recording.count_call(path)
        if not self._is_active:
            return original(module, *args, **kwargs)
        self.recording.enter_module(path)
        mark = self.recording.mark()
        try:
            if packs_padding(module, args, kwargs):
                raise CaptureError(
                    f"{path}: an nn.TransformerEncoder in eval mode, of which nothing is trained, "
                    "may make nested tensors of padded samples, which no stage sends; make it with "
                    "enable_nested_tensor=False"
                )
            if self._is_leaf(module, path) or is_fused(module, tensors_in((args, kwargs))):
                return self._call_leaf(original, module, args, kwargs)
            self._note_hooks(module, path)
            self.recording.taken_apart.append(path)
            result = original(module, *args, **kwargs)
            self._raise_caught()
            return result
        except Exception as error:
            # Unwinding, the error meets the innermost module first: the smallest one that can be a
            # node. If this fails too, the module around it is tried.
            self.failed_in = self.failed_in or path
            if self.options.answers is None or not path or not is_data_dependence_error(error):
                raise
            self.recording.undo(mark)
            self._caught = None
            result = self._call_leaf(original, module, args, kwargs, call_number)
            self._note_data_dependence(path, error)
            return result
        finally:
            self.recording.leave_module()

    def _raise_caught(self) -> None:
        """Raise what the forward was told that a capture cannot do, if it went on without it: there
        it is on a path that the model does not take.
        """
        if self._caught is not None:
            raise self._caught

    def _note_data_dependence(self, path: str, error: Exception) -> None:
        """Note that the module at `path` is one node; modules inside it no longer are."""
        inner = [other for other in self.data_dependent if other.startswith(f"{path}.")]
        for other in inner:
            del self.data_dependent[other]
        self.data_dependent[path] = error_line(error) or current_line()
        self.failed_in = None

    def _is_leaf(self, module: nn.Module, path: str) -> bool:
        """Return whether a module is to be one node, whatever its forward does."""
        return module is not self.root and (path in self.options.leaves or is_torch_leaf(module))

    def _call_leaf(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        call_number: int | None = None,
    ) -> Any:
        """Run a module on fake tensors and record it as one node.

        With `call_number` its data gives the answers that it gave in this call of the probe.
        """
        refuse_swapped_state(self.recording, module, self._expected_state)
        refuse_new_hooks(self.recording, module, self._hooks[module])
        state = [*module.parameters(), *module.buffers()]
        call = RecordedCall(self.recording, self._tracker, args, kwargs, state=state)
        for value in tensors_in((args, kwargs)):
            if value.requires_grad:
                self._given[id(value)] = self._paths[module]
        try:
            with _pop_mode_temporarily(), self._data_of(module, call_number):
                result = call.run(lambda: original(module, *args, **kwargs))
                refuse_data(self.recording, result, type(module).__name__)
        except OtherPathError as error:
            raise UnsupportedError(f"{self.recording.where()}: {error}") from error
        finally:
            self._given.clear()
        self._record("call_module", self._paths[module], call, result, call_number=call_number)
        return result

    def _data_of(self, module: nn.Module, call_number: int | None) -> AbstractContextManager[None]:
        """Return the context that refuses or answers questions for data in the current module."""
        if call_number is None:
            return refuse_reads(self.recording)
        return replay_answers(self._answers(call_number), hook_codes_of(module))

    def _answers(self, call_number: int) -> tuple[DataAnswer, ...]:
        """Return the answers of this call of the current module in the probe."""
        answers = (self.options.answers or {}).get((self.recording.path, call_number))
        if answers is None:
            text = "the model does not call this module on the sample itself"
            raise UnsupportedError(f"{self.recording.where()}: {text}")
        return answers

    def _note_hooks(self, module: nn.Module, path: str) -> None:
        """Note the forward hooks of a module that is recorded inside; refuse its backward hooks."""
        refuse_backward_hooks(module, path or type(self.root).__name__)
        if any(True for _ in forward_hooks(module)):
            self.hooked.add(path)


def _are_fake_truths(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are single truth values, and one of them has no value."""
    are_truths = all(each.dim() == 0 and each.dtype == torch.bool for each in tensors)
    return are_truths and any(isinstance(each, FakeTensor) for each in tensors)
