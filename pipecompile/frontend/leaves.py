"""Leaves: the modules that become one node each."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError

__all__ = ["is_fused", "is_torch_leaf", "leaf_paths", "packs_padding"]

# Containers of torch.nn whose forward is recorded, so that a cut may lie inside.
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


def is_torch_leaf(module: nn.Module) -> bool:
    """Return whether a module is one of torch.nn or of a subclass, and not a container."""
    bases = [base for base in type(module).__mro__ if base is not nn.Module]
    is_of_torch = any(base.__module__.startswith("torch.nn.modules.") for base in bases)
    return is_of_torch and not isinstance(module, CONTAINERS)


def is_fused(module: nn.Module, inputs: Iterable[Tensor]) -> bool:
    """Return whether an encoder layer of torch computes in one operator, as it does in eval mode
    where nothing needs a gradient, unless it sees that its calls are recorded.
    """
    if not isinstance(module, nn.TransformerEncoderLayer) or module.training:
        return False
    needs = any(tensor.requires_grad for tensor in (*inputs, *module.parameters()))
    return not (needs and torch.is_grad_enabled())


def packs_padding(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Return whether an encoder of such layers may make nested tensors of padded samples."""
    if not isinstance(module, nn.TransformerEncoder) or not module.use_nested_tensor:
        return False
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    is_padded = given.get("src_key_padding_mask") is not None and given.get("mask") is None
    return is_padded and is_fused(module.layers[0], [next(iter(given.values()))])


def leaf_paths(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return the paths of the modules that `names` name, by path or by class.

    InputError if a name matches no module.
    """
    paths: set[str] = set()
    modules = [(path, module) for path, module in model.named_modules() if path]
    for name in names:
        matching = {path for path, module in modules if name in (path, *_class_names(module))}
        if not matching:
            raise InputError(
                f"leaf={name!r} is no module of {type(model).__name__}; give a path as in "
                "model.named_modules(), or the name of a class"
            )
        paths |= matching
    return frozenset(paths)


def _class_names(module: nn.Module) -> tuple[str, ...]:
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
