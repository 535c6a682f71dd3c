"""Records one forward of a module as an fx graph.

The real Python code runs once on fake tensors under a torch-function mode. Modules of torch.nn become call_module
nodes; every other call on tensors becomes a call_function or call_method node; parameters are get_attr nodes under
their original names. Sizes that depend on the batch stay symbolic in the arguments and become integers when the
graph is instantiated for a batch size. A module that asks for data becomes one node, the smallest that works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointFunction

from pipecompile.errors import CaptureError
from pipecompile.frontend.calls import Call, applying, encloses_recorded, hooking, target_of
from pipecompile.frontend.data_probe import Heard
from pipecompile.frontend.leaves import is_of_torch
from pipecompile.frontend.refusals import DataDependentError, UnsupportedError, asks_data
from pipecompile.frontend.source import source, source_of
from pipecompile.frontend.tape import SYMBOLS, Tape, contains_tensor, tensors_in
from pipecompile.frontend.torch_patches import (
    cleared_by_autocast,
    exporting,
    inference_as_no_grad,
    instead,
    known_saving,
    seeded_by_torch,
)
from pipecompile.graph.attributes import same
from pipecompile.graph.data_answers import Answer, answering
from pipecompile.graph.propagation import swapped
from pipecompile.graph.side_effects import Watch

__all__ = ["Manner", "Recorder"]

# Attributes of a tensor that are about autograd, not values of the forward.
AUTOGRAD_ATTRIBUTES = ("grad", "grad_fn", "_base")


@dataclass(frozen=True)
class Manner:
    """A way of recording.

    `exporting` sets the flags by which models learn that they are captured; many then avoid shortcuts that ask data.
    `leaves` are the paths of modules that are to be one node, besides those of torch.nn. `heard` is what
    data answered when the model ran on real tensors; without it a module that asks is an error.
    """

    exporting: bool
    leaves: frozenset[str] = frozenset()
    heard: Heard | None = None


class Recorder(TorchFunctionMode):
    """The mode under which the forward runs; `tape` grows as it does. `whole` are the modules that asked data."""

    def __init__(
        self, root: nn.Module, mode: FakeTensorMode, state: dict[int, Tensor], manner: Manner
    ) -> None:
        super().__init__()
        self.root = root
        self.mode = mode
        self.manner = manner
        self.tape = Tape(root, state)
        self.failed_in: str | None = None
        self.whole: dict[str, str] = {}  # path → the line that asked
        self.hooked: set[str] = set()  # modules that are taken apart and whose forward hooks ran
        self.assignments: dict[
            tuple[nn.Module, str], str
        ] = {}  # attributes of modules → the line that set them
        self._paths: dict[nn.Module, str] = {}
        for path, module in root.named_modules():
            self._paths.setdefault(module, path)
        self._state = state
        self._own = {
            module: [state[id(tensor)] for tensor in _held(module)] for module in root.modules()
        }
        self._watch = Watch()

    def path_of(self, module: nn.Module) -> str:
        """The first path of one of the model's modules."""
        return self._paths[module]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Everything that must hold while the forward runs; undone afterwards."""
        with (
            seeded_by_torch(),
            instead(self.call_module, self.call_autograd_function, self._assigned),
            exporting(self.manner.exporting),
            inference_as_no_grad(),
            cleared_by_autocast(self.tape.clear),
            known_saving(),
            self.mode,
            swapped(self.root, self._state) as lost,
            enable_python_dispatcher(),
            self._watch,
            self,
        ):
            yield
        if lost:
            raise CaptureError(
                f"the forward replaces {', '.join(lost)} by a new tensor, which no stage could see; "
                "update it in place, for example with copy_"
            )

    def _assigned(self, module: nn.Module, name: str, value: Any) -> None:
        self.assignments[module, name] = source()
        path = self._paths.get(module)
        if (
            path is None
            or _get_current_function_mode() is not self
            or not self._is_leaf(module, path)
        ):
            return
        if name not in vars(module) or not same(vars(module)[name], value):
            raise CaptureError(
                f"{self.tape.where()}: the forward sets {name} of {path}, which is one node and would not see it; "
                "set it outside the forward, or use the functional form of that module"
            )

    # -- calls of functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__set__" and func.__self__ is Tensor.requires_grad:
            return self._require_gradient(*args)
        if name == "__set__":
            raise CaptureError(
                f"{self.tape.where()}: the forward assigns to an attribute of a tensor ({func.__self__.__name__}); "
                "return a new tensor instead"
            )
        if name == "__get__":
            return self._attribute(func, args)
        if func is Tensor.__iter__:
            return iter(self._call(Tensor.unbind, "unbind", (args[0], 0), {}))
        return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        call = Call(self.tape, self._watch, args, kwargs)
        out = call.run(lambda: func(*args, **kwargs))
        self._refuse_data(out, name)
        if contains_tensor(out) or call.mutates:
            self._record(*target_of(func, name), call, out)
        elif func is Tensor.register_hook:
            self._hook(*args)
        elif func is torch._assert_async:
            self._record(*target_of(func, name), call, None, kept=True)
        return out

    def _attribute(self, func: Any, args: Any) -> Any:
        out = func(*args)
        name = func.__self__.__name__
        if isinstance(out, Tensor) and name not in AUTOGRAD_ATTRIBUTES:
            node = self.tape.create(
                "call_function", getattr, (self.tape.argument(args[0]), name), {}
            )
            self.tape.bind(out, node)
        return out

    def _hook(self, tensor: Tensor, hook: Any) -> None:
        if encloses_recorded(hook):
            raise UnsupportedError(
                f"{self.tape.where()}: a hook encloses a value of the forward, which is another in each step; let it "
                "compute from the gradient and from constants"
            )
        self._record(
            "call_function",
            hooking(hook),
            Call(self.tape, self._watch, (tensor,), {}),
            None,
            hook=True,
        )

    def _require_gradient(self, tensor: Tensor, required: bool) -> None:
        """As the method of that name does: the tensor itself changes, so its maker stays with the call."""
        call = Call(self.tape, self._watch, (tensor, required), {})
        tensor.requires_grad_(required)
        self._record("call_method", "requires_grad_", call, tensor, hook=True)

    def _record(self, op: str, target: Any, call: Call, out: Any, **notes: Any) -> None:
        node = self.tape.create(op, target, *call.arguments())
        node.meta.update(random=call.random, mutates=call.mutates, **notes)
        self.tape.bind(out, node)

    def _refuse_data(self, out: Any, name: str) -> None:
        if isinstance(out, SYMBOLS) and free_unbacked_symbols(out):
            raise DataDependentError(
                f"{self.tape.where()}: {name} reads a number out of a tensor, so the graph would depend on the data; "
                "compute it outside the model, or keep it a tensor"
            )
        if any(free_unbacked_symbols(tensor) for tensor in tensors_in(out)):
            raise DataDependentError(
                f"{self.tape.where()}: {name} gives a tensor whose shape depends on the values of another, so stages "
                "could not know what they receive; use torch.where or a mask of fixed shape"
            )

    def call_autograd_function(
        self, original: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> Any:
        """What runs in place of `Function.apply`: one node, since its backward is its own."""
        if _get_current_function_mode() is not self:
            return original(function, *args, **kwargs)
        if (
            function is CheckpointFunction
        ):  # a region that is computed again: its values are those of its forward
            run, _, *inputs = args
            return run(*inputs)
        call = Call(self.tape, self._watch, args, kwargs)
        with _pop_mode_temporarily():
            out = call.run(lambda: original(function, *args, **kwargs))
        self._record("call_function", applying(function), call, out)
        return out

    # -- calls of modules

    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """What runs in place of a module's call."""
        path = self._paths.get(module)
        if path is None:
            return original(module, *args, **kwargs)
        number = self.tape.count(path)
        if _get_current_function_mode() is not self:  # inside a module that is one node
            return original(module, *args, **kwargs)
        self.tape.enter(path)
        mark = self.tape.mark()
        try:
            if self._is_leaf(module, path):
                return self._call_leaf(original, module, args, kwargs)
            self._notice_hooks(module, path)
            return original(module, *args, **kwargs)
        except Exception as error:
            self.failed_in = self.failed_in or path
            if self.manner.heard is None or not path or not asks_data(error):
                raise
            self.tape.undo(mark)
            whole = self._call_leaf(original, module, args, kwargs, number)
            inner = [other for other in self.whole if other.startswith(f"{path}.")]
            for other in inner:
                del self.whole[other]
            self.whole[path], self.failed_in = source_of(error) or source(), None
            return whole
        finally:
            self.tape.leave()

    def _is_leaf(self, module: nn.Module, path: str) -> bool:
        return module is not self.root and (path in self.manner.leaves or is_of_torch(module))

    def _call_leaf(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        number: int | None = None,
    ) -> Any:
        """Runs a module on fake tensors and records it as one node; with `number` it is told what that call was."""
        state = [*module.parameters(), *module.buffers()]
        if any(
            not same(_held(part), self._own[part]) for part in module.modules() if part in self._own
        ):
            raise UnsupportedError(
                f"{self.tape.where()}: the module is called with tensors in the place of its parameters or buffers "
                "(functional_call), which its node would not have; call the function that it stands for"
            )
        call = Call(self.tape, self._watch, args, kwargs, state=state)
        with _pop_mode_temporarily(), answering(self._answers(number)):
            out = call.run(lambda: original(module, *args, **kwargs))
        self._refuse_data(out, type(module).__name__)
        self._record("call_module", self._paths[module], call, out, number=number)
        return out

    def _answers(self, number: int | None) -> tuple[Answer, ...] | None:
        if number is None:
            return None
        heard = self.manner.heard or {}
        if (self.tape.path, number) not in heard:
            raise UnsupportedError(
                f"{self.tape.where()}: the model does not call this module on the sample itself"
            )
        return heard[self.tape.path, number]

    def _notice_hooks(self, module: nn.Module, path: str) -> None:
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{path or type(self.root).__name__}: a backward hook is registered on a module that is taken apart, "
                "so it would not be called; make the module one node (leaf), or register the hook on a module of "
                "torch.nn, or on a tensor in the forward"
            )
        if module._forward_hooks or module._forward_pre_hooks:
            self.hooked.add(path)


def _held(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers in a module's own tables now."""
    return [
        tensor
        for table in (module._parameters, module._buffers)
        for tensor in table.values()
        if tensor is not None
    ]
