"""Models that cannot be captured, whatever their forward does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from pipecompile.errors import CaptureError, InputError

__all__ = ["refuse_names_of_graphs", "refuse_unfit"]

NAMES_OF_GRAPHS = set(dir(fx.GraphModule({}, fx.Graph()))) - set(dir(nn.Module()))

METHODS_OF_STATE = ("named_parameters", "named_buffers", "parameters", "buffers")
WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def refuse_unfit(model: nn.Module) -> None:
    """Raise InputError for a model that cannot be captured, whatever its forward does.

    Such are modules without shapes, scripted ones, those whose methods hide what they hold, and
    wrappers that do more than call a module.
    """
    if torch.is_inference_mode_enabled():
        raise InputError("a model is captured to be trained; leave torch.inference_mode first")
    for path, module in model.named_modules():
        name = path or "the model"
        own_state = (*module._parameters.values(), *module._buffers.values())
        if any(is_lazy(value) for value in own_state):
            raise InputError(f"{name} has parameters without a shape yet; run the model once first")
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name} is a scripted module; give the Python module that it was made from"
            )
        for key, value in vars(module).items():
            if type(value) in ProxyTypes and _is_gone(value):
                raise InputError(
                    f"{name} has an attribute {key!r}, a weak proxy of an object that is gone; "
                    "delete it, or set it to None"
                )
        for key in (*module._modules, *module._parameters, *module._buffers):
            # torch.fx writes names into code between double quotes, as they are.
            if not key.isprintable() or '"' in key or "\\" in key:
                raise InputError(
                    f"{name} has a part called {key!r}, which code cannot name; use letters, "
                    "digits and underscores"
                )
        inner = WRAPPERS.get(type(module).__name__)
        if inner is not None and hasattr(module, inner):
            raise InputError(
                f"{name} is a {type(module).__name__}; give the module inside it (.{inner}): "
                "pipecompile captures plain modules and cuts them itself"
            )
        _refuse_methods_of_state(name, module)


def _refuse_methods_of_state(name: str, module: nn.Module) -> None:
    for method in METHODS_OF_STATE:
        if _gives_others(module, method):
            raise InputError(
                f"{name} has a method {method} of its own, which returns other tensors than "
                "its modules hold, so what is trained would not be known; freeze what is not to be "
                "trained (requires_grad_(False)), and give the method another name"
            )


def _gives_others(module: nn.Module, method: str) -> bool:
    """Return whether a class has a method of its own that returns other tensors or names than that
    of torch, or refuses its arguments.
    """
    own, original = getattr(module, method), getattr(nn.Module, method)
    if getattr(own, "__func__", None) is original:
        return False
    every = {"remove_duplicate": False} if method.startswith("named") else {}
    try:
        given = list(own(**every))
    except TypeError:
        return True
    return list(map(_identity, given)) != list(map(_identity, original(module, **every)))


def _identity(item: Tensor | tuple[str, Tensor]) -> tuple[str, int]:
    name, tensor = item if isinstance(item, tuple) else ("", item)
    return name, id(tensor)


def refuse_names_of_graphs(paths: Iterable[str]) -> None:
    """Raise CaptureError if one of `paths`, which a graph is to name, begins with the name of an
    attribute that every `GraphModule` has.
    """
    for name in (path.partition(".")[0] for path in paths):
        if name in NAMES_OF_GRAPHS:
            raise CaptureError(
                f"the model has a module, parameter or buffer called {name!r}, a name that "
                "torch.fx.GraphModule has for something of its own, so no graph can hold it; "
                "rename it, or put it into a submodule"
            )


def _is_gone(proxy: Any) -> bool:
    try:
        return proxy.__class__ is None
    except ReferenceError:
        return True
