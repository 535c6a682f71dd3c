"""Records one forward of a module as an fx graph.

The real Python code runs once on fake tensors under a torch-function mode. Modules of torch.nn become call_module
nodes; every other call on tensors becomes a call_function or call_method node; parameters are get_attr nodes under
their original names. Sizes that depend on the batch stay symbolic in the arguments and become integers when the
graph is instantiated for a batch size.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from pipecompile.errors import CaptureError
from pipecompile.passes import propagate
from pipecompile.passes.ambient import observed
from pipecompile.passes.propagate import swapped
from pipecompile.passes.watch import Watch

__all__ = ["HIDDEN", "Recorder", "Symbolic", "is_leaf"]

# Containers of torch.nn whose forward is recorded, so that they can be cut inside.
CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
METHOD_TYPES = (types.MethodDescriptorType, types.WrapperDescriptorType)
METHOD_OWNERS = ("Tensor.", "TensorBase.", "_TensorBase.")
# Attributes of a tensor that are about autograd, not values of the forward.
AUTOGRAD_ATTRIBUTES = ("grad", "grad_fn", "_base")
# Frames of these files are never the line that a user wrote.
HIDDEN = tuple(
    str(Path(module.__file__ or "").parent) for module in (torch, propagate, sys.modules["pipecompile.errors"])
)
CALLER = str(Path(__file__).with_name("capture.py"))  # whose own callers are not the model
STANDARD_LIBRARY = Path(contextlib.__file__).parent


def is_leaf(module: nn.Module) -> bool:
    """Whether a module becomes one node: those of torch.nn, except containers."""
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, CONTAINERS)


def contains_tensor(value: Any) -> bool:
    """Whether a tensor lies anywhere in nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        return any(map(contains_tensor, value))
    if isinstance(value, dict):
        return any(map(contains_tensor, value.values()))
    return isinstance(value, Tensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and slices."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


@dataclass(frozen=True)
class Symbolic:
    """A number in a node's arguments that depends on the batch."""

    expression: sympy.Basic
    type: type[int] | type[float] | type[bool]

    def at(self, values: dict[sympy.Symbol, sympy.Integer]) -> int | float | bool:
        """The number, once the batch is known."""
        return self.type(self.expression.xreplace(values))


class Recorder(TorchFunctionMode):
    """The mode under which the forward runs; `graph` grows as it does."""

    def __init__(self, root: nn.Module, mode: FakeTensorMode, state: dict[int, Tensor]) -> None:
        super().__init__()
        self.root = root
        self.mode = mode
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.failed_in: str | None = None
        self._paths: dict[nn.Module, str] = {}
        for path, module in root.named_modules():
            self._paths.setdefault(module, path)
        self._state = state
        self._names = self._name_state()
        self._reads: dict[str, fx.Node] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # ids stay unique while the tensors live
        self._stack: list[str] = []
        self._outside = observed()
        self.watch = Watch()

    def _name_state(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for path, module in self.root.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        names.setdefault(id(self._state[id(tensor)]), f"{path}.{key}".lstrip("."))
        return names

    @property
    def path(self) -> str:
        """The module whose forward runs now."""
        return self._stack[-1] if self._stack else ""

    # -- values and nodes

    def placeholder(self, name: str, value: Tensor) -> None:
        """Adds an input of the graph."""
        node = self.graph.placeholder(name)
        node.meta.update(module="", source="", ambient=None, random=False, mutates=False)
        self._bind(value, node)

    def output(self, values: Sequence[Any]) -> None:
        """Ends the graph with the flat outputs."""
        self._create("output", "output", (tuple(map(self.argument, values)),), {})

    def _bind(self, value: Any, node: fx.Node) -> None:
        """Makes `node` the source of the tensors in `value`; items of a collection get a node each."""
        if isinstance(value, Tensor):
            node.meta["val"] = value
            self._nodes[id(value)] = node
            self._alive.append(value)
        elif isinstance(value, (tuple, list, dict)):
            node.meta["val"] = value
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if contains_tensor(item):
                    self._bind(item, self._create("call_function", operator.getitem, (node, key), {}))

    def argument(self, value: Any) -> Any:
        """`value` as a node argument: tensors become nodes, symbolic sizes stay."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.argument, value))
        if isinstance(value, tuple):
            return tuple(map(self.argument, value))
        if isinstance(value, list):
            return list(map(self.argument, value))
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if isinstance(value, torch.Generator):
            raise CaptureError(
                f"{self._where()}: the forward draws from a torch.Generator of its own; use the default generator, "
                "which every random node of a pipeline seeds for itself"
            )
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return Symbolic(value.node.expr, value.node.pytype)
        return value

    def _node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        if id(tensor) in self._names:
            return self._read(self._names[id(tensor)], tensor)
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"{self._where()}: a tensor of shape {tuple(tensor.shape)} comes from a call that cannot be seen "
                "(C++ or numpy code, or a tensor kept from elsewhere); make it with torch functions in the forward"
            )
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = tensor
        node = self._read(name, tensor)
        self._nodes[id(tensor)] = node
        return node

    def _read(self, name: str, tensor: Tensor) -> fx.Node:
        if name not in self._reads:
            node = self._reads[name] = self._create("get_attr", name, (), {})
            node.meta["val"] = tensor
            self._alive.append(tensor)
        return self._reads[name]

    def _create(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        ambient = observed()
        region = None if ambient == self._outside else ambient
        node.meta.update(module=self.path, source=_source(), ambient=region, random=False, mutates=False)
        return node

    def _where(self) -> str:
        return f"{self.path or type(self.root).__name__} ({_source() or 'unknown line'})"

    # -- calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__set__":
            raise CaptureError(
                f"{self._where()}: the forward assigns to an attribute of a tensor ({func.__self__.__name__}); "
                "return a new tensor instead"
            )
        if name == "__get__":
            return self._attribute(func, args)
        if func is Tensor.__iter__:
            return iter(self._call(Tensor.unbind, "unbind", (args[0], 0), {}))
        return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        call = _Call(self, args, kwargs)
        out = call.run(lambda: func(*args, **kwargs))
        self._refuse_data_dependent(out, name)
        if contains_tensor(out) or call.mutates:
            self._record(*_target(func, name), call, out)
        return out

    def _refuse_data_dependent(self, out: Any, name: str) -> None:
        if isinstance(out, (torch.SymInt, torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(out):
            raise CaptureError(
                f"{self._where()}: {name} reads a number out of a tensor, so the graph would depend on the data; "
                "compute it outside the model, or keep it a tensor"
            )
        if any(free_unbacked_symbols(tensor) for tensor in tensors_in(out)):
            raise CaptureError(
                f"{self._where()}: {name} gives a tensor whose shape depends on the values of another, so stages could "
                "not know what they receive; use torch.where or a mask of fixed shape"
            )

    def _attribute(self, func: Any, args: Any) -> Any:
        out = func(*args)
        name = func.__self__.__name__
        if isinstance(out, Tensor) and name not in AUTOGRAD_ATTRIBUTES:
            node = self._create("call_function", getattr, (self.argument(args[0]), name), {})
            self._bind(out, node)
        return out

    def _record(self, op: str, target: Any, call: _Call, out: Any) -> None:
        node = self._create(op, target, *call.arguments())
        node.meta.update(random=call.random, mutates=call.mutates)
        self._bind(out, node)

    def call_leaf(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs a leaf module on fake tensors and records it as one node."""
        call = _Call(self, args, kwargs, state=[*module.parameters(), *module.buffers()])
        with _pop_mode_temporarily():
            out = call.run(lambda: original(module, *args, **kwargs))
        self._record("call_module", self._paths[module], call, out)
        return out

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What runs in place of a module's call."""
        if module not in self._paths or _get_current_function_mode() is not self:
            return original(module, *args, **kwargs)
        self._stack.append(self._paths[module])
        try:
            if is_leaf(module) and module is not self.root:
                return self.call_leaf(original, module, args, kwargs)
            return original(module, *args, **kwargs)
        except BaseException:
            self.failed_in = self.failed_in or self.path
            raise
        finally:
            self._stack.pop()

    def call_autograd_function(self, original: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """What runs in place of `Function.apply`: one node, since its backward is its own."""
        if _get_current_function_mode() is not self:
            return original(function, *args, **kwargs)
        call = _Call(self, args, kwargs)
        with _pop_mode_temporarily():
            out = call.run(lambda: original(function, *args, **kwargs))
        self._record("call_function", _applying(function), call, out)
        return out

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Everything that must hold while the forward runs; undone afterwards."""
        call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
        rng, draws = torch.get_rng_state(), random.getstate()
        nn.Module.__call__ = lambda module, *a, **k: self.call_module(call, module, a, k)  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(  # type: ignore[assignment]
            lambda function, *a, **k: self.call_autograd_function(apply.__func__, function, a, k)
        )
        try:
            with (
                _exporting(),
                self.mode,
                swapped(self.root, self._state) as lost,
                enable_python_dispatcher(),
                self.watch,
                self,
            ):
                yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            torch.set_rng_state(rng)
        if random.getstate() != draws:
            random.setstate(draws)
            raise CaptureError(
                "the forward draws from Python's random module, and one draw would be taken for all steps; "
                "draw with torch, or switch it off (layer drop, for example)"
            )
        if lost:
            raise CaptureError(
                f"the forward replaces {', '.join(lost)} by a new tensor, which no stage could see; "
                "update it in place, for example with copy_"
            )


class _Call:
    """One call: its arguments, and what running it does besides returning."""

    def __init__(self, recorder: Recorder, args: Any, kwargs: Any, state: Sequence[Tensor] = ()) -> None:
        self._recorder = recorder
        self._args, self._kwargs = tuple(args), dict(kwargs)
        touched = {id(tensor): tensor for tensor in (*tensors_in((self._args, self._kwargs)), *state)}
        self._versions = [(tensor, tensor._version) for tensor in touched.values()]
        self.random = self._averages = False

    def run(self, function: Callable[[], Any]) -> Any:
        """Runs it and notices whether random numbers are drawn."""
        watch = self._recorder.watch
        watch.reset()
        out = function()
        self.random, self._averages = watch.random, bool(watch.averages)
        return out

    @property
    def mutates(self) -> bool:
        """Whether an argument or a buffer was written to in place."""
        return self._averages or any(tensor._version != version for tensor, version in self._versions)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as nodes. In-place calls return their argument: ask before the result is bound."""
        return self._recorder.argument(self._args), self._recorder.argument(self._kwargs)


def _target(func: Any, name: str) -> tuple[str, Any]:
    method = isinstance(func, METHOD_TYPES) or getattr(func, "__qualname__", "").startswith(METHOD_OWNERS)
    return ("call_method", name) if method else ("call_function", func)


def _applying(function: Any) -> Callable[..., Any]:
    """`function.apply` as a graph can call it: found when it runs, since while we record it is ours."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    apply.__qualname__ = f"{function.__module__}.{function.__qualname__}.apply"
    return apply


def _source() -> str:
    """`file:line` of the innermost frame of the model that is neither torch's nor ours, if there is one."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != CALLER:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *HIDDEN)) and Path(file).parent != STANDARD_LIBRARY:
            return f"{_relative(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@cache
def _relative(file: str) -> str:
    """`file` as importable from sys.path, so that it reads the same on every machine."""
    roots = [str(Path(entry or ".").resolve()) for entry in sys.path]
    best = max((root for root in roots if file.startswith(root + "/")), key=len, default="")
    return file[len(best) + 1 :] if best else Path(file).name


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Models ask these flags whether they are being captured, and then avoid data-dependent shortcuts."""
    import torch.compiler as compiler

    flags = compiler._is_exporting_flag, compiler._is_compiling_flag
    compiler._is_exporting_flag = compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_exporting_flag, compiler._is_compiling_flag = flags
