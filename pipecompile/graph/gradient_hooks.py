"""Hooks on gradients of parameters, also those that a parameter itself does not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import graph

__all__ = [
    "gradient_edge",
    "has_hook",
    "has_joint_hook",
    "has_noted_hook",
    "hooks_noted",
    "may_hook_tensors",
    "note_hook",
]

_HOOKED = "pipecompile: a hook on a tensor"
_REGISTER = Tensor.register_hook
_LOCK = Lock()
_blocks = 0


def gradient_edge(tensor: Tensor) -> graph.GradientEdge:
    """Return where the gradient of a tensor flows in."""
    # torch finds the edge of a leaf by a view of it. Of a subclass of Tensor that is an alias of a
    # view, one node further from the leaf.
    with torch._C.DisableTorchFunctionSubclass():
        return graph.get_gradient_edge(tensor)


def note_hook(tensor: Tensor) -> None:
    """Note on the node that made a tensor that the tensor has a hook, which nothing else shows."""
    if tensor.grad_fn is not None:
        _metadata(tensor.grad_fn)[_HOOKED] = True


def may_hook_tensors(module: nn.Module) -> bool:
    """Return whether a module in `module` may put hooks on tensors in its forward: one of the
    user's, or one of torch with a forward hook.
    """
    return any(
        bool(part._forward_hooks or part._forward_pre_hooks)
        or not type(part).__module__.startswith("torch.")
        for part in module.modules()
    )


@contextmanager
def hooks_noted() -> Iterator[None]:
    """Note the hooks that are put on tensors in the block."""
    _note_by(1)
    try:
        yield
    finally:
        _note_by(-1)


def _note_by(change: int) -> None:
    """Count the blocks that are open, in all threads: the first one puts the method in the place of
    torch's, and the last one takes it away.
    """
    global _blocks
    with _LOCK:
        _blocks += change
        method = _register_noted if _blocks else _REGISTER
        Tensor.register_hook = method  # type: ignore[method-assign]


def _register_noted(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    handle = _REGISTER(tensor, hook)  # type: ignore[no-untyped-call]
    note_hook(tensor)
    return handle


def has_noted_hook(node: graph.Node) -> bool:
    """Return whether a tensor that the node made has a hook that was noted."""
    return _HOOKED in _metadata(node)


def _metadata(node: graph.Node) -> dict[str, object]:
    table: Any = node.metadata  # a property, which is declared as a method
    return cast("dict[str, object]", table)


def has_hook(parameter: Tensor) -> bool:
    """Return whether a hook changes or sees the gradient of `parameter` in a backward."""
    return bool(parameter._backward_hooks) or _has_node_hook(parameter)


def has_joint_hook(parameter: Tensor) -> bool:
    """Return whether a hook of `register_multi_grad_hook` waits for the gradient of `parameter`."""
    hooks = (parameter._backward_hooks or {}).values()
    # It may say of itself that it is the user's function.
    codes = (getattr(hook, "__code__", None) for hook in hooks)
    return any(code.co_filename == graph.__file__ for code in codes if code is not None)


def _has_node_hook(parameter: Tensor) -> bool:
    """Return whether the node that accumulates the gradient of `parameter` has a hook.

    Nodes do not show their hooks, but a new one gets into the table in which others are.
    """
    if not parameter.requires_grad:
        return False
    node = gradient_edge(parameter).node
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False
