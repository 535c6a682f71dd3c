"""Code of the user that runs in nodes and in backwards, and may keep something of a microbatch.

    a hook of a module that is one node      activations["first"] = output
    a hook on a tensor or a parameter        gradient * module.scale
    a Function of the user                   Rounded.last = value
    a module of a class of the user          self.last = output

The graph shows only the tensors that such code returns. What it keeps elsewhere is that of the
latest microbatch, even while earlier ones are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, fx, nn

from pipecompile.frontend.calls import runs_code_of_user
from pipecompile.frontend.compared_value import MOST_ITEMS
from pipecompile.frontend.found_attributes import MOST_DEEP
from pipecompile.frontend.outside_values import GLOBAL_HOOKS
from pipecompile.frontend.packages import NAMESPACES, is_of_others
from pipecompile.graph.attributes import CONTAINERS, plain_container
from pipecompile.graph.gradient_hooks import has_hook

__all__ = [
    "has_code_of_user",
    "holders_of_user",
    "hooks_of_user",
    "mark_once",
    "nodes_of_user",
    "places_of_kept_state",
    "reached_by_user",
]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def places_of_kept_state(module: fx.GraphModule) -> Iterator[str]:
    """Yield the modules, lines and parameters at which such code runs."""
    if _has_hooks_of_all_modules():
        yield "the hooks of all modules"
    for node in nodes_of_user(module):
        if node.op == "call_module":
            yield str(node.target)
        else:
            yield f"{node.meta['module'] or 'the forward'} ({node.meta['source']})"
    yield from (name for name, parameter in module.named_parameters() if has_hook(parameter))


def nodes_of_user(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes whose forward runs such code."""
    for node in module.graph.nodes:
        if node.op == "call_module":
            leaf = module.get_submodule(str(node.target))
            if _has_hooks_of_all_modules() or any(map(_is_of_user, leaf.modules())):
                yield node
        elif node.op == "call_function" and runs_code_of_user(node.target):
            yield node


def reached_by_user(model: nn.Module, module: fx.GraphModule) -> Iterator[Any]:
    """Yield all that code of the user in nodes may keep something in, classes among it."""
    yield from holders_of_user(model)
    yield from {type(each) for each in model.modules()}
    yield from (node.target for node in nodes_of_user(module) if node.op == "call_function")


def mark_once(module: fx.GraphModule) -> None:
    """Note on these nodes that none of them may be recomputed."""
    for node in nodes_of_user(module):
        node.meta["keeps_state"] = True


def has_code_of_user(model: nn.Module) -> bool:
    """Return whether a forward of the model runs such code, in a node or around nodes."""
    return _has_hooks_of_all_modules() or any(map(_is_of_user, model.modules()))


def _has_hooks_of_all_modules() -> bool:
    return any(getattr(nn.modules.module, table) for table in GLOBAL_HOOKS)


def holders_of_user(model: nn.Module) -> Iterator[Any]:
    """Yield what may keep something that no attribute of a module shows: hooks, and objects of the
    user's classes.
    """
    yield from hooks_of_user(model)
    for module in model.modules():
        yield from chain.from_iterable(map(_objects_in, vars(module).values()))


def _objects_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the objects of the user's classes in an attribute, but for modules and tensors."""
    # `isinstance` would ask the object, which may be a proxy of another one, or fail.
    kind = type(value)
    if issubclass(kind, (*CONTAINERS, tuple)):
        if len(value) <= MOST_ITEMS and depth < MOST_DEEP:
            items = plain_container(value)
            items = items.values() if isinstance(items, dict) else items
            yield from chain.from_iterable(_objects_in(item, depth + 1) for item in items)
    elif issubclass(kind, (nn.Module, Tensor)):
        return
    elif kind.__module__ in NAMESPACES or not is_of_others(kind.__module__):
        yield value


def hooks_of_user(model: nn.Module) -> Iterator[Any]:
    """Yield the hooks of modules, of all modules and of parameters that are not torch's own."""
    of_modules = (vars(module)[table] for module in model.modules() for table in HOOKS)
    of_parameters = (parameter._backward_hooks or {} for parameter in model.parameters())
    of_all = (getattr(nn.modules.module, table) for table in GLOBAL_HOOKS)
    for table in chain(of_modules, of_parameters, of_all):
        yield from (hook for hook in table.values() if not _is_torch(hook))


def _is_of_user(module: nn.Module) -> bool:
    """Return whether code of the user runs in the forward or the backward of a module.

    Modules of installed packages are assumed to keep nothing.
    """
    hooks = chain.from_iterable(vars(module)[table].values() for table in HOOKS)
    is_replaced = "forward" in vars(module)
    return (
        is_replaced or not is_of_others(type(module).__module__) or not all(map(_is_torch, hooks))
    )


def _is_torch(hook: Any) -> bool:
    """Return whether a hook is one of torch, such as that of `weight_norm`."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", None)).startswith("torch.")
