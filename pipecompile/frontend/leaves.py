"""Which modules become one node each."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pipecompile.errors import InputError

__all__ = ["is_of_torch", "paths_of"]

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


def is_of_torch(module: nn.Module) -> bool:
    """Whether a module is one of torch.nn or of a subclass, and no container."""
    bases = [base for base in type(module).__mro__ if base is not nn.Module]
    return any(
        base.__module__.startswith("torch.nn.modules.") for base in bases
    ) and not isinstance(module, CONTAINERS)


def paths_of(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """The paths of the modules that `names` name, by path or by class; InputError for one that is not there."""
    found: set[str] = set()
    modules = [(path, module) for path, module in model.named_modules() if path]
    for name in names:
        matching = {path for path, module in modules if name in (path, *_classes(module))}
        if not matching:
            raise InputError(
                f"leaf={name!r} is no module of {type(model).__name__}; give a path as in model.named_modules(), "
                "or the name of a class"
            )
        found |= matching
    return frozenset(found)


def _classes(module: nn.Module) -> tuple[str, ...]:
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
